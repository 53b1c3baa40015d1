"""What this server can do, asked of each new connection, and what its error replies mean.

Versions lie (managed services, forks), so a capability is taken from COMMAND INFO or from a trial
call. The version only ever takes a capability away, where its form is known to be unsafe.
"""

import enum
import logging
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

from chasqui._core.reply import ReplyError
from chasqui.model.config import Secret
from chasqui.errors import AuthenticationError, ChasquiError, ServerError

logger = logging.getLogger(__name__)

Version: TypeAlias = tuple[int, int, int]

#: By release line, the first without a hole that concerns us and that we know of: the escape from
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
    """What one connection's server is and can do."""

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
        """True where WAITAOF may answer before the disk has it: Valkey up to 9.1 at least, and
        Redis before 8.0, when the last sync is less than a second old. Not with fsync always."""
        return self.waitaof and (self.name != "redis" or self.version < (8, 0, 0))

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}"


def handshake(
    *,
    username: str | None,
    password: Secret | None,
    db: int,
    client_name: str,
    library: str,
    probe_stream: bytes | None = None,
) -> Generator[list[tuple[Any, ...]], list[Any], ServerProfile]:
    """The first talk with a server: yields pipelines, is sent their replies, returns the profile.

    `probe_stream` is where a reader would read; with it the CLAIM form is tried, on a group that
    does not exist, so that nothing is delivered. Only the pipelines hold the password, and whoever
    sends one empties it: tools that collect errors keep the variables of each frame too.
    """
    who = ("SETNAME", client_name)
    # A user may have no password: without AUTH he would be somebody else, `default`.
    has_auth = bool(username) or password is not None
    (answer,) = yield [
        ("HELLO", 3, *(_auth(username or "default", password) if has_auth else ()), *who)
    ]
    calls: list[tuple[Any, ...]] = []
    if isinstance(answer, ReplyError):
        if not _is_unknown(answer):
            raise _refused(answer)
        # Older than RESP3, or told to refuse it: the same by single commands.
        if has_auth:
            calls.append(_auth(username, password))
        calls += [("CLIENT", *who), ("INFO", "server")]
        replies = yield calls
        for reply in (*replies[: 1 if has_auth else 0], replies[-1]):
            if isinstance(reply, ReplyError):
                raise _refused(reply)
        name, version = _from_info(replies[-1])
    else:
        name, version = _from_hello(answer)
    calls = [
        ("CLIENT", "SETINFO", "LIB-NAME", "chasqui"),
        ("CLIENT", "SETINFO", "LIB-VER", library),
        ("COMMAND", "INFO", "XACKDEL", "WAITAOF"),
        ("SELECT", db),
    ]
    if probe_stream is not None:
        trial = ("GROUP", "chasqui-probe", "chasqui-probe", "CLAIM", 1)
        calls.append(("XREADGROUP", *trial, "STREAMS", probe_stream, ">"))
    if db == 0:
        del calls[3]
    replies = yield calls
    _, _, infos, *rest = replies
    for reply in replies:
        # Nothing is learned from a server that has no time for questions.
        if isinstance(reply, ReplyError) and answer_to(reply) is Answer.WAIT:
            raise NotReadyError(reply.message, code=reply.code)
    if db and isinstance(rest[0], ReplyError):
        raise exception_for(rest[0])
    known = [bool(info) for info in infos] if isinstance(infos, list) else []
    known += [False, False]  # a server that answers anything else knows neither
    can_claim = probe_stream is not None and _took_claim(rest[-1])
    profile = ServerProfile(
        name,
        version,
        xackdel=known[0] and not (8, 2, 0) <= version < (8, 2, 3),
        claim=can_claim,
        waitaof=known[1],
    )
    _warn_if_unsafe(profile)
    return profile


def _auth(username: str | None, password: Secret | None) -> tuple[str, ...]:
    names = (username,) if username else ()
    return ("AUTH", *names, password.reveal() if password is not None else "")


class NotReadyError(ServerError):
    """The server is up but busy with itself: loading its data, or running a script."""


class Answer(enum.Enum):
    """What to do about an error reply. None of them means that the command was applied."""

    RAISE = enum.auto()
    #: The server is busy with itself: send it again in a moment.
    WAIT = enum.auto()
    #: This is not the right server any more, or it forgot who we are: find it anew.
    REDIAL = enum.auto()
    #: Another node has this slot for this one command.
    ASK = enum.auto()
    #: The script is not in the server's cache: load it, send it again.
    LOAD = enum.auto()


_ANSWERS = {
    "LOADING": Answer.WAIT,
    "BUSY": Answer.WAIT,
    "TRYAGAIN": Answer.WAIT,
    "CLUSTERDOWN": Answer.WAIT,
    "MASTERDOWN": Answer.WAIT,
    "READONLY": Answer.REDIAL,
    "MOVED": Answer.REDIAL,
    "NOAUTH": Answer.REDIAL,
    "UNBLOCKED": Answer.REDIAL,
    "ASK": Answer.ASK,
    "NOSCRIPT": Answer.LOAD,
}
# A script passes on the error of a command inside it: up to 6.2 as "ERR Error running script …
# @user_script:1: WRONGTYPE …" or "… -READONLY …", from 7.0 on with the code in front as usual.
_INNER = re.compile(
    r"(?:-|@user_script: ?\d+: )"
    r"(READONLY|OOM|MISCONF|NOPERM|WRONGTYPE|MOVED|CLUSTERDOWN|TRYAGAIN)\b"
)
# Rights have no code there, neither before 7.0 nor after.
_DENIED = re.compile(r"ACL failure in script|The user executing the script can't")


def answer_to(error: ReplyError) -> Answer:
    """What an error reply asks of us."""
    return _ANSWERS.get(_code(error), Answer.RAISE)


def moved_to(error: ReplyError) -> tuple[str, int] | None:
    """The node that a MOVED or ASK reply names; None where it leaves the host open."""
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
    """A server's words without ours: of a command that it does not know it repeats the arguments,
    and those of AUTH and HELLO are a password."""
    return message.partition(", with args beginning with")[0]


def eviction_policy(info: Any) -> str:
    """What INFO says that the server does when it is full; `unknown` where it does not say."""
    return _facts(info).get("maxmemory_policy", "unknown")


def uptime_s(info: Any) -> float:
    """For how long INFO says that the server has been up; infinite where it does not say."""
    return float(_facts(info).get("uptime_in_seconds", "inf"))


def mapping(reply: Any) -> dict[bytes, Any]:
    """A reply of names and values, in RESP3's form or RESP2's; empty for an error."""
    if isinstance(reply, dict):
        return reply
    return dict(zip(reply[::2], reply[1::2], strict=True)) if isinstance(reply, list) else {}


def mappings(reply: Any) -> list[dict[bytes, Any]]:
    """A reply of several such."""
    return [mapping(one) for one in reply] if isinstance(reply, list) else []


def _code(error: ReplyError) -> str:
    code = error.code
    if code == "ERR" or code.startswith("@user_script"):
        if inner := _INNER.search(error.message):
            return inner[1]
        if _DENIED.search(error.message):
            return "NOPERM"
    return code


def _is_unknown(error: ReplyError) -> bool:
    text = error.message.lower()
    return error.code == "NOPROTO" or "unknown command" in text or "syntax error" in text


def _refused(error: ReplyError) -> ChasquiError:
    """What a refused greeting raises. Its text is the server's own."""
    error = ReplyError(without_arguments(error.message))
    if answer_to(error) is Answer.WAIT:
        return NotReadyError(error.message, code=error.code)
    if error.code == "NOAUTH":
        return AuthenticationError(
            "NOAUTH the server wants a password, and none was given: put it into the URL, as in "
            "redis://:password@host or redis://user:password@host"
        )
    # "ERR invalid password", and "ERR AUTH <password> called without any password configured".
    if "password" in error.message.lower():
        return AuthenticationError(error.message)
    return exception_for(error)


def _took_claim(reply: Any) -> bool:
    """NOGROUP means that the words were understood; anything else that they were not."""
    return isinstance(reply, ReplyError) and reply.code == "NOGROUP"


def _from_hello(answer: Any) -> tuple[str, Version]:
    facts = answer if isinstance(answer, dict) else {}
    name, version = facts.get(b"server"), facts.get(b"version")
    return (
        name.decode(errors="replace") if isinstance(name, bytes) else "redis",
        _version(version if isinstance(version, bytes) else b""),
    )


def _from_info(reply: Any) -> tuple[str, Version]:
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


def _warn_if_unsafe(profile: ServerProfile) -> None:
    seen = (profile.name, profile.version)
    advice = profile.advice
    if advice and seen not in _warned:
        _warned.add(seen)
        logger.warning("%s %s", profile, advice, extra={"server_version": str(profile)})


def warn_if_early(hello: Any) -> None:
    """Say it once if the server that answered HELLO so may confirm what is not on the disk."""
    name, version = _from_hello(hello)
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
