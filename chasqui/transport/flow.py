"""The way of a request from `submit` to its reply: one state machine, no I/O, no clock.

The asyncio and the blocking connection drive the same `RequestFlow`. They own sockets, clocks and
waiting. The flow decides what is sent, sent again, held back and given up:

- A request waits in `unsent` until its driver takes it and writes it to a link. It is in flight
  then, in the `inflight` of that link, until its reply comes or the link is lost.
- A refusal may ask for the same request again: at once with the script's text, in a moment, at
  another node, or over a new link. A request that waits for its moment is in `held`.
- After a lost link, reads and idempotent writes are sent again. A request of effect ONCE may have
  been applied, so it fails with OutcomeUnknownError.
- A request whose deadline has passed fails, and is not sent any more.

Every request is in exactly one of `unsent`, `held` and an `inflight`, and leaves it once: with a
reply or an exception for its outcome. A cancelled request in flight stays until its reply has come.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from chasqui._core.reply import ReplyError
from chasqui.errors import ClosedError
from chasqui.model.config import Endpoint
from chasqui.transport.pipeline import Pipeline
from chasqui.transport.recovery import Node, busy_wait_s, error_for_lost, recovery_for
from chasqui.transport.request import Effect, Outcome, Request, commands, first_error
from chasqui.transport.server import Recovery, exception_for, meaning_of, moved_to

L = TypeVar("L", bound=Pipeline)


class RequestFlow(Generic[L]):
    """The requests of one connection: what is unsent, held and in flight.

    The driver calls `submit`, `reply`, `link_up`, `link_lost`, `tick` and `close`, and passes in
    the time. In return it writes what `take` gives, dials while `needs_link`, asks the nodes in
    `asks`, retires all links on `must_redial`, and calls `tick` at `next_s`. The flow calls `wake`
    when there is any of that to do, and not again until the driver resets `is_awake`.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float, look_every_s: float = 0.0) -> None:
        #: For the messages of errors.
        self.endpoint = endpoint
        #: For requests that have no timeout of their own.
        self.timeout_s = timeout_s
        self.wake: Callable[[], None] = _do_nothing
        self.is_awake = False
        self.is_closed = False
        #: Where requests go.
        self.link: L | None = None
        #: All that are open: also those that only finish what they have, or serve an ASK.
        self.links: set[L] = set()
        self.unsent: deque[Request] = deque()
        self.unsent_bytes = 0
        #: Refused for now: when to send each again; infinite while another node is asked.
        self.held: dict[Request, float] = {}
        #: Held since the last tick, which sets their times.
        self._refused: list[Request] = []
        #: Refused with ASK: the node to send each to, for the driver to take.
        self.asks: list[tuple[Node, Request]] = []
        #: `link` leads to a wrong server: retire all links and dial anew.
        self.must_redial = False
        #: The node that the last MOVED named, for the next dial.
        self.node: Node | None = None
        #: When `tick` is due.
        self.next_s = math.inf
        #: When the first deadline passes, and the least time between two looks at deadlines:
        #: they may be many, and all different.
        self._look_s = math.inf
        self._look_every_s = look_every_s

    # ── Sending ─────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, request: Request, outcome: Outcome, now_s: float, boot_s: float, at_once: bool
    ) -> L | None:
        """Take a request on. Returns the link to write it to now; None if it waits in `unsent`,
        as it does unless `at_once`."""
        if self.is_closed:
            raise ClosedError("the connection is closed")
        request.outcome = outcome
        timeout_s = request.timeout_s
        if timeout_s is None:
            timeout_s = self.timeout_s
        request.deadline_s = deadline_s = now_s + timeout_s
        request.boot_deadline_s = boot_s + timeout_s
        if deadline_s < self._look_s:
            self._look_s = deadline_s
            self._tick_at(deadline_s)
        if at_once and not self.unsent:
            link = self.link
            if link is not None and link.is_writable and not link.is_retired:
                return link
        self.unsent.append(request)
        self.unsent_bytes += len(request.frame)
        if not self.is_awake:
            self.is_awake = True
            self.wake()
        return None

    def take(self, boot_s: float) -> list[Request]:
        """All that is to be written now. Requests that are too late fail."""
        late = [request for request in self.unsent if request.boot_deadline_s <= boot_s]
        if late:
            self._drop_unsent(late)
            for request in late:  # their callers may send more: that joins `unsent`
                self._fail(request)
        requests = [request for request in self.unsent if not request.outcome.done()]
        self.unsent.clear()
        self.unsent_bytes = 0
        return requests

    def take_one(self, boot_s: float) -> Request | None:
        """The same for a driver that writes one at a time; None: nothing is to be written."""
        while self.unsent:
            request = self.unsent.popleft()
            self.unsent_bytes -= len(request.frame)
            if request.boot_deadline_s <= boot_s:
                self._fail(request)
            elif not request.outcome.done():
                return request
        return None

    @property
    def needs_link(self) -> bool:
        """True while requests wait for a link, or will."""
        return bool(self.unsent or self.held)

    def _drop_unsent(self, dropped: Iterable[Request]) -> None:
        gone = set(dropped)
        self.unsent = deque(request for request in self.unsent if request not in gone)
        self.unsent_bytes = sum(len(request.frame) for request in self.unsent)

    def _send_again(self, request: Request) -> None:
        self.unsent.append(request)
        self.unsent_bytes += len(request.frame)
        self._wake_up()

    def _wake_up(self) -> None:
        if not self.is_awake:
            self.is_awake = True
            self.wake()

    # ── Replies ─────────────────────────────────────────────────────────────────────────────────

    def reply(self, link: L, request: Request, reply: Any) -> None:
        """A request that was in flight is answered: settle it, or do what its refusal asks for."""
        outcome = request.outcome
        if outcome.done():
            return
        error = first_error(request, reply)
        if error is not None and self._recover(link, request, error):
            return
        request.frame = b""  # a caller that keeps the request need not keep its bytes
        if error is not None and request.raises:
            outcome.set_exception(exception_for(error))
        else:
            outcome.set_result(reply)

    def _recover(self, link: L, request: Request, error: ReplyError) -> bool:
        """Act on a refusal; False if the request ends with it."""
        if meaning_of(error) is Recovery.REDIAL and link is self.link:
            # Also if this request ends here: the next ones need the right server.
            self.link = None
            self.node = moved_to(error)
            self.must_redial = True
            self._tick_at(-math.inf)
        recovery = recovery_for(request, error)
        if recovery is Recovery.RAISE:
            return False
        if recovery is Recovery.ASK:
            node = moved_to(error)
            assert node is not None
            self.held[request] = math.inf
            self.asks.append((node, request))
            self._tick_at(-math.inf)
        elif recovery is Recovery.LOAD or (recovery is Recovery.REDIAL and request.tries == 1):
            self._send_again(request)
        else:  # busy; or a second server refuses too: give them time to settle
            self.hold(request)
        return True

    def hold(self, request: Request) -> None:
        """Send a refused request again in a moment, unless it ended meanwhile."""
        if request.outcome.done():
            self.held.pop(request, None)
            return
        self.held[request] = math.inf
        self._refused.append(request)
        self._tick_at(-math.inf)

    def ask(self, link: L, request: Request, boot_s: float) -> list[Request]:
        """What to write to the link of a node that has the key for this one command. Nothing if the
        request ended meanwhile, or has to go the usual way again."""
        if self.held.pop(request, None) is None or request.outcome.done():
            return []
        if link.is_retired or request.boot_deadline_s <= boot_s:
            self._send_again(request)  # `take` fails it if it is too late
            return []
        asking = commands(("ASKING",), effect=Effect.READ)
        asking.outcome = SETTLED
        asking.deadline_s = request.deadline_s
        return [asking, request]

    # ── Links ───────────────────────────────────────────────────────────────────────────────────

    def link_up(self, link: L, *, is_for_asks: bool = False) -> None:
        """There is a new link: to the right server, or to a node that is asked for single keys."""
        self.links.add(link)
        if not is_for_asks:
            self.link = link

    def link_lost(self, link: L) -> None:
        """A link is gone. Nobody knows which of its requests were applied."""
        self.links.discard(link)
        if self.link is link:
            self.link = None
        inflight = [*link.inflight]
        link.inflight.clear()
        for request in reversed(inflight):  # they go first again, in their order
            request.replies = []
            request.is_in_doubt = True
            if request.effect is not Effect.ONCE and not request.outcome.done():
                self.unsent.appendleft(request)
                self.unsent_bytes += len(request.frame)
        for request in inflight:
            if request.effect is Effect.ONCE:
                self._fail(request)
        if self.unsent:
            self._wake_up()

    def give_up(self, error: Exception) -> None:
        """No link can be made: fail all that wait for one."""
        waiting = [*self.unsent, *self.held]
        self._forget_waiting()
        for request in waiting:  # their callers may send more
            self._end(request, error)

    # ── Time ────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now_s: float) -> list[L]:
        """Send what was held long enough, fail what is too late. Returns the links that have not
        answered in time, to be dropped."""
        self.next_s = math.inf
        for request in self._refused:
            if request in self.held:
                self.held[request] = now_s + busy_wait_s(request.tries)
        self._refused.clear()
        for request in [one for one, at_s in self.held.items() if at_s <= now_s]:
            del self.held[request]
            self._send_again(request)
        silent = self._look(now_s) if self._look_s <= now_s else []
        self.next_s = min([self._look_s, *self.held.values()])
        return silent

    def _look(self, now_s: float) -> list[L]:
        """Fail what is too late, forget what was cancelled, and find when to look again."""
        self._look_s = math.inf
        silent = []
        late: list[Request] = []
        for link in self.links:
            overdue = [request for request in link.inflight if request.deadline_s <= now_s]
            for request in overdue:
                request.is_in_doubt = True
            if overdue:
                late += overdue
                silent.append(link)
        unsent = [one for one in self.unsent if one.deadline_s <= now_s or one.outcome.done()]
        held = [one for one in self.held if one.deadline_s <= now_s or one.outcome.done()]
        self._drop_unsent(unsent)
        for request in held:
            del self.held[request]
        for request in (*late, *unsent, *held):  # their callers may send more
            self._fail(request)
        waiting = [*self.unsent, *self.held, *(one for link in self.links for one in link.inflight)]
        first_s = min((request.deadline_s for request in waiting), default=math.inf)
        self._look_s = max(first_s, now_s + self._look_every_s)
        return silent

    def _tick_at(self, at_s: float) -> None:
        if at_s < self.next_s:
            self.next_s = at_s
            self._wake_up()

    # ── Ends ────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> list[L]:
        """Fail all that is not settled, and take no more. Returns the links, to be dropped."""
        links = [*self.links]
        pending = [*self.unsent, *self.held]
        for link in links:
            for request in link.inflight:
                request.is_in_doubt = True
            pending += link.inflight
        self.abandon()
        for request in pending:
            self._end(request, ClosedError("the connection was closed"))
        return links

    def abandon(self) -> None:
        """Take no more, and forget everything without a word to its callers: their event loop has
        ended."""
        self.is_closed = True
        self.wake = _do_nothing
        self.link = None
        for link in self.links:
            link.inflight.clear()
        self.links.clear()
        self.asks.clear()
        self.next_s = math.inf
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        self.unsent.clear()
        self.unsent_bytes = 0
        self.held.clear()
        self._refused.clear()

    def _end(self, request: Request, error: Exception) -> None:
        """Fail a request with this error, unless it may have been applied."""
        is_unknown = request.is_in_doubt and request.effect is not Effect.READ
        self._fail(request, None if is_unknown else error)

    def _fail(self, request: Request, error: Exception | None = None) -> None:
        """Settle a request with an error. An outcome of the caller's own may never count as done:
        it is told once, and the request, wherever it still is, is nobody's from now on."""
        outcome = request.outcome
        if not outcome.done():
            request.outcome = SETTLED
            request.frame = b""
            outcome.set_exception(error or error_for_lost(request, self.endpoint))


class _Settled:
    """The outcome of a request that nobody waits for."""

    def done(self) -> bool:
        return True


SETTLED = _Settled()


def _do_nothing() -> None:
    pass
