"""The same connection over a plain socket: for threads, forked children, executors and scripts.

A call sends its requests and reads their replies under one lock; between calls nothing runs, no
thread and no event loop. Every process has a link of its own: a forked child never touches its
parent's.
"""

import asyncio
import functools
import inspect
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from chasqui import clock, topology
from chasqui._core.hold import Hold
from chasqui._core.reply import ProtocolError
from chasqui.transport.blocking_link import BlockingLink, is_loss, open_link
from chasqui.model.config import AnyCredentialProvider, Credentials, Endpoint
from chasqui.errors import ChasquiError, ClosedError, UnreachableError
from chasqui.transport.recovery import (
    CONNECT_TIMEOUT_S,
    LOOK_S,
    REQUEST_TIMEOUT_S,
    Introduction,
    Redial,
    Search,
    busy_wait_s,
    dial_failure,
    is_final,
    loss,
    make_inbox,
    refuse,
)
from chasqui.transport.request import Effect, Plan, Request, commands, first_error
from chasqui.transport.server import Answer, ServerProfile, exception_for, moved_to

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PENDING: Any = object()
#: Told at once: to wait would be for ever.
INTERRUPTED = (
    "this thread is in a call of this connection already: a signal handler or a finalizer cannot "
    "use it meanwhile; let it set a flag, or give it a queue of its own"
)


class BlockingConnection:
    """A connection to the server that owns a queue, for any number of threads.

    Dialled when first needed and kept alive. `credential_provider` may be a plain function. Those
    with the same `search` look for a lost server together, with asyncio connections too.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        key: bytes,
        client_name: str = "chasqui",
        credential_provider: AnyCredentialProvider | None = None,
        is_reader: bool = False,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        search: Search | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._key = key
        self._introduction = Introduction(client_name, key if is_reader else None)
        self._credential_provider = credential_provider
        self._request_timeout_s = request_timeout_s
        self._search = search or Search()
        self._is_closed = False
        self._sides: dict[int, _Side] = {}

    @property
    def is_connected(self) -> bool:
        return self._side().link is not None

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def profile(self) -> ServerProfile | None:
        """What the server at the other end can do; None while there is no link."""
        link = self._side().link
        return None if link is None else link.profile

    def connect(self) -> ServerProfile:
        """Dial if need be; the server's profile. One whose disk is full refuses even the PING, and
        is there all the same."""
        while (profile := self.profile) is None:
            self.execute("PING", effect=Effect.READ, raises=False)
        return profile

    def execute(self, *arguments: Any, effect: Effect, **options: Any) -> Any:
        """Send one command given as plain arguments; its reply."""
        return self.call(commands(arguments, effect=effect, **options))

    def run(self, plan: Plan[T]) -> T:
        """Run an operation to its end; its result."""
        try:
            step = next(plan)
            while True:
                try:
                    reply = self.call(step) if isinstance(step, Request) else self._exchange(step)
                except Exception as error:
                    step = plan.throw(error)
                else:
                    step = plan.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def call(self, request: Request) -> Any:
        """Send a request; its reply."""
        *_, outcome = self._exchange((request,))  # two, where a signal's handler raised in between
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def call_each(self, requests: Iterable[Request], ahead: int) -> list[Any]:
        """Send requests, each once there are fewer than `ahead` that wait for their replies; for
        each its reply or its exception.

        What is sent ahead is done in one go, and nobody else is served meanwhile.
        """
        return self._exchange(requests, ahead)

    def close(self) -> None:
        """Drop the link; calls of other threads raise ClosedError. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        side = self._side()
        if (link := side.link) is not None:
            link.interrupt()
        with side.lock:
            if not side.is_busy:  # else a call that we interrupt: it lets go as it ends
                side.let_go()

    def _exchange(self, requests: Iterable[Request], ahead: float = math.inf) -> list[Any]:
        """Send each request as soon as it is made, while the server works on those before; for
        each its reply or its exception. The first that cannot be made is the last."""
        side = self._side()
        deadline_s = time.monotonic() + self._request_timeout_s
        with Hold(side.lock, self._request_timeout_s) as is_held:
            if not is_held:
                raise UnreachableError(f"no answer from {self.endpoint} to earlier calls in time")
            if side.is_busy:
                raise RuntimeError(INTERRUPTED)
            try:
                side.is_busy = True
                if self._is_closed:
                    raise ClosedError("the connection is closed")
                return _Exchange(self, side, iter(requests), deadline_s, ahead).run()
            finally:
                side.is_busy = False  # first: a signal's handler may raise at the next call
                if self._is_closed:
                    side.let_go()

    def _side(self) -> "_Side":
        """This process's link and lock. Without a lock: one held at a fork stays held for ever."""
        pid = os.getpid()
        side = self._sides.get(pid)
        if side is None:
            side = self._sides.setdefault(pid, _Side(self.endpoint, self._search))
            for other in self._sides.keys() - {pid}:  # in one go: another thread may do the same
                parent = self._sides.pop(other, None)
                if parent is not None and parent.link is not None:
                    parent.link.close()  # our copy only: no shutdown
        return side


class _Side:
    """What belongs to one process."""

    def __init__(self, endpoint: Endpoint, search: Search) -> None:
        #: One that its own thread gets again: who interrupts a call there finds it busy.
        self.lock = threading.RLock()
        self.is_busy = False
        self.link: BlockingLink | None = None
        self.redial = Redial(search)
        self.directory = topology.Directory(endpoint)
        #: The node that the last MOVED named.
        self.node: tuple[str, int] | None = None
        self.was_connected = False
        self._inbox: memoryview | None = None

    def inbox(self) -> memoryview:
        """What all its links read into: they are never in use at the same time. For who has the
        lock; a `cached_property` would have one of its own, and that may be held at a fork."""
        if self._inbox is None:
            self._inbox = make_inbox()
        return self._inbox

    def drop_link(self) -> None:
        """The link is lost, or another one is needed."""
        if self.link is not None:
            self.close_link()
            self.redial.link_down(time.monotonic())

    def close_link(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.close()

    def let_go(self) -> None:
        """Keep nothing open. A second call does nothing."""
        self.close_link()
        self.directory.close()


class _Exchange:
    """The requests of one call on their way, from the first byte to the last reply."""

    def __init__(
        self,
        connection: BlockingConnection,
        side: _Side,
        source: Iterator[Request],
        deadline_s: float,
        ahead: float,
    ) -> None:
        self._connection = connection
        self._endpoint = connection.endpoint
        self._side = side
        self._source = source
        self._ahead = ahead
        #: Of the first request: it has waited for the lock as well.
        self._deadline_s: float | None = deadline_s
        self._all: list[Request] = []
        self._unsent: deque[Request] = deque()
        #: Refused for now, and sent again in a moment.
        self._held: list[Request] = []
        self._asks: list[tuple[tuple[str, int] | None, Request]] = []
        self._must_redial = False
        self._source_error: Exception | None = None

    def run(self) -> list[Any]:
        """For each request its reply or its exception."""
        while self._unsent or self._draw():
            link = self._ready_link()
            if link is None:
                continue
            try:
                link.pump(functools.partial(self._take, link), self._on_reply)
            except BaseException as error:
                if not is_loss(error):
                    self._side.close_link()  # replies are still to come that nobody would take
                    raise
                self._lose(link)
                if isinstance(error, TimeoutError | ProtocolError):  # else the next dial will tell
                    self._side.redial.missed(self._endpoint, error, time.monotonic())
            self._follow_up()
        outcomes = [request.outcome for request in self._all]
        return outcomes if self._source_error is None else [*outcomes, self._source_error]

    # ── Sending ─────────────────────────────────────────────────────────────────────────────────

    def _draw(self) -> bool:
        """Take the next request from the source; False if there is none."""
        if self._source_error is not None:
            return False
        try:
            request = next(self._source, None)
        except Exception as error:  # those before it are on their way, and may be applied
            self._source_error = error
            return False
        if request is None:
            return False
        timeout_s = request.timeout_s
        if timeout_s is None:
            timeout_s = self._connection._request_timeout_s
        deadline_s, self._deadline_s = self._deadline_s, None
        latest_s = time.monotonic() + timeout_s
        request.deadline_s = latest_s if deadline_s is None else min(latest_s, deadline_s)
        request.latest_s = clock.boot_s() + timeout_s
        request.outcome = _PENDING
        self._all.append(request)
        self._unsent.append(request)
        return True

    def _take(self, link: BlockingLink) -> Request | None:
        """The next request for the link; None while there is none for it."""
        if self._must_redial or len(link.inflight) >= self._ahead:
            return None
        while self._unsent or self._draw():
            request = self._unsent.popleft()
            if request.latest_s > clock.boot_s():
                return request
            _settle(request, loss(request, self._endpoint))
        return None

    def _fail_unsent(self, error: Exception) -> None:
        for request in self._unsent:
            unknown = request.is_in_doubt and request.effect is not Effect.READ
            _settle(request, loss(request, self._endpoint) if unknown else error)
        self._unsent.clear()

    def _expire(self) -> None:
        now_s = time.monotonic()
        for request in self._unsent:
            if request.deadline_s <= now_s:
                _settle(request, loss(request, self._endpoint))
        self._unsent = deque(request for request in self._unsent if request.outcome is _PENDING)

    # ── Replies ─────────────────────────────────────────────────────────────────────────────────

    def _on_reply(self, request: Request, reply: Any) -> None:
        error = first_error(request, reply)
        answer = Answer.RAISE if error is None else refuse(request, error)
        if error is None or answer is Answer.RAISE:
            _settle(request, exception_for(error) if error and request.raises else reply)
        elif answer is Answer.LOAD:
            self._unsent.append(request)
        elif answer is Answer.ASK:
            self._asks.append((moved_to(error), request))
        elif answer is Answer.REDIAL:
            self._must_redial = True
            self._side.node = moved_to(error)
            (self._unsent if request.tries == 1 else self._held).append(request)
        else:
            self._held.append(request)

    def _lose(self, link: BlockingLink) -> None:
        """Judge what was on its way over a link that is gone."""
        now_s = time.monotonic()
        again = []
        for request in link.inflight:
            request.replies = []
            request.is_in_doubt = True
            if request.effect is Effect.ONCE or request.deadline_s <= now_s:
                _settle(request, loss(request, self._endpoint))
            else:
                again.append(request)
        self._unsent.extendleft(reversed(again))
        if link is self._side.link:
            self._side.drop_link()
        else:
            link.close()

    def _follow_up(self) -> None:
        """Do what the refusals ask for, now that nothing is on its way."""
        if self._must_redial:
            self._must_redial = False
            self._side.drop_link()
        asks, self._asks = self._asks, []
        if asks:
            self._ask(asks)
        if self._held:
            self._pause(busy_wait_s(max(request.tries for request in self._held)), self._held)
            self._unsent.extend(self._held)
            self._held = []
            self._expire()

    def _ask(self, asks: list[tuple[tuple[str, int] | None, Request]]) -> None:
        """Send commands to the node that is taking the slot over."""
        node = asks[0][0]
        assert node is not None
        now = deque(request for place, request in asks if place == node)
        self._held += [request for place, request in asks if place != node]
        try:
            link = self._open(self._endpoint.at(*node), time.monotonic() + CONNECT_TIMEOUT_S)
        except (OSError, ChasquiError):
            self._held += now
            return
        pairs: deque[Request] = deque()
        for request in now:
            if request.latest_s <= clock.boot_s():
                _settle(request, loss(request, self._endpoint))
                continue
            asking = commands(("ASKING",), effect=Effect.READ)
            asking.deadline_s = request.deadline_s
            pairs += (asking, request)

        def on_reply(request: Request, reply: Any) -> None:
            if request in now:
                self._on_reply(request, reply)

        try:
            link.pump(lambda: pairs.popleft() if pairs else None, on_reply)
        except (OSError, ProtocolError) as error:
            if not is_loss(error):
                raise
            link.inflight = deque(request for request in link.inflight if request in now)
            self._held += [request for request in pairs if request in now]
            self._lose(link)
        finally:
            link.close()

    # ── The link's life ─────────────────────────────────────────────────────────────────────────

    def _ready_link(self) -> BlockingLink | None:
        """A link for what is unsent; None when that has failed, all of it."""
        side = self._side
        if side.link is not None and not side.link.is_alive():
            side.drop_link()
        while side.link is None:
            if self._connection.is_closed:
                self._fail_unsent(ClosedError("the connection was closed"))
            self._expire()
            if not self._unsent:
                return None
            if wait_s := side.redial.wait_s(time.monotonic()):
                self._pause(min(wait_s, LOOK_S), self._unsent)
                continue
            side.redial.dialling(time.monotonic())
            deadline_s = min(request.deadline_s for request in self._unsent)
            try:
                side.link = self._open(
                    self._locate(), min(deadline_s, time.monotonic() + CONNECT_TIMEOUT_S)
                )
            except Exception as error:
                if isinstance(error, OSError) and not is_loss(error):
                    raise
                fields = {"server": str(self._endpoint)}
                logger.debug("no connection to %s: %s", self._endpoint, error, extra=fields)
                side.node = None
                if side.was_connected:
                    side.redial.missed(self._endpoint, error, time.monotonic())
                if is_final(error, was_connected=side.was_connected):
                    self._fail_unsent(dial_failure(self._endpoint, error))
                    while self._draw():
                        self._fail_unsent(dial_failure(self._endpoint, error))
            else:
                side.was_connected = True
                side.redial.link_up(time.monotonic())
        return side.link

    def _pause(self, wait_s: float, waiting: Iterable[Request]) -> None:
        """Wait, but not past the first deadline, nor when the connection is closed."""
        first_s = min(request.deadline_s for request in waiting)
        until_s = min(time.monotonic() + wait_s, first_s)
        # No event: a handler of this thread that sets one it waits for would wait for itself.
        while not self._connection.is_closed and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, LOOK_S))

    def _locate(self) -> Endpoint:
        """Where the queue's server is now."""
        endpoint, side = self._endpoint, self._side
        if side.node is not None:
            return endpoint.at(*side.node)
        if endpoint.kind == "single":
            return endpoint
        return side.directory.locate(self._with_credentials(endpoint), self._connection._key)

    def _open(self, endpoint: Endpoint, deadline_s: float) -> BlockingLink:
        endpoint = self._with_credentials(endpoint)
        introduction = self._connection._introduction
        return open_link(endpoint, introduction, deadline_s, self._side.inbox())

    def _with_credentials(self, endpoint: Endpoint) -> Endpoint:
        provider = self._connection._credential_provider
        if provider is None:
            return endpoint
        try:
            return endpoint.with_credentials(_ask_provider(provider, endpoint.host))
        except OSError as error:
            if is_loss(error):
                raise
            raise UnreachableError(f"no credentials for {endpoint}: {error}") from error


def _settle(request: Request, outcome: Any) -> None:
    request.outcome = outcome
    request.frame = b""  # a long stream must not be held in memory to its end


def _ask_provider(provider: AnyCredentialProvider, host: str | None) -> Credentials:
    given = provider(host)
    if not inspect.isawaitable(given):
        return given

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        if inspect.iscoroutine(given):
            given.close()
        raise RuntimeError(
            "credential_provider is async, and this thread already runs an event loop: "
            "give the blocking connection a plain function"
        )

    async def wait() -> Credentials:
        return await given

    # Not asyncio.run: that would replace the thread's current event loop.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(wait())
    finally:
        loop.close()
