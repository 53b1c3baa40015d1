"""What the asyncio and the blocking connection do alike: how long, how often, what callers get."""

import logging
import math
import mmap
import os
import random
import socket
import ssl
from collections import defaultdict
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Final, TypeAlias

from chasqui._core.reply import ProtocolError, ReplyError
from chasqui._version import VERSION
from chasqui.model.config import Endpoint
from chasqui.errors import AuthenticationError, ChasquiError, OutcomeUnknownError, UnreachableError
from chasqui.transport.request import Effect, Request
from chasqui.transport.server import (
    Answer,
    NotReadyError,
    ServerProfile,
    answer_to,
    exception_for,
    handshake,
    moved_to,
)

logger = logging.getLogger(__name__)

#: How long to look for the server before a dial counts as failed.
CONNECT_TIMEOUT_S: Final = 5.0
#: The head start that an address of a host has before the next is tried too (RFC 8305).
ATTEMPT_DELAY_S: Final = 0.25
#: How long a request may take in all, waiting for a lost server included.
REQUEST_TIMEOUT_S: Final = 30.0
#: How long the kernel waits for a silent peer to acknowledge what was sent.
TCP_USER_TIMEOUT_MS: Final = 20_000
#: Bytes that are read at once.
INBOX_BYTES: Final = 256 * 1024

#: A server that is away is dialled at most five times a second by all who search for it together,
#: and however long it was away at least twice: work goes on within a second of its return.
_SEARCH_MIN_S, _SEARCH_MAX_S = 0.2, 0.45
#: How much of an outage's length lies between two dials: more than the least after a minute.
_SEARCH_SHARE = 1 / 300
#: How often those who wait for their turn look whether another has found the server.
LOOK_S: Final = 0.05
#: Links that break young are made anew ever more slowly.
_AGAIN_MIN_S, _AGAIN_MAX_S = 0.2, 0.4
#: A link that lived this long was a good one.
_GOOD_LINK_S = 1.0
_BUSY_MIN_S, _BUSY_MAX_S = 0.02, 0.5
#: The loss of a server is logged at most once in this time.
_TOLD_S = 10.0

#: What `socket.getaddrinfo` gives: family, kind, protocol, name, address.
AddressInfo: TypeAlias = tuple[int, int, int, str, Any]


class Search:
    """Spaces the dials of connections that need the same server: while it is away one at a time
    looks for it, and once it is found nobody waits. That it is lost is logged once for all of them,
    and so is its return. Threads may share one: a race costs a dial, or a line in the log."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._next_s = 0.0
        #: Since when the server is known to be lost.
        self._lost_s: float | None = None
        #: When its loss was last logged, and under which name, until it is back.
        self._told_s = -math.inf
        self._told: str | None = None

    def wait_s(self, now_s: float) -> float:
        """How long to wait before the next dial. Whoever waits asks again every `LOOK_S`."""
        return max(0.0, self._next_s - now_s)

    def dialling(self, now_s: float) -> None:
        if self._began_s is None:
            self._began_s = now_s
        gap_s = max(_SEARCH_MIN_S, min((now_s - self._began_s) * _SEARCH_SHARE, _SEARCH_MAX_S))
        self._next_s = now_s + gap_s * random.uniform(1.0, 1.1)

    def missed(self, endpoint: Endpoint, error: Exception, now_s: float) -> None:
        """A server that was there cannot be reached, or breaks the protocol."""
        if self._lost_s is None:
            self._lost_s = now_s
        if self._told is None and now_s - self._told_s >= _TOLD_S:
            self._told, self._told_s = str(endpoint), now_s
            logger.warning(
                "lost the server at %s: %s", endpoint, _why(error), extra={"server": self._told}
            )

    def found(self, now_s: float) -> None:
        self._began_s, self._next_s = None, 0.0
        since_s, self._lost_s = self._lost_s, None
        server, self._told = self._told, None
        if server is not None and since_s is not None:
            away_s = round(now_s - since_s, 1)
            fields = {"server": server, "away_s": away_s}
            logger.warning("the server at %s is back after %.1f s", server, away_s, extra=fields)


class Redial:
    """Spaces the dials of one connection: those of all who search, and, after links that broke
    young, its own."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._broken = 0
        self._next_s = 0.0
        self._up_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """How long to wait before the next dial; less, if meanwhile another finds the server."""
        return max(self._next_s - now_s, self._search.wait_s(now_s))

    def dialling(self, now_s: float) -> None:
        self._search.dialling(now_s)

    def missed(self, endpoint: Endpoint, error: Exception, now_s: float) -> None:
        self._search.missed(endpoint, error, now_s)

    def link_up(self, now_s: float) -> None:
        self._search.found(now_s)
        self._up_s = now_s

    def link_down(self, now_s: float) -> None:
        """A link is lost. The first that breaks young is made anew at once: a server may have
        moved."""
        if now_s - self._up_s >= _GOOD_LINK_S:
            self._broken = 0
            return
        self._broken += 1
        if self._broken > 1:
            gap_s = min(_AGAIN_MIN_S * 1.5 ** min(self._broken - 2, 20), _AGAIN_MAX_S)
            self._next_s = now_s + gap_s * random.uniform(1.0, 1.3)


def busy_wait_s(tries: int) -> float:
    """How long to wait before a request goes again to a server that is busy with itself."""
    return min(_BUSY_MIN_S * 1.5 ** min(tries, 20), _BUSY_MAX_S)


@dataclass(frozen=True, slots=True)
class Introduction:
    """Who we say we are on each new link."""

    client_name: str
    #: With it, the server is asked whether it can CLAIM.
    probe_stream: bytes | None

    def talk(
        self, endpoint: Endpoint
    ) -> Generator[list[tuple[Any, ...]], list[Any], ServerProfile]:
        """The handshake with one server."""
        return handshake(
            username=endpoint.username,
            password=endpoint.password,
            db=endpoint.db,
            client_name=self.client_name,
            library=VERSION,
            probe_stream=self.probe_stream,
        )


def by_turns(found: Iterable[AddressInfo]) -> list[AddressInfo]:
    """A host's addresses in the order to try them: IPv6 and IPv4 take turns (RFC 8305), for what is
    wrong with one of a family is mostly wrong with all of it."""
    families: defaultdict[int, list[AddressInfo]] = defaultdict(list)
    for one in found:
        families[one[0]].append(one)
    return [one for one in chain(*zip_longest(*families.values())) if one is not None]


def tune(sock: socket.socket) -> None:
    """Notice a peer that is gone, and send small requests at once."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)


def make_inbox() -> memoryview:
    """Memory for links to read into, which stays. A block for every read would be cut from the end
    of the heap: what is allocated before it is freed stays behind it, and the heap creeps.

    It is mapped: only what replies have filled is resident, and a forked child has its own."""
    return memoryview(mmap.mmap(-1, INBOX_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def refuse(request: Request, error: ReplyError) -> Answer:
    """What becomes of a request that the server refused, noted on it; RAISE: it ends here.

    A refused command was not applied, so it may be sent again; but of several commands, some were.
    """
    answer = answer_to(error)
    if answer is Answer.RAISE or (request.count > 1 and request.effect is Effect.ONCE):
        return Answer.RAISE
    if answer is Answer.LOAD:
        if request.script is None or request.count > 1:
            return Answer.RAISE
        request.send_source()
    if answer is Answer.ASK and (request.count > 1 or moved_to(error) is None):
        answer = Answer.WAIT  # ASKING is for one command: wait until the slot has moved
    request.tries += 1
    request.refusal = error
    request.replies = []
    return answer


def is_final(error: Exception, *, was_connected: bool) -> bool:
    """Whether a failed dial ends the wait of those who need it, instead of another dial."""
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
    """An error in words: those of asyncio name only the call that failed."""
    if isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def loss(request: Request, endpoint: Endpoint) -> Exception:
    """What a caller gets when time is up or the link is lost for good.

    Only a request that went out and was not answered is in doubt; one that was refused was not
    applied, and its refusal is told.
    """
    if request.is_in_doubt and request.effect is not Effect.READ:
        return OutcomeUnknownError(
            f"a command was sent to {endpoint} and its answer never came: "
            "it may or may not have been applied"
        )
    if request.refusal is not None:
        return exception_for(request.refusal)
    return UnreachableError(f"no answer from {endpoint} in time")
