"""What goes to the server and what becomes of it when the link drops: data, no I/O.

Operations are written once, as generators that yield requests and get replies (`Plan`); the asyncio
and the blocking connection both run them.
"""

import enum
import math
from collections.abc import Generator, Iterable
from typing import Any, Protocol, TypeAlias, TypeVar

from chasqui._core.buffer import CommandBuffer
from chasqui._core.reply import Builder, ReplyError

T = TypeVar("T")

#: Yields a request and is sent its reply, or yields several and is sent a list with each one's
#: reply or exception; returns the operation's result.
Plan: TypeAlias = Generator["Request | Iterable[Request]", Any, T]


class Effect(enum.Enum):
    """What a request does to the server, and so what a lost reply means."""

    #: Changes nothing: sent again.
    READ = enum.auto()
    #: Done twice is done once: sent again.
    IDEMPOTENT = enum.auto()
    #: Never sent again once it may have been applied: OutcomeUnknownError.
    ONCE = enum.auto()


class Script:
    """A Lua transition: its text and the name that Redis caches it under."""

    __slots__ = ("name", "sha", "source")

    def __init__(self, name: str, source: bytes, sha: bytes) -> None:
        self.name = name
        self.source = source
        self.sha = sha

    def __repr__(self) -> str:
        return f"Script({self.name!r})"


class Outcome(Protocol):
    """What the asyncio connection needs of a future."""

    def done(self) -> bool: ...
    def set_result(self, reply: Any, /) -> None: ...
    def set_exception(self, error: Exception, /) -> None: ...


class Request:
    """One or more commands, encoded, with the number of replies they bring.

    With one reply the result is that reply, else the list of them. An error reply is raised, unless
    `raises` is False; then it is in the result as a ReplyError.
    """

    __slots__ = (
        "builder",
        "count",
        "deadline_s",
        "effect",
        "frame",
        "is_in_doubt",
        "latest_s",
        "link",
        "outcome",
        "raises",
        "refusal",
        "replies",
        "script",
        "timeout_s",
        "tries",
    )

    def __init__(
        self,
        frame: bytes,
        effect: Effect,
        *,
        count: int = 1,
        builder: Builder | None = None,
        script: Script | None = None,
        raises: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        self.frame = frame
        self.effect = effect
        self.count = count
        self.builder = builder
        self.script = script
        self.raises = raises
        #: None: the connection's own.
        self.timeout_s = timeout_s
        # What the connection notes on the way:
        #: An `Outcome`, or, on a blocking connection, the reply or the exception itself.
        self.outcome: Any = None
        self.replies: list[Any] = []
        #: The link that its last answer came over.
        self.link: object = None
        self.deadline_s = 0.0
        #: The same by `clock.boot_s`: it is not sent after that, though its machine slept meanwhile
        #: and timers know nothing of it. The server may have forgotten by then that it was.
        self.latest_s = math.inf
        self.tries = 0
        #: Why the server would not do it just now.
        self.refusal: ReplyError | None = None
        #: A link was lost after it went out and before it was answered.
        self.is_in_doubt = False

    def send_source(self) -> None:
        """From now on carry the script itself: EVALSHA becomes EVAL, which the server caches."""
        assert self.script is not None
        name, source = self.script.sha, self.script.source
        by_name = b"$7\r\nEVALSHA\r\n$%d\r\n%b\r\n" % (len(name), name)
        by_source = b"$4\r\nEVAL\r\n$%d\r\n%b\r\n" % (len(source), source)
        self.frame = self.frame.replace(by_name, by_source, 1)
        self.script = None

    def fail(self, error: Exception) -> None:
        """Give it up. An outcome of the caller's own may never count as done: it is told once, and
        the request, wherever it still is, is nobody's from now on."""
        outcome = self.outcome
        if not outcome.done():
            self.outcome = _TOLD
            outcome.set_exception(error)


class _Told:
    """The outcome of a request that was given up: there is nobody left to tell."""

    def done(self) -> bool:
        return True


_TOLD = _Told()


def commands(*calls: tuple[Any, ...], effect: Effect, **options: Any) -> Request:
    """A request of plain commands, each a tuple of arguments."""
    buffer = CommandBuffer()
    for call in calls:
        buffer.command(*call)
    return Request(bytes(buffer), effect, count=len(calls), **options)


def first_error(request: Request, reply: Any) -> ReplyError | None:
    """The first error among a request's replies."""
    if request.count == 1:
        return reply if type(reply) is ReplyError else None
    return next((one for one in reply if type(one) is ReplyError), None)
