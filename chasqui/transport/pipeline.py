"""What both kinds of link share: the requests in flight, and the reader of their replies."""

from collections import deque
from collections.abc import Callable
from typing import Any, Self

from chasqui._core.reply import INCOMPLETE, ProtocolError, Push, ReplyReader
from chasqui.model.config import Endpoint
from chasqui.transport.request import Request
from chasqui.transport.server import ServerProfile


class Pipeline:
    """The requests that one link has sent and that are not answered yet.

    A server answers in order, so the next reply is for the oldest of them. A cancelled request
    stays here until its reply has come: otherwise the next request would take that reply.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.profile: ServerProfile | None = None
        self.inflight: deque[Request] = deque()
        self.is_writable = True
        #: No new requests go out: the link closes once its last reply has come.
        self.is_retired = False
        self._reader = ReplyReader()

    def receive(self, data: memoryview, on_reply: Callable[[Self, Request, Any], None]) -> None:
        """Parse the next bytes; call `on_reply` for each request that is answered in full.

        Raises ProtocolError for bytes that are no RESP, or a reply to nothing. Pushes are dropped.
        """
        reader, inflight = self._reader, self.inflight
        reader.feed(data)
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
            on_reply(self, request, reply)

    def forget_reader(self) -> None:
        """Free the builder of a reply that broke off now, not when the link itself is freed."""
        self._reader = ReplyReader()
