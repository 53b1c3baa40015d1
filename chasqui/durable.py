"""Adds that wait for the disk or for a replica: together, on a connection of their own.

The wait, WAITAOF or WAIT, is for what its link wrote before, and the server does nothing else for
that link meanwhile. So the last chunk of each add goes out with the wait right behind it, and what
comes while a wait is out shares the next one. Should the link be lost, all of an add is sent once
more: a server that lost jobs as it died is given them anew, and is then waited for.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from chasqui._core.reply import ReplyError
from chasqui.adding import Durable
from chasqui.blocking import BlockingConnection
from chasqui.connection import Connection
from chasqui.errors import OutcomeUnknownError
from chasqui.request import Effect, Plan, Request, commands
from chasqui.server import exception_for

#: How long the disk or the replica may take to confirm.
WAIT_MS: Final = 10_000
#: How often the chunks of an add are sent, if the link is lost in their midst each time.
ROUNDS: Final = 5


def confirmed(chunks: Sequence[Callable[[], Request]], durable: Durable) -> Plan[list[Any]]:
    """For each chunk its reply or its exception, once all of them are safe.

    They are made one after the other as they are sent, and may be made again: each must be the same
    then, and applied once however often it is sent.
    """
    *most, last = chunks
    for _ in range(ROUNDS):
        sent: list[Request] = []
        replies: list[Any] = (yield _made(most, sent)) if most else []
        if any(isinstance(reply, Exception) for reply in replies):
            return replies
        request = DurableRequest(last(), durable)
        try:
            reply, answer = yield request
        except Exception as error:
            return [*replies, error]
        if isinstance(reply, ReplyError):
            return [*replies, exception_for(reply)]
        if all(one.link is request.link for one in sent):
            if not isinstance(reply, list):  # else the queue is full: nothing was added
                _check(answer, durable)
            return [*replies, reply]
    raise OutcomeUnknownError(
        f"the jobs were added, but perhaps not for good: the link was lost {ROUNDS} times meanwhile"
    )


def _made(chunks: Iterable[Callable[[], Request]], made: list[Request]) -> Iterator[Request]:
    for make in chunks:
        made.append(make())
        yield made[-1]


class DurableRequest(Request):
    """A chunk that is to be confirmed before it is answered. The reply is its own and that to the
    wait behind it."""

    __slots__ = ("durable",)

    def __init__(self, chunk: Request, durable: Durable) -> None:
        # By its source: were the script unknown, the wait behind it would be for nothing.
        if chunk.script is not None:
            chunk.send_source()
        super().__init__(chunk.frame, Effect.IDEMPOTENT, raises=False)
        self.durable = durable


def wait_words(durable: Durable, wait_ms: int) -> tuple[str | int, ...]:
    """The command that waits for the disk or a replica."""
    return ("WAITAOF", 1, 0, wait_ms) if durable == "disk" else ("WAIT", 1, wait_ms)


def _check(answer: Any, durable: Durable) -> None:
    """Raise OutcomeUnknownError if the wait was in vain."""
    if isinstance(answer, ReplyError):
        raise OutcomeUnknownError(f"the jobs were added, but perhaps not for good: {answer}")
    if (answer[0] if durable == "disk" else answer) < 1:
        raise OutcomeUnknownError(
            f"the jobs were added, but no {durable} confirmed them within {WAIT_MS} ms"
        )


def _joined(requests: Sequence[DurableRequest]) -> Request:
    """All of them, with one wait behind."""
    wait = commands(wait_words(requests[0].durable, WAIT_MS), effect=Effect.READ)
    return Request(
        b"".join([*(request.frame for request in requests), wait.frame]),
        Effect.IDEMPOTENT,
        count=len(requests) + 1,
        raises=False,
    )


# ── On asyncio ──────────────────────────────────────────────────────────────────────────────────


class DurableConnection(Connection):
    """A connection on which durable requests share their waits."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._next: list[tuple[DurableRequest, asyncio.Future[Any]]] = []
        self._is_waiting = False

    def submit(self, request: Request) -> asyncio.Future[Any]:
        if not isinstance(request, DurableRequest):
            return super().submit(request)
        loop = self.check_owner()
        future: asyncio.Future[Any] = loop.create_future()
        self._next.append((request, future))
        if not self._is_waiting:
            self._is_waiting = True
            loop.call_soon(self._wait)  # those of this turn go together
        return future

    def _wait(self) -> None:
        """Send what has come; its reply sends what comes until then."""
        taken = [(request, future) for request, future in self._next if not future.done()]
        self._next = []
        self._is_waiting = bool(taken)
        if taken:
            joined = _joined([request for request, _ in taken])
            shared = _Shared(self, taken, joined)
            try:
                self.post(joined, shared)
            except Exception as error:
                shared.set_exception(error)


class _Shared:
    """The outcome of a wait, for all that share it."""

    def __init__(
        self,
        connection: DurableConnection,
        taken: list[tuple[DurableRequest, asyncio.Future[Any]]],
        joined: Request,
    ) -> None:
        self._connection = connection
        self._taken = taken
        self._joined = joined

    def done(self) -> bool:
        return False  # whoever has gone: the next wait begins when this one is over

    def set_result(self, replies: list[Any], /) -> None:
        *own, answer = replies
        for (request, future), reply in zip(self._taken, own, strict=True):
            request.link = self._joined.link
            if not future.done():
                future.set_result((reply, answer))
        self._connection._wait()

    def set_exception(self, error: Exception, /) -> None:
        for _, future in self._taken:
            if not future.done():
                future.set_exception(error)
        self._connection._wait()


# ── On threads ──────────────────────────────────────────────────────────────────────────────────


class BlockingDurableConnection(BlockingConnection):
    """The same for threads: who waits, waits for all that came before it could."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        #: By process: a lock that another thread held at a fork stays held for ever.
        self._lines: dict[int, _Line] = {}

    def call(self, request: Request) -> Any:
        if not isinstance(request, DurableRequest):
            return super().call(request)
        line = self._lines.setdefault(os.getpid(), _Line())
        request.outcome = None
        line.next.append(request)
        try:
            with line.lock:
                if request.outcome is None:
                    self._wait(line)
        except BaseException:
            if request in line.next:  # not sent yet: nobody is to send it later
                line.next.remove(request)
            raise
        if isinstance(request.outcome, BaseException):
            raise request.outcome
        return request.outcome

    def _wait(self, line: "_Line") -> None:
        taken, line.next = line.next, []
        outcome: BaseException | None = None
        try:
            joined = _joined(taken)
            *own, answer = super().call(joined)
            for request, reply in zip(taken, own, strict=True):
                request.link = joined.link
                request.outcome = (reply, answer)
        except Exception as error:
            outcome = error
        except BaseException:
            outcome = OutcomeUnknownError("the thread that waited for all was interrupted")
            raise
        finally:
            if outcome is not None:
                for request in taken:
                    request.outcome = outcome


class _Line:
    """Durable requests of one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.next: list[DurableRequest] = []
