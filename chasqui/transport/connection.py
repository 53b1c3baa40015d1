"""The asyncio connection: many requests share one link, and a lost link is redialled.

It drives a `RequestFlow`, which decides what becomes of each request. This module owns the event
loop's side: links, timers, tasks, and the room that callers wait for. Requests of one turn of the
event loop leave in one write.
"""

import asyncio
import math
import os
from collections import deque
from collections.abc import Iterable
from time import monotonic
from typing import Any, TypeVar

from chasqui.errors import UnreachableError
from chasqui.model import clock
from chasqui.model.config import CredentialProvider, Endpoint
from chasqui.transport.dialler import Dialler
from chasqui.transport.flow import RequestFlow
from chasqui.transport.handshake import Handshake
from chasqui.transport.link import Link, in_thread_or_here
from chasqui.transport.recovery import REQUEST_TIMEOUT_S as REQUEST_TIMEOUT_S
from chasqui.transport.recovery import Node, SharedDialPacing, dial_failure, is_final
from chasqui.transport.request import Effect, Outcome, Plan, Request, commands
from chasqui.transport.server import ServerProfile

T = TypeVar("T")

#: Bytes not yet handed to the transport beyond which callers wait.
_HIGH_WATER_BYTES = 8 * 1024 * 1024
#: The least time between two looks at deadlines.
_LOOK_EVERY_S = 0.25


class Connection:
    """A connection to the server that owns a queue, dialled when first needed and kept alive.

    It belongs to one event loop and one process; used from another it raises RuntimeError.
    Connections with the same `dial_pacing` look for a lost server together.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        key: bytes,
        client_name: str = "chasqui",
        credential_provider: CredentialProvider | None = None,
        is_reader: bool = False,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        dial_pacing: SharedDialPacing | None = None,
    ) -> None:
        self.endpoint = endpoint
        handshake = Handshake(client_name, key if is_reader else None)
        self._dialler = Dialler(
            endpoint, key, handshake, credential_provider, dial_pacing or SharedDialPacing()
        )
        self._pacing = self._dialler.pacing
        self._flow: RequestFlow[Link] = RequestFlow(endpoint, request_timeout_s, _LOOK_EVERY_S)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        #: When a link last took the place of another one, by the monotonic clock.
        self.replaced_s = -math.inf
        self._waiters: deque[asyncio.Future[None]] = deque()
        #: Calls the flow's `tick` when it is due.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._dialling: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Task[None]] = set()
        self._ask_lock = asyncio.Lock()

    # ── Using it ────────────────────────────────────────────────────────────────────────────────

    @property
    def is_connected(self) -> bool:
        return self._flow.link is not None

    @property
    def is_closed(self) -> bool:
        return self._flow.is_closed

    @property
    def profile(self) -> ServerProfile | None:
        """What the server at the other end can do; None while there is no link."""
        link = self._flow.link
        return None if link is None else link.profile

    @property
    def server(self) -> Endpoint:
        """Where requests go; while there is no link, where the server is looked for."""
        link = self._flow.link
        return self.endpoint if link is None else link.endpoint

    async def connect(self) -> ServerProfile:
        """The server's profile, after a dial if there is no link. A server whose disk is full
        refuses even the PING; its profile is known all the same."""
        while self.profile is None:
            await self.execute("PING", effect=Effect.READ, raises=False)
        return self.profile

    async def execute(self, *arguments: Any, effect: Effect, **options: Any) -> Any:
        """Send one command given as plain arguments; its reply."""
        return await self.submit(commands(arguments, effect=effect, **options))

    async def run(self, plan: Plan[T]) -> T:
        """Run an operation to its end; its result."""
        try:
            step = next(plan)
            while True:
                try:
                    if isinstance(step, Request):
                        if self.is_congested:
                            await self.room()
                        reply: Any = await self.submit(step)
                    else:
                        reply = await self._stream(step)
                except Exception as error:
                    step = plan.throw(error)
                else:
                    step = plan.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _stream(self, requests: Iterable[Request]) -> list[Any]:
        """Send each request as soon as it is made, while the server works on earlier ones. Returns
        for each its reply or its exception. It stops at a request that cannot be made or sent, and
        when there is room only because an earlier request has failed."""
        loop = self.check_owner()
        futures: list[asyncio.Future[Any]] = []
        replies: list[Any] = []
        unsent: list[Exception] = []
        answered, is_answered = 0, True  # how many have their replies; False once one has failed
        try:
            try:
                for request in requests:
                    if self.is_congested:
                        await self.room()
                        while is_answered and answered < len(futures) and futures[answered].done():
                            is_answered = futures[answered].exception() is None
                            answered += 1
                        if not is_answered:
                            break
                    future = loop.create_future()
                    self.send(request, future)
                    futures.append(future)
            except Exception as error:  # earlier requests are in flight, and may be applied
                unsent.append(error)
            for future in futures:
                try:
                    replies.append(await future)
                except Exception as error:
                    replies.append(error)
        except BaseException:
            for future in futures:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # seen, so that asyncio does not log it
            raise
        return replies + unsent

    def submit(self, request: Request) -> asyncio.Future[Any]:
        """Put a request into this turn's write; the future of its reply."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.post(request, future)
        return future

    def post(self, request: Request, outcome: Outcome) -> None:
        """The same with an outcome of the caller's own."""
        now_s = self.check_owner().time()
        self._flow.submit(request, outcome, now_s, clock.boot_s(), False)

    def send(self, request: Request, outcome: Outcome) -> None:
        """The same without waiting for the end of the turn. Call `check_owner` before."""
        assert self._loop is not None
        link = self._flow.submit(request, outcome, self._loop.time(), clock.boot_s(), True)
        if link is not None:
            link.send((request,))
        else:
            self._work()

    def check_owner(self) -> asyncio.AbstractEventLoop:
        """The running event loop, which the first call makes the connection's own; RuntimeError
        in any other and in a forked child."""
        loop, pid = asyncio.get_running_loop(), os.getpid()
        if self._loop is None:
            self._loop, self._pid = loop, pid
            self._flow.wake = self._wake
        if pid != self._pid:
            raise RuntimeError(
                "this connection was made before a fork and belongs to the parent process: "
                "make a new one in the child"
            )
        if loop is not self._loop:
            raise RuntimeError("this connection belongs to another event loop: make one per loop")
        return loop

    async def close(self) -> None:
        """Drop the link; requests still waiting raise ClosedError. A second call does nothing."""
        if self.is_closed:
            return
        if self._loop is None or os.getpid() != self._pid:
            self._flow.is_closed = True
            return  # nothing was opened; or it is the parent's, whose poll set we would touch
        if not self._loop.is_closed():
            self.check_owner()
        try:
            if self._loop.is_closed():
                self._abandon()
            else:
                await self._hang_up()
        finally:  # also if it was cancelled meanwhile: there is no second close
            if self.endpoint.kind == "embedded":
                await in_thread_or_here(self._dialler.close)

    def _abandon(self) -> None:
        """Let go of what an event loop left behind: its sockets close as they are freed, and there
        is nobody left to tell."""
        for link in self._flow.links:
            link.shut_down()
        self._flow.abandon()
        self._dialling = self._timer = None
        self._asking.clear()
        self._waiters.clear()

    async def _hang_up(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._asking, *([self._dialling] if self._dialling else [])]
        for task in tasks:
            task.cancel()
        links = self._flow.close()
        for link in links:
            link.abort()
        self._release_room()
        await asyncio.gather(*tasks, *(link.lost for link in links), return_exceptions=True)

    # ── What the flow asks for ──────────────────────────────────────────────────────────────────

    def _wake(self) -> None:
        assert self._loop is not None
        self._loop.call_soon(self._work)

    def _work(self) -> None:
        """Write what is unsent, or dial for it."""
        flow = self._flow
        flow.is_awake = False
        if flow.next_s < self._timer_s:
            self._tick()
        if flow.unsent:
            link = flow.link
            if link is None or link.is_retired:
                self._release_room()  # what was too late has left some
                self._dial()
                return
            if not link.is_writable:
                return
            if requests := flow.take(clock.boot_s()):
                link.send(requests)
        self._release_room()

    def _tick(self) -> None:
        """Follow refusals and deadlines, and set the timer for the next time."""
        assert self._loop is not None
        flow = self._flow
        for link in flow.tick(self._loop.time()):
            link.fault = TimeoutError("it has not answered in time")
            link.abort()
        if flow.must_redial:
            flow.must_redial = False
            self._pacing.node = flow.node
            self._pacing.link_down(monotonic())
            for link in [*flow.links]:
                link.retire()
        asks, flow.asks = flow.asks, []
        for node, request in asks:
            task = self._loop.create_task(self._ask(node, request))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_s = flow.next_s
        if self._timer_s < math.inf and not flow.is_closed:
            self._timer = self._loop.call_at(self._timer_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_s = None, math.inf
        self._work()

    async def _ask(self, node: Node, request: Request) -> None:
        """Send one command to the node that is taking the hash slot over."""
        flow = self._flow
        async with self._ask_lock:
            link = next((one for one in flow.links if one.endpoint.hosts == (node,)), None)
            if link is None or link.is_retired or link is flow.link:
                try:
                    link = await self._dialler.open(self.endpoint.at(*node))
                except Exception:
                    flow.hold(request)
                    return
                self._adopt(link, is_for_asks=True)
        if requests := flow.ask(link, request, clock.boot_s()):
            link.send(requests)

    # ── Room ────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_congested(self) -> bool:
        """True while callers should wait for `room`: more is written than the server takes."""
        flow = self._flow
        return flow.unsent_bytes > _HIGH_WATER_BYTES or (
            flow.link is not None and not flow.link.is_writable
        )

    async def room(self) -> None:
        """Wait until what was written before has gone out, so that a slow server bounds memory."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._flow.timeout_s
        while self.is_congested and not self.is_closed:
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append(waiter)
            try:
                async with asyncio.timeout_at(deadline_s):
                    await waiter
            except TimeoutError:
                raise UnreachableError(f"{self.endpoint} takes no more data") from None

    def _release_room(self) -> None:
        if self._waiters and (self.is_closed or not self.is_congested):
            while self._waiters:
                waiter = self._waiters.popleft()
                if not waiter.done():
                    waiter.set_result(None)

    # ── Links ───────────────────────────────────────────────────────────────────────────────────

    def _adopt(self, link: Link, *, is_for_asks: bool = False) -> None:
        link.on_reply = self._flow.reply
        link.on_lost = self._on_lost
        link.on_writable = self._work
        if not link.is_retired:
            self._flow.link_up(link, is_for_asks=is_for_asks)

    def _on_lost(self, link: Link) -> None:
        if self._flow.link is link:
            self._pacing.link_down(monotonic())
        if link.fault is not None:
            self._pacing.missed(link.fault, monotonic())
        self._flow.link_lost(link)
        self._work()

    def _dial(self) -> None:
        if self._dialling is None:
            assert self._loop is not None
            self._dialling = self._loop.create_task(self._keep_dialling())

    async def _keep_dialling(self) -> None:
        """Dial until there is a link or nothing waits for one."""
        dialler, pacing, flow = self._dialler, self._pacing, self._flow
        try:
            while flow.needs_link:
                if wait_s := dialler.wait_s:
                    await asyncio.sleep(wait_s)
                    continue
                is_first = not pacing.was_connected
                try:
                    link = await dialler.dial()
                except Exception as error:
                    if is_final(error, was_connected=pacing.was_connected):
                        flow.give_up(dial_failure(self.endpoint, error))
                        self._release_room()
                    continue
                self._adopt(link)
                if link.is_retired:  # it broke as it was handed over
                    pacing.link_down(monotonic())
                    continue
                if not is_first:
                    self.replaced_s = monotonic()
                break
        finally:
            self._dialling = None
        self._work()
