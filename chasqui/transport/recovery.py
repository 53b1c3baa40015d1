"""The policy of both connections: when to dial, and what a refusal or a lost link means."""

import logging
import math
import os
import random
import socket
import ssl
from typing import Final, TypeAlias

from chasqui._core.reply import ProtocolError, ReplyError
from chasqui.errors import AuthenticationError, ChasquiError, OutcomeUnknownError, UnreachableError
from chasqui.model.config import Endpoint
from chasqui.transport.request import Effect, Request
from chasqui.transport.server import (
    NotReadyError,
    Recovery,
    exception_for,
    meaning_of,
    moved_to,
)

logger = logging.getLogger(__name__)

#: How long a request may take in all, waiting for a lost server included.
REQUEST_TIMEOUT_S: Final = 30.0
#: The time between two dials to a server that is away. All connections with one shared pacing
#: together dial at most five times a second, and at least twice, however long the server is away:
#: work goes on within a second of its return.
_DIAL_MIN_S, _DIAL_MAX_S = 0.2, 0.45
#: That time as a share of the outage so far: it exceeds the minimum after a minute.
_DIAL_SHARE = 1 / 300
#: How often a connection that waits for its dial looks whether another has found the server.
LOOK_S: Final = 0.05
#: A link lost within a second is redialled with a growing delay of its own.
_AGAIN_MIN_S, _AGAIN_MAX_S = 0.2, 0.4
_GOOD_LINK_S = 1.0
#: How long a request waits that a busy server refused; it grows with each try.
_BUSY_MIN_S, _BUSY_MAX_S = 0.02, 0.5
#: The loss of a server is logged at most once in this time.
_LOG_EVERY_S = 10.0

#: Host and port of a node of a cluster.
Node: TypeAlias = tuple[str, int]


class SharedDialPacing:
    """Spaces the dials of all connections that need the same server.

    While the server is away, one connection at a time dials it. Once one of them has a link, none
    waits. The loss of the server and its return are logged once for all of them. Threads may share
    one: a race costs a dial or a line in the log.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._next_s = 0.0
        #: Since when the server is known to be lost.
        self._lost_s: float | None = None
        #: When its loss was last logged, and under which name, until it is back.
        self._logged_s = -math.inf
        self._logged: str | None = None

    def wait_s(self, now_s: float) -> float:
        """How long to wait before the next dial. Ask again every `LOOK_S`."""
        return max(0.0, self._next_s - now_s)

    def dialling(self, now_s: float) -> None:
        """A dial begins."""
        if self._began_s is None:
            self._began_s = now_s
        gap_s = max(_DIAL_MIN_S, min((now_s - self._began_s) * _DIAL_SHARE, _DIAL_MAX_S))
        self._next_s = now_s + gap_s * random.uniform(1.0, 1.1)

    def missed(self, endpoint: Endpoint, error: Exception, now_s: float) -> None:
        """A server that was there cannot be reached, or breaks the protocol."""
        if self._lost_s is None:
            self._lost_s = now_s
        if self._logged is None and now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged, self._logged_s = str(endpoint), now_s
            logger.warning(
                "lost the server at %s: %s", endpoint, _why(error), extra={"server": self._logged}
            )

    def found(self, now_s: float) -> None:
        """A dial has made a link."""
        self._began_s, self._next_s = None, 0.0
        since_s, self._lost_s = self._lost_s, None
        server, self._logged = self._logged, None
        if server is not None and since_s is not None:
            away_s = round(now_s - since_s, 1)
            fields = {"server": server, "away_s": away_s}
            logger.warning("the server at %s is back after %.1f s", server, away_s, extra=fields)


class DialPacing:
    """Spaces the dials of one connection to a server, and knows how its last dials went.

    It follows the shared pacing. If its links are lost within a second, it waits for a growing time
    of its own as well: what this connection sends may be what breaks them.
    """

    def __init__(self, endpoint: Endpoint, shared: SharedDialPacing) -> None:
        self._endpoint = endpoint
        self._shared = shared
        self._broken = 0
        self._next_s = 0.0
        self._up_s = 0.0
        self.was_connected = False
        #: The node that the last MOVED named, for the next dial.
        self.node: Node | None = None

    def wait_s(self, now_s: float) -> float:
        """How long to wait before the next dial; less, if meanwhile another finds the server."""
        return max(self._next_s - now_s, self._shared.wait_s(now_s))

    def dialling(self, now_s: float) -> None:
        """A dial begins."""
        self._shared.dialling(now_s)

    def failed(self, error: Exception, now_s: float) -> None:
        """The dial has failed."""
        fields = {"server": str(self._endpoint)}
        logger.debug("no connection to %s: %s", self._endpoint, error, extra=fields)
        self.node = None
        if self.was_connected:
            self.missed(error, now_s)

    def missed(self, error: Exception, now_s: float) -> None:
        """A server that was there cannot be reached, or breaks the protocol."""
        self._shared.missed(self._endpoint, error, now_s)

    def link_up(self, now_s: float) -> None:
        """The dial has made a link."""
        self.was_connected = True
        self._shared.found(now_s)
        self._up_s = now_s

    def link_down(self, now_s: float) -> None:
        """The link is lost, or leads to a wrong server. The first link lost within a second is
        redialled without delay: the server may have moved."""
        if now_s - self._up_s >= _GOOD_LINK_S:
            self._broken = 0
            return
        self._broken += 1
        if self._broken > 1:
            gap_s = min(_AGAIN_MIN_S * 1.5 ** min(self._broken - 2, 20), _AGAIN_MAX_S)
            self._next_s = now_s + gap_s * random.uniform(1.0, 1.3)


def busy_wait_s(tries: int) -> float:
    """How long a request waits before it is sent again to a busy server."""
    return min(_BUSY_MIN_S * 1.5 ** min(tries, 20), _BUSY_MAX_S)


def recovery_for(request: Request, error: ReplyError) -> Recovery:
    """What to do with a request that the server refused; the refusal is noted on the request.

    A refused command was not applied, so it may be sent again. Of several commands, some may have
    been applied: with effect ONCE they are not sent again.
    """
    recovery = meaning_of(error)
    if recovery is Recovery.RAISE or (request.count > 1 and request.effect is Effect.ONCE):
        return Recovery.RAISE
    if recovery is Recovery.LOAD:
        if request.script is None or request.count > 1:
            return Recovery.RAISE
        request.send_source()
    if recovery is Recovery.ASK and (request.count > 1 or moved_to(error) is None):
        recovery = Recovery.WAIT  # ASKING is for one command: wait until the hash slot has moved
    request.tries += 1
    request.refusal = error
    request.replies = []
    return recovery


def is_final(error: Exception, *, was_connected: bool) -> bool:
    """Whether a failed dial fails the requests that wait for it; otherwise the dial is repeated."""
    is_of_the_link = isinstance(error, OSError | ChasquiError | ProtocolError)
    if isinstance(error, AuthenticationError) or not is_of_the_link:
        return True
    return not was_connected and not isinstance(error, NotReadyError)


def dial_failure(endpoint: Endpoint, error: Exception) -> Exception:
    """What a caller gets when no link could be made."""
    if isinstance(error, OSError | ProtocolError) and not isinstance(error, ChasquiError):
        return UnreachableError(f"no connection to {endpoint}: {_why(error)}")
    return error


def _why(error: Exception) -> str:
    """An error in words: the messages of asyncio name only the call that failed."""
    if isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def error_for_lost(request: Request, endpoint: Endpoint) -> Exception:
    """What a caller gets when time is up or the link is lost for good.

    The outcome is unknown only if the request was sent and not answered. A refused request was not
    applied: the caller gets the refusal.
    """
    if request.is_in_doubt and request.effect is not Effect.READ:
        return OutcomeUnknownError(
            f"a command was sent to {endpoint} and its answer never came: "
            "it may or may not have been applied"
        )
    if request.refusal is not None:
        return exception_for(request.refusal)
    return UnreachableError(f"no answer from {endpoint} in time")
