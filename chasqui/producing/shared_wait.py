"""Durable adds share their waits, on a connection of their own.

While the server waits for the disk or a replica, it does nothing else for that link. So only
durable adds go over it, and those that come during a wait share the next one.
"""

import asyncio
import os
import threading
from typing import Any

from chasqui.errors import ChasquiError, OutcomeUnknownError
from chasqui.producing.durable import DurableRequest, replies_for_each, with_wait
from chasqui.transport.blocking import INTERRUPTED, BlockingConnection
from chasqui.transport.connection import Connection
from chasqui.transport.request import Request

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
            loop.call_soon(self._wait)  # the adds of this turn go together
        return future

    def _wait(self) -> None:
        """Send the adds that have come. The reply will send those that come meanwhile."""
        taken = [(request, future) for request, future in self._next if not future.done()]
        self._next = []
        self._is_waiting = bool(taken)
        if taken:
            whole = with_wait([request for request, _ in taken])
            shared = _Shared(self, taken, whole)
            try:
                self.post(whole, shared)
            except Exception as error:
                shared.set_exception(error)


class _Shared:
    """The outcome of a wait, for all adds that share it."""

    def __init__(
        self,
        connection: DurableConnection,
        taken: list[tuple[DurableRequest, asyncio.Future[Any]]],
        whole: Request,
    ) -> None:
        self._connection = connection
        self._taken = taken
        self._whole = whole

    def done(self) -> bool:
        return False  # even if all callers were cancelled: its reply begins the next wait

    def set_result(self, replies: list[Any], /) -> None:
        for (request, future), own in zip(self._taken, replies_for_each(replies), strict=True):
            request.link = self._whole.link
            if not future.done():
                future.set_result(own)
        self._connection._wait()

    def set_exception(self, error: Exception, /) -> None:
        for _, future in self._taken:
            if not future.done():
                future.set_exception(error)
        self._connection._wait()


# ── On threads ──────────────────────────────────────────────────────────────────────────────────


class BlockingDurableConnection(BlockingConnection):
    """The same for threads: the thread that holds the lock waits on behalf of every queued add."""

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
                    if line.is_busy:
                        raise RuntimeError(INTERRUPTED)
                    if request not in line.next:  # another thread took it, and left no outcome
                        raise OutcomeUnknownError(
                            "the thread that waited for all was interrupted: "
                            "the job may or may not have been added"
                        )
                    self._wait(line)
        except BaseException:
            if request in line.next:  # not sent yet: no other thread may send it later
                line.next.remove(request)
            raise
        if isinstance(request.outcome, BaseException):
            raise request.outcome
        return request.outcome

    def _wait(self, line: "_Line") -> None:
        """Send the adds that have come. An exception that is not about the server comes from a
        signal handler and is this thread's alone; the others find their adds without outcome."""
        taken: list[DurableRequest] = []
        try:
            line.is_busy = True
            taken, line.next = line.next, []
            whole = with_wait(taken)
            replies = super().call(whole)
            for request, own in zip(taken, replies_for_each(replies), strict=True):
                request.link = whole.link
                request.outcome = own
        except ChasquiError as error:
            for request in taken:
                request.outcome = error
        finally:
            line.is_busy = False


class _Line:
    """The durable adds of one process."""

    def __init__(self) -> None:
        #: Reentrant, so that a signal handler that adds is told instead of blocked.
        self.lock = threading.RLock()
        self.is_busy = False
        self.next: list[DurableRequest] = []
