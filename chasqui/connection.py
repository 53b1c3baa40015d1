"""The data-path connection: asyncio over the compiled core, multiplexed, pipelined, redialled.

Requests of one turn of the event loop leave in one write; replies come back in order. When the link
drops, each request is judged by its own effect: reads and idempotent writes are sent again, the rest
raise OutcomeUnknownError. A cancelled request still takes its reply off the wire, so that replies
never get out of step.
"""

import asyncio
import logging
import os
import random
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from chasqui import topology
from chasqui._core.reply import INCOMPLETE, ProtocolError, Push, ReplyError, ReplyReader
from chasqui._version import VERSION
from chasqui.config import CredentialProvider, Endpoint, Secret
from chasqui.errors import (
    AuthenticationError,
    ChasquiError,
    ClosedError,
    OutcomeUnknownError,
    UnreachableError,
)
from chasqui.request import Effect, Plan, Request, commands, first_error
from chasqui.server import Answer, ServerProfile, answer_to, exception_for, handshake, moved_to

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How long to look for the server before a dial counts as failed.
CONNECT_TIMEOUT_S = 5.0
#: How long a request may take in all, waiting for a lost server included.
REQUEST_TIMEOUT_S = 30.0
#: The wait before a redial doubles from the first to the second, with jitter: at most 5 a second.
REDIAL_MIN_S, REDIAL_MAX_S = 0.2, 2.0
#: The wait before a request is sent again to a server that is busy with itself.
BUSY_MIN_S, BUSY_MAX_S = 0.02, 0.5
#: Unacknowledged bytes after which the kernel gives a silent peer up.
TCP_USER_TIMEOUT_MS = 20_000

_WATCH_S = 0.25


class Outcome(Protocol):
    """Where a reply goes: a future, or something that passes it on."""

    def done(self) -> bool: ...
    def set_result(self, reply: Any, /) -> None: ...
    def set_exception(self, error: Exception, /) -> None: ...


class Link(asyncio.Protocol):
    """One live socket: frames out, replies in, each handed to `on_reply` with its request."""

    def __init__(self, on_reply: Callable[[Request, Any], None]) -> None:
        self.on_reply = on_reply
        self.on_lost: Callable[[Link, Exception | None], None] | None = None
        self.profile: ServerProfile | None = None
        self.inflight: deque[Request] = deque()
        self.is_writable = True
        #: No new requests go out: the link closes once its last reply has come.
        self.is_retired = False
        self.is_lost = False
        self.transport: asyncio.Transport
        self._reader = ReplyReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)

    def send(self, requests: Iterable[Request]) -> None:
        """Write the frames of all requests at once; their replies are now awaited."""
        frames = []
        for request in requests:
            request.was_sent = True
            self.inflight.append(request)
            frames.append(request.frame)
        self.transport.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def retire(self) -> None:
        self.is_retired = True
        if not self.inflight:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        reader, inflight = self._reader, self.inflight
        try:
            reader.feed(data)
            while True:
                reply = reader.read(inflight[0].builder if inflight else None)
                if reply is INCOMPLETE:
                    break
                if type(reply) is Push:
                    continue
                if not inflight:
                    raise ProtocolError("Protocol error, a reply that nobody asked for")
                request = inflight[0]
                if request.count == 1:
                    del inflight[0]
                    self.on_reply(request, reply)
                    continue
                request.replies.append(reply)
                if len(request.replies) == request.count:
                    del inflight[0]
                    self.on_reply(request, request.replies)
        except ProtocolError as error:
            logger.warning("the link is dropped: %s", error)
            self.transport.abort()
            return
        if self.is_retired and not inflight:
            self.transport.close()

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        self.on_writable()

    def on_writable(self) -> None:
        """Replaced by the connection that owns the link."""

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost(self, error)


class Connection:
    """A connection to the server that owns a queue, dialled when first needed and kept alive.

    Belongs to one event loop and one process; used from another it raises RuntimeError.
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
    ) -> None:
        self.endpoint = endpoint
        self._key = key
        self._client_name = client_name
        self._credential_provider = credential_provider
        self._is_reader = is_reader
        self._request_timeout_s = request_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._link: Link | None = None
        self._unsent: deque[Request] = deque()
        self._unsent_bytes = 0
        self._is_flush_due = False
        self._dialling: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._node: tuple[str, int] | None = None
        self._directory = topology.Directory(endpoint)
        self._was_connected = False
        self._is_closed = False
        #: Requests waiting for a busy server: they are neither unsent nor in flight.
        self._delayed: set[Request] = set()
        self._background: set[asyncio.Task[None]] = set()

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

    async def connect(self) -> ServerProfile:
        """Dial if need be; the server's profile."""
        while self._link is None:
            await self.execute("PING", effect=Effect.READ)
        assert self._link.profile is not None
        return self._link.profile

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
                        if self._is_congested():
                            await self._room()
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
        each its reply or its exception."""
        futures = []
        for request in requests:
            if self._is_congested():
                await self._room()
            futures.append(self.submit(request))
            self.flush()
        return await asyncio.gather(*futures, return_exceptions=True)

    def submit(self, request: Request) -> asyncio.Future[Any]:
        """Put a request into this turn's write; the future of its reply."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.post(request, future)
        return future

    def post(self, request: Request, future: Outcome) -> None:
        """The same with a future of the caller's: whatever has its three methods."""
        loop = self._loop
        if loop is None:
            loop = self._bind()
        elif loop is not asyncio.get_running_loop():
            raise RuntimeError("this connection belongs to another event loop: make one per loop")
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this connection was made before a fork and belongs to the parent process: "
                "make a new one in the child"
            )
        if self._is_closed:
            raise ClosedError("the connection is closed")
        request.future = future
        timeout_s = request.timeout_s
        request.deadline_s = loop.time() + (
            self._request_timeout_s if timeout_s is None else timeout_s
        )
        self._enqueue(request)
        if self._watch is None:
            self._watch = loop.call_later(_WATCH_S, self._check_deadlines)

    def flush(self) -> None:
        """Write what was submitted now, without waiting for the end of the turn."""
        if self._link is not None:
            self._flush()

    async def close(self) -> None:
        """Drop the link; requests still waiting raise ClosedError. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        tasks = [*self._background, *([self._dialling] if self._dialling else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        link, self._link = self._link, None
        waiting = [*self._unsent, *self._delayed]
        if link is not None:
            waiting += link.inflight
            link.inflight.clear()
            link.on_lost = None
            link.transport.close()
        self._unsent.clear()
        self._delayed.clear()
        for request in waiting:
            _fail(request, _lost(request, ClosedError("the connection was closed")))
        self._release_room()
        self._directory.close()

    # ── Sending ─────────────────────────────────────────────────────────────────────────────────

    def _bind(self) -> asyncio.AbstractEventLoop:
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        return self._loop

    def _enqueue(self, request: Request) -> None:
        self._unsent.append(request)
        self._unsent_bytes += len(request.frame)
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._is_flush_due:
            assert self._loop is not None
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if not self._unsent or self._is_closed:
            return
        link = self._link
        if link is None or link.is_retired:
            self._dial()
            return
        if not link.is_writable:
            return
        requests = [request for request in self._unsent if not request.future.done()]
        self._unsent.clear()
        self._unsent_bytes = 0
        if requests:
            link.send(requests)
        self._release_room()

    def _is_congested(self) -> bool:
        return self._unsent_bytes > _HIGH_WATER_BYTES or (
            self._link is not None and not self._link.is_writable
        )

    async def _room(self) -> None:
        """Wait until what was written before has gone out, so that a slow server bounds memory."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._schedule_flush()
        await asyncio.wait_for(waiter, self._request_timeout_s)

    def _release_room(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    # ── Replies ─────────────────────────────────────────────────────────────────────────────────

    def _on_reply(self, request: Request, reply: Any) -> None:
        future = request.future
        if future.done():
            return
        error = first_error(request, reply)
        if error is not None:
            if self._handle_error(request, error):
                return
            if request.raises:
                future.set_exception(exception_for(error))
                return
        future.set_result(reply)

    def _handle_error(self, request: Request, error: ReplyError) -> bool:
        """True if the request goes on; its command was not applied, so it may be sent again."""
        answer = answer_to(error)
        if answer is Answer.RAISE or (request.count > 1 and request.effect is Effect.ONCE):
            return False
        request.tries += 1
        request.replies = []
        assert self._loop is not None
        if answer is Answer.LOAD:
            if request.script is None or request.tries > 3:
                return False
            load = commands(("SCRIPT", "LOAD", request.script.source), effect=Effect.IDEMPOTENT)
            load.raises = False
            load.future = self._loop.create_future()
            load.deadline_s = request.deadline_s
            self._unsent.extendleft((request, load))
            self._schedule_flush()
        elif answer is Answer.WAIT:
            wait_s = min(BUSY_MIN_S * 2 ** min(request.tries, 10), BUSY_MAX_S)
            self._delayed.add(request)
            self._loop.call_later(wait_s, self._resume, request)
        elif answer is Answer.ASK:
            node = moved_to(error)
            if node is None:
                return False
            task = self._loop.create_task(self._ask(node, request))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
        else:
            self._node = moved_to(error)
            self._directory.forget()
            self._unsent.appendleft(request)
            if self._link is not None:
                link, self._link = self._link, None
                link.retire()
            if request.tries > 1:  # the new server says the same: give it time to settle
                self._unsent.remove(request)
                self._delayed.add(request)
                wait_s = min(BUSY_MIN_S * 2 ** min(request.tries, 10), BUSY_MAX_S)
                self._loop.call_later(wait_s, self._resume, request)
            else:
                self._schedule_flush()
        return True

    def _resume(self, request: Request) -> None:
        if request in self._delayed:
            self._delayed.discard(request)
            self._enqueue(request)

    async def _ask(self, node: tuple[str, int], request: Request) -> None:
        """One command to the node that is taking the slot over."""
        try:
            link = await self._open_link(self.endpoint.at(*node))
        except (OSError, ChasquiError):
            self._delayed.add(request)
            self._resume(request)
            return
        asking = commands(("ASKING",), effect=Effect.READ, raises=False)
        assert self._loop is not None
        asking.future = self._loop.create_future()
        link.on_reply = self._on_reply
        link.on_lost = self._on_lost
        link.send([asking, request])
        link.retire()

    # ── The link's life ─────────────────────────────────────────────────────────────────────────

    def _on_lost(self, link: Link, error: Exception | None) -> None:
        if self._link is link:
            self._link = None
        again: list[Request] = []
        for request in link.inflight:
            request.replies = []
            if request.future.done():
                continue
            if request.effect is Effect.ONCE:
                _fail(request, _lost(request, error))
            else:
                again.append(request)
        link.inflight.clear()
        if self._is_closed:
            return
        self._unsent.extendleft(reversed(again))
        self._unsent_bytes += sum(len(request.frame) for request in again)
        if self._unsent:
            self._dial()

    def _dial(self) -> None:
        if self._dialling is None:
            assert self._loop is not None
            self._dialling = self._loop.create_task(self._keep_dialling())

    async def _keep_dialling(self) -> None:
        """Dial until there is a link or nobody waits for one."""
        wait_s = REDIAL_MIN_S
        try:
            while self._unsent or self._delayed:
                try:
                    link = await self._open_link(await self._locate())
                except (OSError, ChasquiError) as error:
                    self._node = None
                    self._directory.forget()
                    self._give_up_on(error)
                    if not (self._unsent or self._delayed):
                        return
                    await asyncio.sleep(wait_s * random.uniform(0.7, 1.0))
                    wait_s = min(wait_s * 1.5, REDIAL_MAX_S)
                    continue
                link.on_reply = self._on_reply
                link.on_lost = self._on_lost
                link.on_writable = self._flush  # type: ignore[method-assign]
                if link.is_lost:
                    continue
                self._link = link
                self._was_connected = True
                self._flush()
                return
        finally:
            self._dialling = None

    def _give_up_on(self, error: Exception) -> None:
        """A dial failed: those who need not wait for another are told."""
        hopeless = isinstance(error, AuthenticationError) or not self._was_connected
        logger.debug("no connection to %s: %s", self.endpoint, error)
        if hopeless:
            for request in [*self._unsent, *self._delayed]:
                failure = error if isinstance(error, AuthenticationError) else None
                _fail(request, failure or self._unreachable(error))
            self._unsent.clear()
            self._delayed.clear()
            self._unsent_bytes = 0
            self._release_room()

    def _unreachable(self, error: Exception | None) -> UnreachableError:
        told = f": {error}" if error and str(error) else ""
        return UnreachableError(f"no connection to {self.endpoint}{told}")

    async def _locate(self) -> Endpoint:
        """Where the queue's server is now."""
        if self._node is not None:
            return self.endpoint.at(*self._node)
        if self.endpoint.kind in ("single",):
            return self.endpoint
        async with asyncio.timeout(CONNECT_TIMEOUT_S * 2):
            return await asyncio.to_thread(self._directory.locate, self._key)

    async def _open_link(self, endpoint: Endpoint) -> Link:
        """Dial and shake hands; a link that is ready for requests."""
        loop = asyncio.get_running_loop()
        link = Link(_resolve)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if endpoint.path is not None:
                    await loop.create_unix_connection(lambda: link, endpoint.path)
                else:
                    host, port = endpoint.hosts[0]
                    await loop.create_connection(
                        lambda: link,
                        host,
                        port,
                        ssl=endpoint.tls,
                        server_hostname=host if endpoint.tls else None,
                    )
                link.profile = await self._shake_hands(link, endpoint)
        except BaseException as error:
            if hasattr(link, "transport"):
                link.transport.abort()
            if isinstance(error, TimeoutError):
                raise UnreachableError(
                    f"no connection to {endpoint} within {CONNECT_TIMEOUT_S:g} s"
                ) from None
            raise
        return link

    async def _shake_hands(self, link: Link, endpoint: Endpoint) -> ServerProfile:
        loop = asyncio.get_running_loop()
        username, password = endpoint.username, endpoint.password
        if self._credential_provider is not None:
            host = endpoint.hosts[0][0] if endpoint.hosts else None
            username, secret = await self._credential_provider(host)
            password = None if secret is None else Secret(secret)
        talk = handshake(
            username=username,
            password=password,
            db=endpoint.db,
            client_name=self._client_name,
            library=VERSION,
            probe_stream=self._key if self._is_reader else None,
        )
        pipeline = next(talk)
        while True:
            request = commands(*pipeline, effect=Effect.READ, raises=False)
            request.future = loop.create_future()
            lost = request.future

            def on_lost(_: Link, error: Exception | None, lost: Any = lost) -> None:
                if not lost.done():
                    lost.set_exception(error or ConnectionResetError("the server hung up"))

            link.on_lost = on_lost
            if link.is_lost:
                raise ConnectionResetError("the server hung up")
            link.send([request])
            replies = await request.future
            try:
                pipeline = talk.send(replies if request.count > 1 else [replies])
            except StopIteration as stop:
                profile: ServerProfile = stop.value
                return profile

    def _check_deadlines(self) -> None:
        """Every quarter second while anything waits: who waited too long, and is the link alive?"""
        assert self._loop is not None
        self._watch = None
        now_s = self._loop.time()
        for request in [r for r in (*self._unsent, *self._delayed) if r.deadline_s <= now_s]:
            _fail(request, _lost(request, self._unreachable(None)))
            self._delayed.discard(request)
        kept = [request for request in self._unsent if not request.future.done()]
        if len(kept) != len(self._unsent):
            self._unsent = deque(kept)
            self._unsent_bytes = sum(len(request.frame) for request in kept)
        link = self._link
        if link is not None and link.inflight and link.inflight[0].deadline_s <= now_s:
            logger.warning("%s has not answered in time: the link is dropped", self.endpoint)
            for request in link.inflight:
                if request.deadline_s <= now_s:
                    _fail(request, _lost(request, self._unreachable(None)))
            link.transport.abort()
        if self._unsent or self._delayed or (self._link is not None and self._link.inflight):
            self._watch = self._loop.call_later(_WATCH_S, self._check_deadlines)


#: Bytes not yet handed to the transport beyond which callers wait.
_HIGH_WATER_BYTES = 8 * 1024 * 1024


def _resolve(request: Request, reply: Any) -> None:
    if not request.future.done():
        request.future.set_result(reply)


def _fail(request: Request, error: Exception) -> None:
    if not request.future.done():
        request.future.set_exception(error)


def _lost(request: Request, error: Exception | None) -> Exception:
    """What a request raises when its reply will never come."""
    if request.was_sent and request.effect is not Effect.READ:
        return OutcomeUnknownError(
            "the command was sent and the link was lost before its answer came: "
            "it may or may not have been applied"
        )
    if isinstance(error, ChasquiError):
        return error
    told = f": {error}" if error and str(error) else ""
    return UnreachableError(f"the link to the server was lost{told}")
