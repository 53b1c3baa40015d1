"""What a server can do, which each new link asks, and what its error replies mean.

Versions lie (managed services, forks), so a capability is taken from COMMAND INFO or from a trial
call. The version only ever takes a capability away, where its form is known to be unsafe.
"""

import enum
import logging
import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from chasqui._core.reply import ReplyError
from chasqui.errors import AuthenticationError, ChasquiError, ServerError

logger = logging.getLogger(__name__)

Version: TypeAlias = tuple[int, int, int]

#: By release line, the first version without a known hole that concerns us: the escape from
#: Lua's sandbox (CVE-2025-49844), the overflow in XACKDEL (CVE-2025-62507), the use after free that
#: hits blocked readers (CVE-2026-23479). A line that is not here is as unsafe as the next one.
_SAFE_FROM: dict[str, tuple[Version, ...]] = {
    "redis": ((6, 2, 20), (7, 2, 14), (7, 4, 9), (8, 0, 4), (8, 2, 6), (8, 4, 3), (8, 6, 3)),
    "valkey": ((7, 2, 11), (8, 0, 6), (8, 1, 7), (9, 0, 4)),
}
_warned: set[tuple[str, Version]] = set()
_warned_of_disk: set[tuple[str, Version]] = set()


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """What the server of one link is and can do."""

    name: str
    version: Version
    #: XACKDEL of many ids is there and sound.
    xackdel: bool = False
    #: XREADGROUP takes CLAIM. False where nobody asked: only readers do.
    claim: bool = False
    waitaof: bool = False

    @property
    def advice(self) -> str:
        """What to do about a version with known holes; empty if none is known."""
        lines = _SAFE_FROM.get(self.name, ())
        safe = next((safe for safe in lines if safe[:2] >= self.version[:2]), None)
        if safe is None or self.version >= safe or not any(self.version):
            return ""
        wanted = ".".join(map(str, safe))
        return f"has known holes that concern a queue: upgrade to {wanted} or newer"

    @property
    def confirms_early(self) -> bool:
        """True if WAITAOF may answer before the data is on the disk: on Valkey up to 9.1 at least,
        and on Redis before 8.0, when the last sync is less than a second old. Not with `appendfsync
        always`."""
        return self.waitaof and (self.name != "redis" or self.version < (8, 0, 0))

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}"


class NotReadyError(ServerError):
    """The server is up but busy with itself: loading its data, or running a script."""


class Recovery(enum.Enum):
    """What to do about an error reply. None of them means that the command was applied."""

    RAISE = enum.auto()
    #: The server is busy: send it again in a moment.
    WAIT = enum.auto()
    #: The link leads to a wrong server, or the server forgot who we are: dial again.
    REDIAL = enum.auto()
    #: Send this one command to the node that is taking the hash slot over.
    ASK = enum.auto()
    #: The script is not in the server's cache: send its text.
    LOAD = enum.auto()


_MEANINGS = {
    "LOADING": Recovery.WAIT,
    "BUSY": Recovery.WAIT,
    "TRYAGAIN": Recovery.WAIT,
    "CLUSTERDOWN": Recovery.WAIT,
    "MASTERDOWN": Recovery.WAIT,
    "READONLY": Recovery.REDIAL,
    "MOVED": Recovery.REDIAL,
    "NOAUTH": Recovery.REDIAL,
    "UNBLOCKED": Recovery.REDIAL,
    "ASK": Recovery.ASK,
    "NOSCRIPT": Recovery.LOAD,
}
# A script passes on the error of a command inside it: up to 6.2 as "ERR Error running script …
# @user_script:1: WRONGTYPE …" or "… -READONLY …", from 7.0 on with the code in front as usual.
_INNER = re.compile(
    r"(?:-|@user_script: ?\d+: )"
    r"(READONLY|OOM|MISCONF|NOPERM|WRONGTYPE|MOVED|CLUSTERDOWN|TRYAGAIN)\b"
)
# A missing right has no code of its own there, in any version.
_DENIED = re.compile(r"ACL failure in script|The user executing the script can't")


def meaning_of(error: ReplyError) -> Recovery:
    """What an error reply asks for, whatever the request was."""
    return _MEANINGS.get(_code(error), Recovery.RAISE)


def moved_to(error: ReplyError) -> tuple[str, int] | None:
    """The node that a MOVED or ASK reply names; None if it names no host."""
    words = error.message.split()
    if len(words) < 3 or words[0] not in ("MOVED", "ASK"):
        return None
    host, _, port = words[2].rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    return (host.strip("[]"), int(port)) if host and is_port else None


def exception_for(error: ReplyError) -> ChasquiError:
    """The exception that a caller gets for an error reply."""
    code = _code(error)
    if code in ("NOAUTH", "WRONGPASS", "NOPERM"):
        return AuthenticationError(error.message)
    return ServerError(error.message, code=code)


def without_arguments(message: str) -> str:
    """An error message without our arguments: a server repeats those of a command that it does not
    know, and an argument of AUTH or HELLO is the password."""
    return message.partition(", with args beginning with")[0]


def eviction_policy(info: Any) -> str:
    """What the server does when it is full, by INFO; `unknown` if INFO does not say."""
    return _facts(info).get("maxmemory_policy", "unknown")


def uptime_s(info: Any) -> float:
    """For how long the server has been up, by INFO; infinite if INFO does not say."""
    return float(_facts(info).get("uptime_in_seconds", "inf"))


def time_us(reply: list[bytes]) -> int:
    """The reply to TIME, in microseconds since 1970."""
    return int(reply[0]) * 1_000_000 + int(reply[1])


def mapping(reply: Any) -> dict[bytes, Any]:
    """A reply of names and values, in RESP3's form or RESP2's; empty for an error."""
    if isinstance(reply, dict):
        return reply
    return dict(zip(reply[::2], reply[1::2], strict=True)) if isinstance(reply, list) else {}


def mappings(reply: Any) -> list[dict[bytes, Any]]:
    """A reply that is a list of those."""
    return [mapping(one) for one in reply] if isinstance(reply, list) else []


def is_group_gone(error: Exception) -> bool:
    """Whether the server refused because the stream has no such group. Where a script was refused,
    the code may be in the middle of the text."""
    return "NOGROUP" in str(error)


def _code(error: ReplyError) -> str:
    code = error.code
    if code == "ERR" or code.startswith("@user_script"):
        if inner := _INNER.search(error.message):
            return inner[1]
        if _DENIED.search(error.message):
            return "NOPERM"
    return code


def named_by_hello(reply: Any) -> tuple[str, Version]:
    """The name and the version of a server that answers HELLO so."""
    facts = reply if isinstance(reply, dict) else {}
    name, version = facts.get(b"server"), facts.get(b"version")
    return (
        name.decode(errors="replace") if isinstance(name, bytes) else "redis",
        _version(version if isinstance(version, bytes) else b""),
    )


def named_by_info(reply: Any) -> tuple[str, Version]:
    """The same by INFO."""
    facts = _facts(reply)
    name = "valkey" if "valkey_version" in facts else "redis"
    return name, _version(facts.get(f"{name}_version", "").encode())


def _facts(info: Any) -> dict[str, str]:
    text = info.decode(errors="replace") if isinstance(info, bytes) else ""
    return dict(line.partition(":")[::2] for line in text.splitlines())


def _version(text: bytes) -> Version:
    numbers = [int(part) for part in re.findall(rb"\d+", text)[:3]]
    major, minor, patch = [*numbers, 0, 0, 0][:3]
    return major, minor, patch


def warn_if_unsafe(profile: ServerProfile) -> None:
    """Warn of a version with known holes, once."""
    seen = (profile.name, profile.version)
    advice = profile.advice
    if advice and seen not in _warned:
        _warned.add(seen)
        logger.warning("%s %s", profile, advice, extra={"server_version": str(profile)})


def warn_if_early(hello: Any) -> None:
    """Warn once if a server, known by its reply to HELLO, may confirm durable adds too early."""
    name, version = named_by_hello(hello)
    profile = ServerProfile(name, version, waitaof=True)
    seen = (name, version)
    if any(version) and profile.confirms_early and seen not in _warned_of_disk:
        _warned_of_disk.add(seen)
        logger.warning(
            "%s may confirm durable adds up to a second before they are on its disk, "
            "unless its appendfsync is always",
            profile,
            extra={"server_version": str(profile)},
        )
