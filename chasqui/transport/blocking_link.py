"""One live socket of the blocking connection: sends while it reads, so that neither side stalls."""

import contextlib
import errno
import math
import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from chasqui._core.reply import ProtocolError
from chasqui.errors import UnreachableError
from chasqui.model.config import Endpoint
from chasqui.transport.handshake import Handshake
from chasqui.transport.pipeline import Pipeline
from chasqui.transport.recovery import LOOK_S
from chasqui.transport.request import Request
from chasqui.transport.server import ServerProfile
from chasqui.transport.sockets import (
    ATTEMPT_DELAY_S,
    AddressInfo,
    by_turns,
    tune,
)

#: Bytes that are sent before replies are looked for.
_CHUNK_BYTES = 256 * 1024
#: The longest that poll() waits: its argument is a C int. The caller polls again.
_POLL_MAX_MS = 2**31 - 1

#: What a link calls for each request that is answered.
OnReply: TypeAlias = Callable[["BlockingLink", Request, Any], None]


class BlockingLink(Pipeline):
    """A link to one server. Only `interrupt` is thread-safe. It reads into `inbox`, which nothing
    else may use during a call."""

    def __init__(self, sock: socket.socket, endpoint: Endpoint, inbox: memoryview) -> None:
        sock.setblocking(False)
        super().__init__(endpoint)
        self._sock = sock
        self._pid = os.getpid()
        self._inbox = inbox
        self._poller = select.poll()

    def pump(self, take: Callable[[], Request | None], on_reply: OnReply) -> None:
        """Send what `take` gives and hand over the replies, until nothing is in flight.

        Raises TimeoutError when a request's deadline has passed, OSError or ProtocolError when the
        link is gone; `inflight` then holds what was not answered.
        """
        inflight = self.inflight
        rest = memoryview(b"")
        unread, due_s = 0, math.inf
        while True:
            if not rest and (request := take()) is not None:
                inflight.append(request)
                due_s = min(due_s, request.deadline_s)
                rest = memoryview(request.frame)
            if not inflight:
                if rest:
                    raise ProtocolError("Protocol error, a reply to what is not sent yet")
                return
            events, may_wait = select.POLLIN, True
            if rest:
                try:
                    sent = self._sock.send(rest)
                except (BlockingIOError, ssl.SSLWantWriteError):
                    events |= select.POLLOUT
                except ssl.SSLWantReadError:
                    pass
                else:
                    rest = rest[sent:]
                    unread += sent
                    if unread < _CHUNK_BYTES:
                        continue
                    may_wait = False
            now_s = time.monotonic()
            if now_s >= due_s:
                due_s = min(request.deadline_s for request in inflight)
                if now_s >= due_s:
                    raise _late()
            if self._poll(events, due_s - now_s if may_wait else 0.0):
                self._read(on_reply)
            unread = 0

    def ask(self, request: Request) -> Any:
        """Send one request; its reply, whatever it is."""
        unsent, replies = [request], []

        def on_reply(_: BlockingLink, __: Request, reply: Any) -> None:
            replies.append(reply)

        self.pump(lambda: unsent.pop() if unsent else None, on_reply)
        return replies[0]

    def is_alive(self) -> bool:
        """False if since the last call the server has hung up, or has sent a reply to nothing;
        or if that call was interrupted before it could close the link. Pushes are read and
        dropped."""
        if self.inflight:
            return False
        try:
            while self._poll(select.POLLIN, 0.0):
                self._read(_nobody)
        except (OSError, ProtocolError) as error:
            if not is_loss(error):
                raise
            return False
        return True

    def interrupt(self) -> None:
        """End the call that another thread is in."""
        with contextlib.suppress(OSError):
            # Not SSLSocket.shutdown: it drops the TLS layer and goes on in plain text.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this process's socket. The process that made the link also ends it at the server,
        though a forked child may have a copy; a child closes its copy only."""
        if os.getpid() == self._pid:
            self.interrupt()
        self._sock.close()
        self.forget_reader()

    def _poll(self, events: int, timeout_s: float) -> bool:
        """Whether there is something to read, after waiting for one of the events."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        self._poller.register(self._sock, events)
        ready = self._poller.poll(min(math.ceil(timeout_s * 1000), _POLL_MAX_MS))
        return any(event & ~select.POLLOUT for _, event in ready)

    def _read(self, on_reply: OnReply) -> None:
        try:
            count = self._sock.recv_into(self._inbox)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, "the server hung up")
        self.receive(self._inbox[:count], on_reply)


def open_link(
    endpoint: Endpoint, handshake: Handshake, deadline_s: float, inbox: memoryview
) -> BlockingLink:
    """Dial and shake hands; a link that is ready for requests."""
    sock = _dial(endpoint, deadline_s)
    link = BlockingLink(sock, endpoint, inbox)
    try:
        link.profile = _shake_hands(link, endpoint, handshake, deadline_s)
    except BaseException:
        link.close()
        raise
    return link


def _nobody(link: BlockingLink, request: Request, reply: Any) -> None:
    raise AssertionError("nothing was asked")


def is_loss(error: BaseException) -> bool:
    """Whether a link failed. A signal handler may raise anything, and many raise TimeoutError; the
    errors of the system and of this module have an errno."""
    if isinstance(error, OSError):
        return error.errno is not None or isinstance(error, UnreachableError)
    return isinstance(error, ProtocolError)


def _late() -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, "no answer in time")


def _dial(endpoint: Endpoint, deadline_s: float) -> socket.socket:
    if endpoint.path is not None:
        sock = _connect_unix(endpoint.path, deadline_s)
    else:
        host, port = endpoint.hosts[0]
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        sock = _connect(by_turns(found), deadline_s)
    try:
        tune(sock)
        if endpoint.tls is not None:
            sock = endpoint.tls.wrap_socket(
                sock, server_hostname=endpoint.host, do_handshake_on_connect=False
            )
            _encrypt(sock, deadline_s)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(addresses: list[AddressInfo], deadline_s: float) -> socket.socket:
    """A socket that is connected to the first address that answers. Each address has a head start
    before the next is tried too, so one that never answers delays the dial only that long."""
    untried, waiting = deque(addresses), dict[int, socket.socket]()
    failure = OSError(errno.EADDRNOTAVAIL, "the host has no address")
    next_s = -math.inf
    poller = select.poll()
    try:
        while untried or waiting:
            if (now_s := time.monotonic()) >= deadline_s:
                raise _late()
            if untried and (not waiting or now_s >= next_s):
                next_s = now_s + ATTEMPT_DELAY_S
                try:
                    sock = _begin(*untried.popleft())
                except OSError as error:
                    if not is_loss(error):
                        raise
                    failure = error
                    continue
                waiting[sock.fileno()] = sock
                poller.register(sock, select.POLLOUT)
            until_s = min(deadline_s, next_s) if untried else deadline_s
            for number, _ in poller.poll(math.ceil((until_s - now_s) * 1000)):
                poller.unregister(number)
                if not (code := waiting[number].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                    return waiting.pop(number)
                waiting.pop(number).close()
                failure = OSError(code, os.strerror(code))
    finally:
        for sock in waiting.values():
            sock.close()
    raise failure


def _begin(family: int, kind: int, protocol: int, _: str, address: Any) -> socket.socket:
    """A socket that connects to an address, perhaps still."""
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect_unix(path: str, deadline_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(path)
            except BlockingIOError:  # its queue of connections to accept is full
                if time.monotonic() >= deadline_s:
                    raise _late() from None
                time.sleep(LOOK_S)
            else:
                return sock
    except BaseException:
        sock.close()
        raise


def _encrypt(sock: ssl.SSLSocket, deadline_s: float) -> None:
    sock.setblocking(False)
    poller = select.poll()
    while True:
        try:
            return sock.do_handshake()
        except ssl.SSLWantReadError:
            poller.register(sock, select.POLLIN)
        except ssl.SSLWantWriteError:
            poller.register(sock, select.POLLOUT)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise _late()
        poller.poll(math.ceil(left_s * 1000))


def _shake_hands(
    link: BlockingLink, endpoint: Endpoint, handshake: Handshake, deadline_s: float
) -> ServerProfile:
    talk = handshake.talk(endpoint)
    request = next(talk)
    while True:
        request.deadline_s = deadline_s
        reply = link.ask(request)
        try:
            request = talk.send(reply)
        except StopIteration as stop:
            profile: ServerProfile = stop.value
            return profile
