"""A request, and what losing its reply means: data, no I/O.

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
    """What a connection needs of a future: where the reply or the exception goes."""

    def done(self) -> bool: ...
    def set_result(self, reply: Any, /) -> None: ...
    def set_exception(self, error: Exception, /) -> None: ...


class Request:
    """One or more commands, encoded, with the number of replies they bring.

    With one reply the result is that reply, else the list of them. An error reply is raised, unless
    `raises` is False; then it is in the result as a ReplyError.
    """

    __slots__ = (
        "boot_deadline_s",
        "builder",
        "count",
        "deadline_s",
        "effect",
        "frame",
        "is_in_doubt",
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
        #: None: the connection's timeout.
        self.timeout_s = timeout_s
        # The flow and the links write the rest.
        #: An `Outcome`.
        self.outcome: Any = None
        self.replies: list[Any] = []
        #: The link that its last reply came over.
        self.link: object = None
        self.deadline_s = 0.0
        #: The same by `clock.boot_s`, which goes on while the machine sleeps; timers do not. The
        #: request is not sent after that: the server may have forgotten that it was sent before.
        self.boot_deadline_s = math.inf
        self.tries = 0
        #: The last refusal that did not end it.
        self.refusal: ReplyError | None = None
        #: It was in flight when a link was lost: it may or may not have been applied.
        self.is_in_doubt = False

    def send_source(self) -> None:
        """Send the script's text from now on: EVALSHA becomes EVAL, and the server caches it."""
        assert self.script is not None
        name, source = self.script.sha, self.script.source
        by_name = b"$7\r\nEVALSHA\r\n$%d\r\n%b\r\n" % (len(name), name)
        by_source = b"$4\r\nEVAL\r\n$%d\r\n%b\r\n" % (len(source), source)
        self.frame = self.frame.replace(by_name, by_source, 1)
        self.script = None


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
