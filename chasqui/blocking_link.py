"""One live socket of the blocking connection: sends while it reads, so that neither side stalls."""

import contextlib
import math
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from chasqui._core.reply import INCOMPLETE, ProtocolError, Push, ReplyReader
from chasqui.config import Endpoint
from chasqui.policy import Introduction, tune
from chasqui.request import Effect, Request, commands
from chasqui.server import ServerProfile

#: Bytes that are sent before replies are looked for.
_CHUNK_BYTES = 256 * 1024
#: The longest that poll() waits: its argument is a C int. Who waits longer asks again.
_POLL_MAX_MS = 2**31 - 1


class BlockingLink:
    """A link to one server. Not thread-safe, but for `interrupt`. It reads into `inbox`, which is
    its owner's, and nobody else's while a call lasts."""

    def __init__(self, sock: socket.socket, endpoint: Endpoint, inbox: memoryview) -> None:
        sock.setblocking(False)
        self.endpoint = endpoint
        self.profile: ServerProfile | None = None
        self.inflight: deque[Request] = deque()
        self._sock = sock
        self._inbox = inbox
        self._reader = ReplyReader()
        self._poller = select.poll()

    def pump(
        self, take: Callable[[], Request | None], on_reply: Callable[[Request, Any], None]
    ) -> None:
        """Send what `take` gives, hand over what comes back, until nothing is on its way.

        Raises TimeoutError when a request's deadline has passed, OSError or ProtocolError when the
        link is gone; `inflight` then tells what was on its way.
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
                    raise TimeoutError("no answer in time")
            if self._poll(events, due_s - now_s if may_wait else 0.0):
                self._read(on_reply)
            unread = 0

    def ask(self, request: Request) -> Any:
        """Send one request; its reply, whatever it is."""
        unsent, replies = [request], []

        def on_reply(_: Request, reply: Any) -> None:
            replies.append(reply)

        self.pump(lambda: unsent.pop() if unsent else None, on_reply)
        return replies[0]

    def is_alive(self) -> bool:
        """False if the server has hung up, or said something unasked, since the last call."""
        return not self._poll(select.POLLIN, 0.0)

    def interrupt(self) -> None:
        """End the call that another thread is in."""
        with contextlib.suppress(OSError):
            # Not the TLS socket's own: that one would go on in plain text.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this process's socket; nothing is sent."""
        self._sock.close()
        # The builder of a reply that broke off is free now, not when somebody forgets this link.
        self._reader = ReplyReader()

    def _poll(self, events: int, timeout_s: float) -> bool:
        """Whether there is something to read, after waiting for one of the events."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        self._poller.register(self._sock, events)
        ready = self._poller.poll(min(math.ceil(timeout_s * 1000), _POLL_MAX_MS))
        return any(event & ~select.POLLOUT for _, event in ready)

    def _read(self, on_reply: Callable[[Request, Any], None]) -> None:
        reader, inflight = self._reader, self.inflight
        try:
            count = self._sock.recv_into(self._inbox)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        if not count:
            raise ConnectionResetError("the server hung up")
        reader.feed(self._inbox[:count])
        while True:
            reply = reader.read(inflight[0].builder if inflight else None)
            if reply is INCOMPLETE:
                return
            if type(reply) is Push:
                continue
            if not inflight:
                raise ProtocolError("Protocol error, a reply that nobody asked for")
            request = inflight[0]
            if request.count > 1:
                request.replies.append(reply)
                if len(request.replies) < request.count:
                    continue
                reply = request.replies
            del inflight[0]
            request.link = self
            on_reply(request, reply)


def open_link(
    endpoint: Endpoint, introduction: Introduction, deadline_s: float, inbox: memoryview
) -> BlockingLink:
    """Dial and shake hands; a link that is ready for requests."""
    sock = _dial(endpoint, deadline_s)
    link = BlockingLink(sock, endpoint, inbox)
    try:
        link.profile = _shake_hands(link, endpoint, introduction, deadline_s)
    except BaseException:
        link.close()
        raise
    return link


def _dial(endpoint: Endpoint, deadline_s: float) -> socket.socket:
    left_s = max(0.001, deadline_s - time.monotonic())
    if endpoint.path is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        sock = socket.create_connection(endpoint.hosts[0], timeout=left_s)
    try:
        sock.settimeout(left_s)
        if endpoint.path is not None:
            sock.connect(endpoint.path)
        tune(sock)
        if endpoint.tls is not None:
            sock = endpoint.tls.wrap_socket(sock, server_hostname=endpoint.host)
    except BaseException:
        sock.close()
        raise
    return sock


def _shake_hands(
    link: BlockingLink, endpoint: Endpoint, introduction: Introduction, deadline_s: float
) -> ServerProfile:
    talk = introduction.talk(endpoint)
    pipeline = next(talk)
    while True:
        request = commands(*pipeline, effect=Effect.READ)
        request.deadline_s = deadline_s
        replies = link.ask(request)
        try:
            pipeline = talk.send(replies if request.count > 1 else [replies])
        except StopIteration as stop:
            profile: ServerProfile = stop.value
            return profile
