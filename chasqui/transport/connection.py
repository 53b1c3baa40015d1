"""The data-path connection: asyncio over the compiled core, multiplexed, pipelined, redialled.

Requests of one turn of the event loop leave in one write; replies come back in order. When the
link drops, each request is judged by its own effect: reads and idempotent writes are sent again,
the rest raise OutcomeUnknownError. A cancelled request still takes its reply off the wire, so that
replies never get out of step.
"""

import asyncio
import math
import os
from collections import deque
from collections.abc import Iterable
from time import monotonic
from typing import Any, TypeVar

from chasqui import clock
from chasqui._core.reply import ReplyError
from chasqui.model.config import CredentialProvider, Endpoint
from chasqui.transport.dialler import Dialler
from chasqui.errors import ClosedError, OutcomeUnknownError, UnreachableError
from chasqui.transport.link import Link, in_thread_or_here
from chasqui.transport.recovery import (
    REQUEST_TIMEOUT_S as REQUEST_TIMEOUT_S,
)
from chasqui.transport.recovery import (
    Introduction,
    Search,
    busy_wait_s,
    dial_failure,
    is_final,
    loss,
    refuse,
)
from chasqui.transport.request import Effect, Outcome, Plan, Request, commands, first_error
from chasqui.transport.server import Answer, ServerProfile, answer_to, exception_for, moved_to

T = TypeVar("T")

#: Bytes not yet handed to the transport beyond which callers wait.
_HIGH_WATER_BYTES = 8 * 1024 * 1024
#: The least time between two looks at deadlines: they may be many, and all different.
_WATCH_S = 0.25


class Connection:
    """A connection to the server that owns a queue, dialled when first needed and kept alive.

    Belongs to one event loop and one process; used from another it raises RuntimeError. Those with
    the same `search` look for a lost server together.
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
        search: Search | None = None,
    ) -> None:
        self.endpoint = endpoint
        introduction = Introduction(client_name, key if is_reader else None)
        self._dialler = Dialler(
            endpoint, key, introduction, credential_provider, search or Search()
        )
        self._request_timeout_s = request_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        #: Where requests go.
        self._link: Link | None = None
        #: When a link last took the place of another one, by the monotonic clock.
        self.replaced_s = -math.inf
        #: All that are open: also those that only finish what they have, or serve an ASK.
        self._links: set[Link] = set()
        self._unsent: deque[Request] = deque()
        self._unsent_bytes = 0
        #: Refused for now, and sent again in a moment: neither unsent nor in flight.
        self._held: set[Request] = set()
        self._is_flush_due = False
        self._waiters: deque[asyncio.Future[None]] = deque()
        #: Looks at deadlines when the first of them passes.
        self._watch: asyncio.TimerHandle | None = None
        self._watch_at_s = math.inf
        self._dialling: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Task[None]] = set()
        self._ask_lock = asyncio.Lock()
        self._is_closed = False

    # ── Using it ────────────────────────────────────────────────────────────────────────────────

    @property
    def is_connected(self) -> bool:
        return self._link is not None

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def profile(self) -> ServerProfile | None:
        """What the server at the other end can do; None while there is no link."""
        return None if self._link is None else self._link.profile

    @property
    def server(self) -> Endpoint:
        """Where requests go; while there is no link, where the server is looked for."""
        return self.endpoint if self._link is None else self._link.endpoint

    async def connect(self) -> ServerProfile:
        """Dial if need be; the server's profile. One whose disk is full refuses even the PING, and
        is there all the same."""
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
        """Send each request as soon as it is made, while the server works on those before; for
        each its reply or its exception. The first that cannot be sent is the last, and so is one
        behind which there is room only because those before were given up."""
        loop = self.check_owner()
        futures: list[asyncio.Future[Any]] = []
        replies: list[Any] = []
        unsent: list[Exception] = []
        answered, is_answered = 0, True  # so many have their replies; not if one was given up
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
            except Exception as error:  # those before it are on their way, and may be applied
                unsent.append(error)
            for future in futures:
                try:
                    replies.append(await future)
                except Exception as error:
                    replies.append(error)
        except BaseException:
            for future in futures:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # seen, so that nobody complains
            raise
        return replies + unsent

    def submit(self, request: Request) -> asyncio.Future[Any]:
        """Put a request into this turn's write; the future of its reply."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.post(request, future)
        return future

    def post(self, request: Request, outcome: Outcome) -> None:
        """The same with an outcome of the caller's own."""
        self._take(request, outcome, self.check_owner())
        self._enqueue(request)

    def send(self, request: Request, outcome: Outcome) -> None:
        """The same without waiting for the end of the turn, by who has asked `check_owner`."""
        assert self._loop is not None
        self._take(request, outcome, self._loop)
        link = self._link
        if link is not None and link.is_writable and not link.is_retired and not self._unsent:
            link.send((request,))
            return
        self._unsent.append(request)
        self._unsent_bytes += len(request.frame)
        self._flush()

    def _take(self, request: Request, outcome: Outcome, loop: asyncio.AbstractEventLoop) -> None:
        if self._is_closed:
            raise ClosedError("the connection is closed")
        request.outcome = outcome
        timeout_s = request.timeout_s
        if timeout_s is None:
            timeout_s = self._request_timeout_s
        request.deadline_s = deadline_s = loop.time() + timeout_s
        request.latest_s = clock.boot_s() + timeout_s
        if deadline_s < self._watch_at_s:
            self._watch_from(deadline_s)

    def check_owner(self) -> asyncio.AbstractEventLoop:
        """The running event loop, which the first call makes the connection's own; RuntimeError
        in any other and in a forked child."""
        loop, pid = asyncio.get_running_loop(), os.getpid()
        if self._loop is None:
            self._loop, self._pid = loop, pid
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
        if self._is_closed:
            return
        if self._loop is None or os.getpid() != self._pid:
            self._is_closed = True
            return  # nothing was opened; or it is the parent's, whose poll set we would touch
        if not self._loop.is_closed():
            self.check_owner()
        try:
            if self._loop.is_closed():
                self._forget()
            else:
                await self._hang_up()
        finally:  # also if it was cancelled meanwhile: nobody comes here a second time
            if self.endpoint.kind == "embedded":
                await in_thread_or_here(self._dialler.close)

    def _forget(self) -> None:
        """Let go of what an event loop left behind: its sockets close as they are freed, and there
        is nobody left who could be told."""
        self._is_closed = True
        self._link = self._dialling = self._watch = None
        for link in self._links:
            link.shut_down()
        self._links.clear()
        self._asking.clear()
        self._waiters.clear()
        self._unsent.clear()
        self._held.clear()

    async def _hang_up(self) -> None:
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()
        tasks = [*self._asking, *([self._dialling] if self._dialling else [])]
        for task in tasks:
            task.cancel()
        links, self._link = list(self._links), None
        for request in (*self._unsent, *self._held):
            request.fail(self._closed(request))
        for link in links:
            for request in link.inflight:
                request.is_in_doubt = True
                request.fail(self._closed(request))
            link.inflight.clear()
            link.abort()
        self._unsent.clear()
        self._held.clear()
        self._release_room()
        await asyncio.gather(*tasks, *(link.lost for link in links), return_exceptions=True)

    def _closed(self, request: Request) -> Exception:
        error = loss(request, self.endpoint)
        unknown = isinstance(error, OutcomeUnknownError)
        return error if unknown else ClosedError("the connection was closed")

    # ── Sending ─────────────────────────────────────────────────────────────────────────────────

    def _enqueue(self, request: Request) -> None:
        self._unsent.append(request)
        self._unsent_bytes += len(request.frame)
        if not self._is_flush_due:
            assert self._loop is not None
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._unsent and not self._is_closed:
            link = self._link
            if link is None or link.is_retired:
                self._dial()
                return
            if not link.is_writable:
                return
            requests = [request for request in self._unsent if not request.outcome.done()]
            self._unsent.clear()
            self._unsent_bytes = 0
            now_s = clock.boot_s()
            late = [request for request in requests if request.latest_s <= now_s]
            if late:
                requests = [request for request in requests if request.latest_s > now_s]
            if requests:
                link.send(requests)
            for request in late:  # who is told may send more
                request.fail(loss(request, self.endpoint))
        self._release_room()

    @property
    def is_congested(self) -> bool:
        """True while callers should wait for `room`: more is written than the server takes."""
        return self._unsent_bytes > _HIGH_WATER_BYTES or (
            self._link is not None and not self._link.is_writable
        )

    async def room(self) -> None:
        """Wait until what was written before has gone out, so that a slow server bounds memory."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._request_timeout_s
        while self.is_congested and not self._is_closed:
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append(waiter)
            try:
                async with asyncio.timeout_at(deadline_s):
                    await waiter
            except TimeoutError:
                raise UnreachableError(f"{self.endpoint} takes no more data") from None

    def _release_room(self) -> None:
        if self.is_congested and not self._is_closed:
            return
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    # ── Replies ─────────────────────────────────────────────────────────────────────────────────

    def _on_reply(self, link: Link, request: Request, reply: Any) -> None:
        future = request.outcome
        if future.done():
            return
        error = first_error(request, reply)
        if error is not None and self._send_again(link, request, error):
            return
        request.frame = b""  # who keeps the request need not keep its bytes
        if error is not None and request.raises:
            future.set_exception(exception_for(error))
        else:
            future.set_result(reply)

    def _send_again(self, link: Link, request: Request, error: ReplyError) -> bool:
        """Whether the request goes on."""
        answer = refuse(request, error)
        if answer_to(error) is Answer.REDIAL and link is self._link:
            # Also where this request ends here: whoever comes next needs the right server.
            self._dialler.node = moved_to(error)
            self._retire_links()
        if answer is Answer.RAISE:
            return False
        if answer is Answer.LOAD:
            self._enqueue(request)
        elif answer is Answer.ASK:
            assert self._loop is not None
            self._held.add(request)
            task = self._loop.create_task(self._ask(moved_to(error), request))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        elif answer is Answer.REDIAL:
            if request.tries == 1:
                self._enqueue(request)
            else:  # the next server says the same: give them time to settle
                self._hold(request)
        else:
            self._hold(request)
        return True

    def _hold(self, request: Request) -> None:
        assert self._loop is not None
        self._held.add(request)
        self._loop.call_later(busy_wait_s(request.tries), self._resume, request)

    def _resume(self, request: Request) -> None:
        if request in self._held:
            self._held.discard(request)
            self._enqueue(request)

    async def _ask(self, node: tuple[str, int] | None, request: Request) -> None:
        """Send one command to the node that is taking the slot over."""
        assert node is not None
        async with self._ask_lock:
            link = next((one for one in self._links if one.endpoint.hosts == (node,)), None)
            if link is None or link.is_retired or link is self._link:
                try:
                    link = self._adopt(await self._dialler.open(self.endpoint.at(*node)))
                except Exception:
                    self._hold(request)
                    return
        if request not in self._held or link.is_retired or request.latest_s <= clock.boot_s():
            self._resume(request)  # and is told there if it is too late
            return
        self._held.discard(request)
        asking = commands(("ASKING",), effect=Effect.READ)
        asking.outcome = asyncio.get_running_loop().create_future()
        asking.outcome.cancel()  # nobody waits for it
        asking.deadline_s = request.deadline_s
        link.send([asking, request])

    # ── The link's life ─────────────────────────────────────────────────────────────────────────

    def _retire_links(self) -> None:
        """The server is another one now: let the links finish what they have."""
        self._link = None
        self._dialler.link_down()
        for link in list(self._links):
            link.retire()

    def _on_lost(self, link: Link) -> None:
        self._links.discard(link)
        if self._link is link:
            self._link = None
            self._dialler.link_down()
        if link.fault is not None:
            self._dialler.missed(link.fault)
        for request in link.inflight:
            request.replies = []
            request.is_in_doubt = True
            if request.outcome.done():
                continue
            if request.effect is Effect.ONCE:
                request.fail(loss(request, self.endpoint))
            else:
                self._enqueue(request)
        link.inflight.clear()
        self._flush()

    def _dial(self) -> None:
        if self._dialling is None:
            assert self._loop is not None
            self._dialling = self._loop.create_task(self._keep_dialling())

    async def _keep_dialling(self) -> None:
        """Dial until there is a link or nobody waits for one."""
        dialler = self._dialler
        try:
            while self._unsent or self._held:
                if wait_s := dialler.wait_s:
                    await asyncio.sleep(wait_s)
                    continue
                is_first = not dialler.was_connected
                try:
                    link = self._adopt(await dialler.dial())
                except Exception as error:
                    if is_final(error, was_connected=dialler.was_connected):
                        self._fail_waiting(dial_failure(self.endpoint, error))
                    continue
                if link.is_retired:  # it broke as it was handed over
                    dialler.link_down()
                    continue
                self._link = link
                if not is_first:
                    self.replaced_s = monotonic()
                break
        finally:
            self._dialling = None
        self._flush()

    def _fail_waiting(self, error: Exception) -> None:
        waiting = [*self._unsent, *self._held]
        self._unsent.clear()
        self._unsent_bytes = 0
        self._held.clear()
        for request in waiting:  # who is told may send more
            unknown = request.is_in_doubt and request.effect is not Effect.READ
            request.fail(loss(request, self.endpoint) if unknown else error)
        self._release_room()

    def _adopt(self, link: Link) -> Link:
        link.on_reply = self._on_reply
        link.on_lost = self._on_lost
        link.on_writable = self._flush
        if not link.is_retired:
            self._links.add(link)
        return link

    def _watch_from(self, at_s: float) -> None:
        assert self._loop is not None
        if self._watch is not None:
            self._watch.cancel()
        self._watch_at_s = at_s
        self._watch = self._loop.call_at(at_s, self._check_deadlines)

    def _check_deadlines(self) -> None:
        """Tell those who have waited too long, and drop a link that has not answered them."""
        assert self._loop is not None
        now_s = self._loop.time()
        for link in list(self._links):
            overdue = [request for request in link.inflight if request.deadline_s <= now_s]
            for request in overdue:
                request.is_in_doubt = True
                request.fail(loss(request, self.endpoint))
            if overdue:
                link.fault = TimeoutError("it has not answered in time")
                link.abort()
        for request in (*self._unsent, *self._held):
            if request.deadline_s <= now_s:
                request.fail(loss(request, self.endpoint))
        self._held = {request for request in self._held if not request.outcome.done()}
        self._unsent = deque(request for request in self._unsent if not request.outcome.done())
        self._unsent_bytes = sum(len(request.frame) for request in self._unsent)
        self._release_room()
        self._watch, self._watch_at_s = None, math.inf
        waiting = [
            *self._unsent,
            *self._held,
            *(one for link in self._links for one in link.inflight),
        ]
        if waiting:
            first_s = min(request.deadline_s for request in waiting)
            self._watch_from(max(first_s, now_s + _WATCH_S))
