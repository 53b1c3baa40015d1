"""One live socket of the asyncio connection: frames out, replies in."""

import asyncio
import contextlib
import functools
import ipaddress
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from chasqui._core.reply import ProtocolError
from chasqui.errors import UnreachableError
from chasqui.model.config import CredentialProvider, Endpoint
from chasqui.transport.handshake import Handshake
from chasqui.transport.pipeline import Pipeline
from chasqui.transport.request import Request
from chasqui.transport.server import ServerProfile
from chasqui.transport.sockets import (
    ATTEMPT_DELAY_S,
    CONNECT_TIMEOUT_S,
    INBOX_BYTES,
    AddressInfo,
    by_turns,
    make_inbox,
    tune,
)

T = TypeVar("T")

#: Bytes that the transport may hold before the link counts as not writable.
_TRANSPORT_HIGH_BYTES = 1024 * 1024

#: The most that TLS may have decrypted already beyond what it says is there.
_RECORD_BYTES = 32 * 1024
#: By event loop, the inboxes that no link reads into right now: mostly one, for all links.
_spare_inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[memoryview]] = (
    weakref.WeakKeyDictionary()
)


class Link(Pipeline, asyncio.BufferedProtocol):
    """A link to one server. Its owner sets the three callbacks."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.on_reply: Callable[[Link, Request, Any], None] = _resolve
        self.on_lost: Callable[[Link], None] = _fail_first
        self.on_writable: Callable[[], None] = lambda: None
        #: Why we dropped it: the server broke the protocol or did not answer.
        self.fault: Exception | None = None
        loop = asyncio.get_running_loop()
        #: Done when the socket is closed.
        self.lost: asyncio.Future[None] = loop.create_future()
        #: What it reads into, from `get_buffer` until the replies are handed over.
        self._inbox: memoryview | None = None
        self._spare = _spare_inboxes.setdefault(loop, [])
        self._transport: asyncio.Transport | None = None
        #: The socket below the transport.
        self.sock: socket.socket | None = None
        #: Why the link was lost, where that is known.
        self.error: Exception | None = None
        self._pid = os.getpid()

    def send(self, requests: Iterable[Request]) -> None:
        """Write the frames of all requests at once; their replies are now awaited."""
        assert self._transport is not None
        frames = []
        try:
            for request in requests:
                self.inflight.append(request)
                frames.append(request.frame)
            self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))
        except BaseException:
            self.abort()  # a signal handler raised, and nobody knows what was written
            raise

    def retire(self) -> None:
        """Send no more, and close as soon as nothing is in flight."""
        self.is_retired = True
        if not self.inflight:
            self.abort()

    def abort(self) -> None:
        """Drop the socket now; `lost` tells when that is done."""
        self.is_retired = True
        self.shut_down()
        if self._transport is not None:
            self._transport.abort()

    def shut_down(self) -> None:
        """End the link at the server too, though a forked child may have a copy of the socket. In a
        forked child this does nothing: the link is the parent's."""
        if self.sock is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    # ── Called by the event loop ────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_TRANSPORT_HIGH_BYTES)
        tune(transport.get_extra_info("socket"))

    def get_buffer(self, sizehint: int) -> memoryview:
        if (
            sizehint > INBOX_BYTES
        ):  # TLS hands over all it has in one go: at the end of the stream it drops the rest
            self._inbox = memoryview(bytearray(sizehint + _RECORD_BYTES))
        elif self._inbox is None:
            self._inbox = self._spare.pop() if self._spare else make_inbox()
        return self._inbox

    def buffer_updated(self, nbytes: int) -> None:
        inbox, self._inbox = self._inbox, None
        assert inbox is not None
        try:
            self.receive(inbox[:nbytes], self.on_reply)
        except ProtocolError as error:
            self.fault = error
            self.abort()
        except BaseException:
            self.abort()  # out of step, and its reader may still look at what is in the inbox
            raise
        else:
            if self.is_retired and not self.inflight:
                self.retire()
        self._give_back(inbox)

    def _give_back(self, inbox: memoryview) -> None:
        if len(inbox) == INBOX_BYTES:
            self._spare.append(inbox)

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        self.on_writable()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_retired = True
        self.error = error
        self.forget_reader()
        if self._inbox is not None:
            self._give_back(self._inbox)
            self._inbox = None
        if not self.lost.done():
            self.lost.set_result(None)
        self.on_lost(self)


async def open_link(
    endpoint: Endpoint, handshake: Handshake, provider: CredentialProvider | None
) -> Link:
    """Dial and shake hands; a link that is ready for requests."""
    loop = asyncio.get_running_loop()
    link = Link(endpoint)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if provider is not None:
                endpoint = endpoint.with_credentials(await provider(endpoint.host))
            if endpoint.path is not None:
                link.sock = await _dial(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", endpoint.path)
                await loop.create_unix_connection(lambda: link, sock=link.sock)
            else:
                link.sock = await _connect(*endpoint.hosts[0])
                name = endpoint.host if endpoint.tls else None
                await loop.create_connection(
                    lambda: link, sock=link.sock, ssl=endpoint.tls, server_hostname=name
                )
            link.profile = await _shake_hands(link, endpoint, handshake)
    except BaseException as error:
        link.abort()
        if isinstance(error, TimeoutError):
            raise UnreachableError(
                f"no connection to {endpoint} within {CONNECT_TIMEOUT_S:g} s"
            ) from None
        raise
    return link


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """The result of a function that blocks, run in a thread of its own: handlers may block all
    threads of the loop for as long as they like. If the caller is cancelled, nothing waits for the
    thread, not even the end of Python. Raises RuntimeError if no thread can be started."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            settle = functools.partial(outcome.set_result, function(*arguments))
        except BaseException as error:
            settle = functools.partial(outcome.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: outcome.done() or settle())

    threading.Thread(target=run, name="chasqui", daemon=True).start()
    return await outcome


async def in_thread_or_here(function: Callable[[], T]) -> T:
    """The same; if no thread can be started, the function runs here and blocks the loop."""
    try:
        return await in_thread(function)
    except RuntimeError:
        return function()


async def _connect(host: str, port: int) -> socket.socket:
    """A socket that is connected to the first address of the host which answers."""
    look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        found = await in_thread(look_up)
    else:
        found = look_up()  # no name server is asked
    return await _first_of(by_turns(found))


async def _first_of(addresses: list[AddressInfo]) -> socket.socket:
    """A socket that is connected to the first address that answers. Each address has a head start
    before the next is tried too, so one that never answers delays the dial only that long."""
    loop = asyncio.get_running_loop()
    untried = deque(addresses)
    failure: BaseException = OSError("the host has no address")
    dials: set[asyncio.Task[socket.socket]] = set()
    try:
        while untried or dials:
            if untried:
                dials.add(loop.create_task(_dial(*untried.popleft())))
            done, _ = await asyncio.wait(
                dials,
                timeout=ATTEMPT_DELAY_S if untried else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for dial in done:
                dials.discard(dial)
                if (error := dial.exception()) is None:
                    return dial.result()
                failure = error
    finally:
        for dial in dials:
            dial.add_done_callback(_close_unwanted)
            dial.cancel()
    raise failure


async def _dial(family: int, kind: int, protocol: int, _: str, address: Any) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def _close_unwanted(dial: asyncio.Task[socket.socket]) -> None:
    if not dial.cancelled() and dial.exception() is None:
        dial.result().close()


async def _shake_hands(link: Link, endpoint: Endpoint, handshake: Handshake) -> ServerProfile:
    loop = asyncio.get_running_loop()
    talk = handshake.talk(endpoint)
    request = next(talk)
    while True:
        request.outcome = loop.create_future()
        if link.is_retired:
            raise link.error or _hung_up()
        link.send([request])
        try:
            request = talk.send(await request.outcome)
        except StopIteration as stop:
            profile: ServerProfile = stop.value
            return profile


def _resolve(link: Link, request: Request, reply: Any) -> None:
    if not request.outcome.done():
        request.outcome.set_result(reply)


def _fail_first(link: Link) -> None:
    for request in link.inflight:
        if not request.outcome.done():
            request.outcome.set_exception(link.error or _hung_up())


def _hung_up() -> Exception:
    return ConnectionResetError("the server hung up")
