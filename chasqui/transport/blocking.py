"""The blocking connection, over a plain socket: for threads, forked children and scripts.

A call sends its requests and reads their replies under one lock. Between calls nothing runs: no
thread and no event loop. Each call drives a `RequestFlow`, which decides what becomes of each
request. Every process has a link of its own: a forked child never touches its parent's.
"""

import functools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from chasqui._core.hold import Hold
from chasqui._core.reply import ProtocolError
from chasqui.errors import ChasquiError, ClosedError, UnreachableError
from chasqui.model import clock
from chasqui.model.config import AnyCredentialProvider, Endpoint
from chasqui.transport.blocking_dialler import BlockingDialler
from chasqui.transport.blocking_link import BlockingLink, is_loss
from chasqui.transport.flow import RequestFlow
from chasqui.transport.handshake import Handshake
from chasqui.transport.recovery import (
    LOOK_S,
    REQUEST_TIMEOUT_S,
    Node,
    SharedDialPacing,
    dial_failure,
    is_final,
)
from chasqui.transport.request import Effect, Plan, Request, commands
from chasqui.transport.server import ServerProfile

T = TypeVar("T")

_PENDING: Any = object()
#: The error of a call inside a call of the same thread, which would wait for itself.
INTERRUPTED = (
    "this thread is in a call of this connection already: a signal handler or a finalizer cannot "
    "use it meanwhile; let it set a flag, or give it a queue of its own"
)


class BlockingConnection:
    """A connection to the server that owns a queue, for any number of threads.

    It is dialled when first needed and kept alive. `credential_provider` may be a plain function.
    Connections with the same `dial_pacing`, asyncio ones too, look for a lost server together.
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
        dial_pacing: SharedDialPacing | None = None,
    ) -> None:
        self.endpoint = endpoint
        handshake = Handshake(client_name, key if is_reader else None)
        self._make_dialler = functools.partial(
            BlockingDialler,
            endpoint,
            key,
            handshake,
            credential_provider,
            dial_pacing or SharedDialPacing(),
        )
        self._request_timeout_s = request_timeout_s
        self._is_closed = False
        self._states: dict[int, _ProcessState] = {}

    @property
    def is_connected(self) -> bool:
        return self._state().link is not None

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def profile(self) -> ServerProfile | None:
        """What the server at the other end can do; None while there is no link."""
        link = self._state().link
        return None if link is None else link.profile

    def connect(self) -> ServerProfile:
        """The server's profile, after a dial if there is no link. A server whose disk is full
        refuses even the PING; its profile is known all the same."""
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
        *_, outcome = self._exchange((request,))  # two, if a signal handler raised in between
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def call_each(self, requests: Iterable[Request], ahead: int) -> list[Any]:
        """Send requests, with at most `ahead` in flight; for each its reply or its exception.

        Other threads wait meanwhile: it is one call.
        """
        return self._exchange(requests, ahead)

    def close(self) -> None:
        """Drop the link; calls of other threads raise ClosedError. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        state = self._state()
        if (link := state.link) is not None:
            link.interrupt()
        with state.lock:
            if not state.is_busy:  # else we are inside a call of this thread: it lets go as it ends
                state.let_go()

    def _exchange(self, requests: Iterable[Request], ahead: float = math.inf) -> list[Any]:
        """Send each request as soon as it is made, while the server works on earlier ones. Returns
        for each its reply or its exception; the first that cannot be made is the last."""
        state = self._state()
        deadline_s = time.monotonic() + self._request_timeout_s
        with Hold(state.lock, self._request_timeout_s) as is_held:
            if not is_held:
                raise UnreachableError(f"no answer from {self.endpoint} to earlier calls in time")
            if state.is_busy:
                raise RuntimeError(INTERRUPTED)
            try:
                state.is_busy = True
                if self._is_closed:
                    raise ClosedError("the connection is closed")
                # Taken out, and put back at the end: after an interruption it is not used again.
                flow, state.flow = state.flow, None
                if flow is None:
                    flow = RequestFlow(self.endpoint, self._request_timeout_s)
                    flow.is_awake = True  # always: a call looks for itself what there is to do
                outcomes = _Call(self, state, flow, iter(requests), deadline_s, ahead).run()
                state.flow = flow
                return outcomes
            finally:
                state.is_busy = False  # first: a signal handler may raise at the next line
                if self._is_closed:
                    state.let_go()

    def _state(self) -> "_ProcessState":
        """This process's link and lock. No lock protects this: one held at a fork is never
        released in the child."""
        pid = os.getpid()
        state = self._states.get(pid)
        if state is None:
            state = self._states.setdefault(pid, _ProcessState(self._make_dialler()))
            for other in self._states.keys() - {pid}:  # a copy: another thread may do the same
                parent = self._states.pop(other, None)
                if parent is not None and parent.link is not None:
                    parent.link.close()  # our copy of the socket only
        return state


class _ProcessState:
    """What belongs to one process."""

    def __init__(self, dialler: BlockingDialler) -> None:
        #: Reentrant: code that interrupts a call of its own thread gets it, and finds it busy.
        self.lock = threading.RLock()
        self.is_busy = False
        self.link: BlockingLink | None = None
        #: Empty between calls. None during a call, and after one that was interrupted.
        self.flow: RequestFlow[BlockingLink] | None = None
        self.dialler = dialler

    def drop_link(self) -> None:
        """The link is lost, or another one is needed."""
        if self.link is not None:
            self.close_link()
            self.dialler.pacing.link_down(time.monotonic())

    def close_link(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.close()

    def let_go(self) -> None:
        """Keep nothing open. A second call does nothing."""
        self.close_link()
        self.dialler.close()


class _Outcome:
    """Where the reply or the exception of one request goes."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = _PENDING

    def done(self) -> bool:
        return self.value is not _PENDING

    def set_result(self, reply: Any, /) -> None:
        self.value = reply

    set_exception = set_result


class _Call:
    """The requests of one call, from the first byte to the last reply.

    A signal handler may raise anywhere in it. Its flow is not used again then, and of the link
    `is_alive` tells the next call whether this one was interrupted.
    """

    def __init__(
        self,
        connection: BlockingConnection,
        state: _ProcessState,
        flow: RequestFlow[BlockingLink],
        source: Iterator[Request],
        deadline_s: float,
        ahead: float,
    ) -> None:
        self._connection = connection
        self._endpoint = connection.endpoint
        self._state = state
        self._source = source
        self._ahead = ahead
        #: The first request's deadline: it has waited for the lock as well.
        self._deadline_s: float | None = deadline_s
        self._flow = flow
        self._outcomes: list[_Outcome] = []
        self._source_error: Exception | None = None

    def run(self) -> list[Any]:
        """For each request its reply or its exception."""
        flow = self._flow
        while flow.unsent or flow.held or self._draw():
            if not flow.unsent:
                self._pause(flow.next_s)
                self._follow_up()
                continue
            link = self._ready_link()
            if link is None:
                continue
            try:
                link.pump(functools.partial(self._take, link), flow.reply)
            except BaseException as error:
                if not is_loss(error):
                    self._state.close_link()  # the next call would take its replies
                    raise
                flow.link_lost(link)
                self._state.drop_link()
                if isinstance(error, TimeoutError | ProtocolError):  # else the next dial logs it
                    self._state.dialler.pacing.missed(error, time.monotonic())
                self._follow_up()  # of refusals too: those that came before the loss
            if flow.next_s == -math.inf:  # the server refused something
                self._follow_up()
        outcomes = [outcome.value for outcome in self._outcomes]
        return outcomes if self._source_error is None else [*outcomes, self._source_error]

    # ── Sending ─────────────────────────────────────────────────────────────────────────────────

    def _draw(self) -> bool:
        """Take the next request from the source; False if there is none."""
        if self._source_error is not None:
            return False
        try:
            request = next(self._source, None)
        except Exception as error:  # earlier requests are in flight, and may be applied
            self._source_error = error
            return False
        if request is None:
            return False
        now_s, boot_s, flow = time.monotonic(), clock.boot_s(), self._flow
        if self._deadline_s is not None:
            timeout_s = flow.timeout_s if request.timeout_s is None else request.timeout_s
            waited_s = now_s + timeout_s - self._deadline_s
            if waited_s > 0:
                now_s, boot_s = now_s - waited_s, boot_s - waited_s
            self._deadline_s = None
        outcome = _Outcome()
        flow.submit(request, outcome, now_s, boot_s, False)
        self._outcomes.append(outcome)
        return True

    def _take(self, link: BlockingLink) -> Request | None:
        """The next request to write to the link; None while there is none."""
        flow = self._flow
        if flow.link is not link or len(link.inflight) >= self._ahead:
            return None
        while flow.unsent or self._draw():
            if (request := flow.take_one(clock.boot_s())) is not None:
                return request
        return None

    def _follow_up(self) -> None:
        """Do what refusals and deadlines ask for, now that nothing is in flight."""
        flow, state = self._flow, self._state
        if self._connection.is_closed:
            flow.give_up(ClosedError("the connection was closed"))
        if flow.must_redial:
            flow.must_redial = False
            state.dialler.pacing.node = flow.node
            state.drop_link()
        asks, flow.asks = flow.asks, []
        if asks:
            self._ask(asks)
        for _, request in flow.asks:  # the node that was asked names another one: let them settle
            flow.hold(request)
        flow.asks.clear()
        flow.tick(time.monotonic())

    def _ask(self, asks: list[tuple[Node, Request]]) -> None:
        """Send commands to the node that is taking the hash slot over."""
        flow, node = self._flow, asks[0][0]
        for place, request in asks:
            if place != node:
                flow.hold(request)
        now = [request for place, request in asks if place == node]
        try:
            link = self._state.dialler.open(self._endpoint.at(*node), math.inf)
        except (OSError, ChasquiError):
            for request in now:
                flow.hold(request)
            return
        flow.link_up(link, is_for_asks=True)
        boot_s = clock.boot_s()
        pairs = deque(one for request in now for one in flow.ask(link, request, boot_s))
        try:
            link.pump(lambda: pairs.popleft() if pairs else None, flow.reply)
        except (OSError, ProtocolError) as error:
            if not is_loss(error):
                raise
            for request in pairs:
                flow.hold(request)
        finally:
            link.close()
        flow.link_lost(link)

    # ── Links ───────────────────────────────────────────────────────────────────────────────────

    def _ready_link(self) -> BlockingLink | None:
        """A link for what is unsent; None if all of it has failed instead."""
        state, flow, pacing = self._state, self._flow, self._state.dialler.pacing
        if state.link is not None and not state.link.is_alive():
            state.drop_link()
        while state.link is None:
            if self._connection.is_closed:
                flow.give_up(ClosedError("the connection was closed"))
            flow.tick(now_s := time.monotonic())
            if not flow.unsent:
                return None
            if wait_s := pacing.wait_s(now_s):
                self._pause(min(now_s + min(wait_s, LOOK_S), flow.next_s))
                continue
            try:
                state.link = state.dialler.dial(min(one.deadline_s for one in flow.unsent))
            except Exception as error:
                if isinstance(error, OSError) and not is_loss(error):
                    raise
                if is_final(error, was_connected=pacing.was_connected):
                    flow.give_up(dial_failure(self._endpoint, error))
                    while self._draw():
                        flow.give_up(dial_failure(self._endpoint, error))
        if flow.link is not state.link:
            flow.links.clear()  # there is one at a time
            flow.link_up(state.link)
        return state.link

    def _pause(self, until_s: float) -> None:
        """Wait until then, or until the connection is closed."""
        # No threading.Event: a signal handler that sets it while this thread waits would deadlock.
        while not self._connection.is_closed and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, LOOK_S))
