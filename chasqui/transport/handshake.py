"""The first exchange on a new link: say who we are, and ask what the server can do."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

from chasqui._core.reply import ReplyError
from chasqui._version import VERSION
from chasqui.errors import AuthenticationError, ChasquiError
from chasqui.model.config import Endpoint
from chasqui.transport.request import Effect, Request, commands
from chasqui.transport.server import (
    NotReadyError,
    Recovery,
    ServerProfile,
    Version,
    exception_for,
    meaning_of,
    named_by_hello,
    named_by_info,
    warn_if_unsafe,
    without_arguments,
)

#: Yields requests, is sent what they bring, returns the server's profile.
Talk: TypeAlias = Generator[Request, Any, ServerProfile]


@dataclass(frozen=True, slots=True)
class Handshake:
    """Who we say we are on each new link."""

    client_name: str
    #: Where a reader would read. With it the server is asked whether XREADGROUP takes CLAIM.
    probe_stream: bytes | None

    def talk(self, endpoint: Endpoint) -> Talk:
        """The handshake with one server.

        No variable here holds the password: tools that collect errors keep the variables of each
        frame too.
        """
        name = ("SETNAME", self.client_name)
        # A user may have no password; without AUTH the link would be of the user `default`.
        has_auth = bool(endpoint.username) or endpoint.password is not None
        greeting = yield _read(
            ("HELLO", 3, *(_auth(endpoint, "default") if has_auth else ()), *name)
        )
        if not isinstance(greeting, ReplyError):
            return (yield from self._ask(endpoint, *named_by_hello(greeting)))
        if not _is_unknown(greeting):
            raise _refused(greeting)
        # Older than RESP3, or told to refuse it: the same by single commands.
        calls = (("CLIENT", *name), ("INFO", "server"))
        replies = yield _read(_auth(endpoint), *calls) if has_auth else _read(*calls)
        for reply in (*replies[:has_auth], replies[-1]):
            if isinstance(reply, ReplyError):
                raise _refused(reply)
        return (yield from self._ask(endpoint, *named_by_info(replies[-1])))

    def _ask(self, endpoint: Endpoint, name: str, version: Version) -> Talk:
        """Ask what the server can do. CLAIM is tried on a group that does not exist, so that
        nothing is delivered."""
        calls: list[tuple[Any, ...]] = [
            ("CLIENT", "SETINFO", "LIB-NAME", "chasqui"),
            ("CLIENT", "SETINFO", "LIB-VER", VERSION),
            ("COMMAND", "INFO", "XACKDEL", "WAITAOF"),
        ]
        if endpoint.db:
            calls.append(("SELECT", endpoint.db))
        if self.probe_stream is not None:
            trial = ("GROUP", "chasqui-probe", "chasqui-probe", "CLAIM", 1)
            calls.append(("XREADGROUP", *trial, "STREAMS", self.probe_stream, ">"))
        replies = yield _read(*calls)
        for reply in replies:
            # Nothing is learned from a server that has no time for questions.
            if isinstance(reply, ReplyError) and meaning_of(reply) is Recovery.WAIT:
                raise NotReadyError(reply.message, code=reply.code)
        if endpoint.db and isinstance(replies[3], ReplyError):
            raise exception_for(replies[3])
        known = [bool(info) for info in replies[2]] if isinstance(replies[2], list) else []
        known += [False, False]  # a server that answers anything else knows neither
        profile = ServerProfile(
            name,
            version,
            xackdel=known[0] and not (8, 2, 0) <= version < (8, 2, 3),
            claim=self.probe_stream is not None and _took_claim(replies[-1]),
            waitaof=known[1],
        )
        warn_if_unsafe(profile)
        return profile


def _read(*calls: tuple[Any, ...]) -> Request:
    return commands(*calls, effect=Effect.READ)


def _auth(endpoint: Endpoint, default: str | None = None) -> tuple[str, ...]:
    username, password = endpoint.username or default, endpoint.password
    names = (username,) if username else ()
    return ("AUTH", *names, password.reveal() if password is not None else "")


def _is_unknown(error: ReplyError) -> bool:
    text = error.message.lower()
    return error.code == "NOPROTO" or "unknown command" in text or "syntax error" in text


def _refused(error: ReplyError) -> ChasquiError:
    """What a refused greeting raises. Its text is the server's own."""
    error = ReplyError(without_arguments(error.message))
    if meaning_of(error) is Recovery.WAIT:
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
