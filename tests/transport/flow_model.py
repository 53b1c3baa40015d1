"""A server, links and a driver for `RequestFlow`, all in memory: what they do is up to a test."""

import math
from collections import Counter, deque
from itertools import count
from typing import Any

from chasqui._core.reply import ReplyError
from chasqui.errors import ClosedError, OutcomeUnknownError
from chasqui.model.config import Endpoint
from chasqui.transport.flow import RequestFlow
from chasqui.transport.pipeline import Pipeline
from chasqui.transport.recovery import Node
from chasqui.transport.request import Effect, Request, Script, commands, first_error

ENDPOINT = Endpoint.parse("redis://somewhere:7000")
LOOK_EVERY_S = 0.25
SCRIPT = Script("transition", b"return ARGV[1]", b"f" * 40)


class Clock:
    """Two clocks: one stands still while the machine sleeps, the other one does not."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept_s = 0.0

    @property
    def boot_s(self) -> float:
        return self.now_s + self.slept_s


class Server:
    """Applies commands, unless it has a refusal for them."""

    def __init__(self) -> None:
        self.applied: Counter[bytes] = Counter()
        self.refusals: deque[str] = deque()
        self.has_script = False

    def answer(self, command: list[bytes]) -> bytes:
        name, last = command[0], command[-1]
        if name == b"ASKING":
            return b"+OK\r\n"
        if self.refusals:
            return b"-%b\r\n" % self.refusals.popleft().encode()
        if name == b"EVALSHA" and not self.has_script:
            return b"-NOSCRIPT No matching script.\r\n"
        self.has_script = self.has_script or name == b"EVAL"
        self.applied[last] += 1
        return b"$%d\r\n%b\r\n" % (len(last), last)


class Wire(Pipeline):
    """A link: what was written and not handled yet, what was answered and has not arrived yet."""

    def __init__(self, process: "Process", node: Node, *, is_for_asks: bool) -> None:
        super().__init__(ENDPOINT.at(*node))
        self.process = process
        self.is_for_asks = is_for_asks
        self.to_server = b""
        self.from_server = b""
        self.may_ask = False

    def send(self, requests: list[Request]) -> None:
        clock = self.process.clock
        for request in requests:
            if isinstance(request.outcome, Told):
                told = request.outcome
                assert clock.boot_s < request.boot_deadline_s, "sent after its deadline"
                assert clock.now_s < request.deadline_s + LOOK_EVERY_S, "sent long after it"
                assert not (told.may_be_applied and request.effect is Effect.ONCE), "sent twice"
                told.may_be_applied = True
            self.inflight.append(request)
            self.to_server += request.frame

    def serve(self, server: Server, commands_: int) -> None:
        """Let the server handle so many commands of what was written."""
        for _ in range(commands_):
            command, self.to_server = parse(self.to_server)
            if not command:
                return
            assert not self.is_for_asks or self.may_ask or command[0] == b"ASKING", "not asked"
            self.may_ask = command[0] == b"ASKING"
            self.from_server += server.answer(command)

    def deliver(self, size: int) -> None:
        """Let so many bytes of the answers arrive."""
        data, self.from_server = self.from_server[:size], self.from_server[size:]
        if data:
            self.receive(memoryview(data), self.process.on_reply)


class Told:
    """An outcome that checks what it is told."""

    def __init__(self, process: "Process", names: list[bytes], *, is_never_done: bool) -> None:
        self.process = process
        self.names = names
        self.request: Request
        self.is_never_done = is_never_done
        self.is_cancelled = False
        self.is_told = False
        #: It was written to a link, and not refused there.
        self.may_be_applied = False
        #: It was in flight when a link was lost.
        self.was_lost = False

    def done(self) -> bool:
        return not self.is_never_done and (self.is_told or self.is_cancelled)

    @property
    def is_over(self) -> bool:
        return self.is_told or (self.is_cancelled and not self.is_never_done)

    def set_result(self, reply: Any, /) -> None:
        self._tell()
        replies = reply if len(self.names) > 1 else [reply]
        if not any(isinstance(one, ReplyError) for one in replies):
            assert replies == self.names, "another request's reply"

    def set_exception(self, error: Exception, /) -> None:
        self._tell()
        applied = self.process.server.applied
        if isinstance(error, OutcomeUnknownError):
            assert self.request.effect is not Effect.READ
            assert self.may_be_applied, "there is no doubt"
        elif self.request.effect is Effect.ONCE and len(self.names) == 1:
            assert not self.may_be_applied, "it may be applied, and the error does not say so"
            assert not applied[self.names[0]]

    def _tell(self) -> None:
        assert not self.is_told, "told twice"
        self.is_told = True
        self.process.on_told()


class Process:
    """One process's flow and its driver, which does what the flow asks for and nothing else."""

    _numbers = count()

    def __init__(self, clock: Clock, server: Server) -> None:
        self.clock, self.server = clock, server
        self.flow: RequestFlow[Wire] = RequestFlow(ENDPOINT, 5.0, LOOK_EVERY_S)
        self.flow.wake = self._wake
        self.is_woken = False
        self.told: list[Told] = []
        self.asks: list[tuple[Node, Request]] = []
        #: Links that the flow does not use any more, or has not been told to be lost.
        self.open: list[Wire] = []
        #: It writes one request at a time, as the blocking connection does.
        self.is_one_by_one = False
        #: How many requests callers send at once when they are told something.
        self.chatty = 0

    def _wake(self) -> None:
        assert not self.is_woken, "woken twice"
        self.is_woken = True

    # ── What callers do ─────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        effect: Effect,
        *,
        size: int = 1,
        is_script: bool = False,
        timeout_s: float | None = None,
        raises: bool = True,
        at_once: bool = False,
        is_never_done: bool = False,
    ) -> Told:
        names = [b"%d.%d" % (next(self._numbers), part) for part in range(size)]
        calls = [("EVALSHA", SCRIPT.sha, 0, name) if is_script else ("SET", name) for name in names]
        script = SCRIPT if is_script else None
        request = commands(*calls, effect=effect, script=script, timeout_s=timeout_s, raises=raises)
        told = Told(self, names, is_never_done=is_never_done)
        told.request = request
        clock = self.clock
        link = self.flow.submit(request, told, clock.now_s, clock.boot_s, at_once)
        self.told.append(told)
        if link is not None:
            assert link is self.flow.link
            assert not self.flow.unsent
            link.send([request])
        return told

    def on_told(self) -> None:
        """A caller that was told sends more, from inside the flow."""
        if self.chatty and not self.flow.is_closed:
            self.chatty -= 1
            self.submit(Effect.IDEMPOTENT, at_once=True)

    # ── What the driver does ────────────────────────────────────────────────────────────────────

    def on_reply(self, link: Wire, request: Request, reply: Any) -> None:
        told = request.outcome
        if isinstance(told, Told) and first_error(request, reply) is not None:
            told.may_be_applied = told.was_lost or request.count > 1
        self.flow.reply(link, request, reply)

    def work(self) -> None:
        """What the flow wants, if it has said so or its time has come."""
        flow = self.flow
        if not self.is_woken and flow.next_s > self.clock.now_s:
            return
        self.is_woken = flow.is_awake = False
        if flow.next_s <= self.clock.now_s:
            for link in flow.tick(self.clock.now_s):
                self.lose(link)
        if flow.must_redial:
            flow.must_redial = False
            for link in flow.links:
                link.is_retired = True
            self.hang_up_retired()
        self.asks += flow.asks
        flow.asks = []
        self.write()

    def write(self) -> None:
        flow, link = self.flow, self.flow.link
        if link is None or not link.is_writable or link.is_retired or not flow.unsent:
            return
        if not self.is_one_by_one:
            link.send(flow.take(self.clock.boot_s))
        while self.is_one_by_one and (request := flow.take_one(self.clock.boot_s)) is not None:
            link.send([request])

    def dial(self) -> None:
        if self.flow.needs_link and (self.flow.link is None or self.flow.link.is_retired):
            self._open(self.flow.node or ("somewhere", 7000), is_for_asks=False)
            self.write()

    def ask(self, *, is_reached: bool) -> None:
        """Ask the node that a refusal named."""
        if not self.asks:
            return
        node, request = self.asks.pop()
        if is_reached:
            link = self._open(node, is_for_asks=True)
            link.send(self.flow.ask(link, request, self.clock.boot_s))
        else:
            self.flow.hold(request)

    def _open(self, node: Node, *, is_for_asks: bool) -> Wire:
        link = Wire(self, node, is_for_asks=is_for_asks)
        self.open.append(link)
        self.flow.link_up(link, is_for_asks=is_for_asks)
        return link

    def lose(self, link: Wire) -> None:
        link.is_retired = True
        for request in link.inflight:
            if isinstance(request.outcome, Told):
                request.outcome.was_lost = True
        self.flow.link_lost(link)
        self.open.remove(link)
        assert not link.inflight

    def hang_up_retired(self) -> None:
        for link in [*self.open]:
            if link.is_retired and not link.inflight:
                self.lose(link)

    def close(self) -> None:
        links = self.flow.close()
        assert set(links) == set(self.open)
        self.open.clear()
        self.asks.clear()
        self.is_woken = False
        assert all(told.is_over for told in self.told), "somebody waits for a closed connection"

    # ── What must hold ──────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        flow = self.flow
        inflight = [request for link in flow.links for request in link.inflight]
        here = Counter(map(id, [*flow.unsent, *flow.held, *inflight]))
        assert not here or max(here.values()) == 1, "a request is in two places"
        for told in self.told:
            if not told.is_over:
                assert here[id(told.request)], "a request is forgotten"
                assert told.request.deadline_s > self.clock.now_s - 2 * LOOK_EVERY_S, "too late"
        assert flow.unsent_bytes == sum(len(request.frame) for request in flow.unsent)
        asked = {id(request) for _, request in (*self.asks, *flow.asks)}
        for request, at_s in flow.held.items():
            has_no_time = at_s == math.inf and id(request) not in asked
            assert not has_no_time or flow.next_s == -math.inf, "held for ever"
        if flow.next_s == -math.inf:
            assert self.is_woken, "nobody knows of a refusal"
        if flow.unsent and flow.link is not None and flow.link.is_writable:
            assert self.is_woken or flow.link.is_retired, "nobody knows of an unsent request"
        if flow.is_closed:
            assert flow.link is None
            assert not [*flow.unsent, *flow.held, *flow.asks, *flow.links]
            try:
                self.submit(Effect.READ)
            except ClosedError:
                pass
            else:
                raise AssertionError("a closed flow takes requests")
        self.told = [told for told in self.told if not told.is_over]

    def places(self) -> tuple[list[int], ...]:
        """Which requests are where."""
        flow = self.flow
        inflight = [request for link in self.open for request in link.inflight]
        return tuple([id(one) for one in part] for part in (flow.unsent, flow.held, inflight))


def parse(data: bytes) -> tuple[list[bytes], bytes]:
    """The first command of what a client wrote, and the rest."""
    if not data:
        return [], b""
    head, _, rest = data.partition(b"\r\n")
    words = []
    for _ in range(int(head[1:])):
        length, _, rest = rest.partition(b"\r\n")
        words.append(rest[: int(length[1:])])
        rest = rest[int(length[1:]) + 2 :]
    return words, rest
