"""However the steps of a flow end, and however often, it is where a model in plain Python says."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis as redis_py
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chasqui import sync
from chasqui._core.envelope import decode_envelope
from chasqui.consuming.moves import Move, bury_steps
from chasqui.managing.entries import ranges
from chasqui.model.config import Endpoint
from chasqui.model.keys import DEFAULT_GROUP, ENVELOPE, NAME, REASON, Keys
from chasqui.model.keys import FLOW as FLOW_FIELD
from chasqui.model.payload import decode, encode
from chasqui.model.steps import StepId, step_of
from chasqui.producing.flows import FlowPlan, Step
from chasqui.scripts import flowing
from chasqui.scripts.flowing import Bounds, StepEnd
from chasqui.scripts.settling import Consumer
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Request
from tests.consuming.flow_model import FLOW, FlowModel
from tests.servers import RemoteServer, Server

ME = "me"
BOUNDS = Bounds(60_000, 1 << 20, None)
REASONS = ["retries_exhausted", "unrecoverable"]

steps = st.builds(
    lambda name, data, result_as: Step(name, data if result_as else None, result_as),
    st.sampled_from(["", "a", "é"]),
    st.sampled_from([{}, {"k": 1}, {str(i): i for i in range(15)}, None]),
    st.sampled_from([None, "r", "x" * 40]),
)
chains = st.one_of(st.lists(steps, min_size=1, max_size=1), st.lists(steps, min_size=1, max_size=3))
values = st.sampled_from([None, 0, "é" * 20, {"k": [None]}, b"\x00" * 300])


@st.composite
def plans(draw: st.DrawFn) -> FlowPlan:
    many = draw(st.sampled_from([1, 1, 2, 2, 3, 17]))
    join = draw(st.lists(steps, max_size=2))
    need = draw(st.sampled_from(["all", "ended"])) if join else "all"
    return FlowPlan([draw(chains) for _ in range(many)], join, need)  # type: ignore[arg-type]


#: What happens, to which of the jobs that it may happen to, and what comes of it.
moves = st.tuples(
    st.sampled_from(["done", "done", "dead", "dead", "replay", "replay", "copy", "twice", "all"]),
    st.integers(0, 99),
    values,
    st.sampled_from(REASONS),
)


class Table:
    """A flow on a server, each of whose jobs is in our hands."""

    def __init__(self, url: str, client: redis_py.Redis, queue_name: str) -> None:
        self.keys = Keys(queue_name)
        self.client = client
        self._url = url
        self._connection = BlockingConnection(Endpoint.parse(url), key=self.keys.stream)
        self._consumer = Consumer(self.keys, DEFAULT_GROUP, ME)
        client.xgroup_create(self.keys.stream, DEFAULT_GROUP, "0", mkstream=True)
        #: Entries in the order in which the model has its jobs.
        self.entries: list[bytes] = []

    def close(self) -> None:
        self._connection.close()

    def begin(self, plan: FlowPlan) -> None:
        with sync.Queue(self.keys.queue, redis_url=self._url) as queue:
            queue.add_flow(plan, flow_id=FLOW)
        self._take_new()

    def done(self, number: int, value: Any, times: int = 1) -> None:
        entry = self._entry(self.entries.pop(number))
        place = step_of(entry.job_id)
        assert place is not None
        facts = (1, entry.name, 1, 5, entry.created_at_ms)
        end = StepEnd(entry.id, entry.job_id, place, encode(value), False, facts)
        for i in range(times):
            request = flowing.step(self._consumer, [end], BOUNDS, events=True, history=False)
            assert self._run(request) in ((b"1", b"4") if i == 0 else (b"0",))
        self._take_new()

    def dead(self, number: int, reason: str) -> None:
        entry = self._entry(self.entries.pop(number))
        move = Move(entry, 1, attempt=1, reason=reason, error="why")
        request = bury_steps(self._consumer, [move], BOUNDS, events=True, history=False)
        assert self._run(request) in (b"1", b"4")
        self._take_new()

    def replay(self, number: int) -> None:
        """Replay one of the dead that stand for themselves; and those that do not, which stay."""
        entries = self.client.xrange(self.keys.dlq)
        own = [entry_id for entry_id, fields in entries if FLOW_FIELD not in fields]
        others = [entry_id for entry_id, fields in entries if FLOW_FIELD in fields]
        with sync.Queue(self.keys.queue, redis_url=self._url) as queue:
            ids = [one.decode() for one in (own[number], *others)]
            assert queue.replay_dlq(ids=ids) == 1
        self._take_new()

    def copy(self, number: int) -> None:
        """Put a job into the stream once more, as a server that lost its tail may have it."""
        ((_, fields),) = self.client.xrange(self.keys.stream, *[self.entries[number]] * 2)
        self.client.xadd(self.keys.stream, fields)
        self._take_new()

    def look(self) -> dict[str, Any]:
        """What is there, in the words of the model."""
        waiting = dict(self.client.xrange(self.keys.stream))
        dead = [fields for _, fields in self.client.xrange(self.keys.dlq)]
        said = self.client.hgetall(self.keys.flow(FLOW))
        return {
            "waiting": [job_of(waiting.pop(one)) for one in self.entries],
            "more": waiting,
            "dead": [job_of(fields) for fields in dead if FLOW_FIELD not in fields],
            "stand_ins": sorted(
                (job_of(fields)[0], fields[REASON].decode())
                for fields in dead
                if FLOW_FIELD in fields
            ),
            "left": int(said[b"left"]),
            "failed": int(said[b"failed"]),
        }

    def _take_new(self) -> None:
        while found := self.client.xreadgroup(DEFAULT_GROUP, ME, {self.keys.stream: ">"}):
            self.entries += [entry_id for entry_id, _ in found[0][1]]

    def _entry(self, entry_id: bytes) -> Any:
        return self._run(ranges(("XRANGE", self.keys.stream, entry_id, entry_id)))[0]

    def _run(self, request: Request) -> Any:
        def plan() -> Any:
            return (yield request)

        return self._connection.run(plan())


def job_of(fields: dict[bytes, bytes]) -> tuple[StepId, Any]:
    envelope = decode_envelope(fields[ENVELOPE])
    place = step_of(envelope.id)
    assert place is not None
    return place, decode(envelope.payload)


def said_by(model: FlowModel) -> dict[str, Any]:
    return {
        "waiting": model.waiting,
        "more": {},
        "dead": model.dead,
        "stand_ins": sorted(model.stand_ins),
        "left": model.left,
        "failed": model.failed,
    }


@pytest.fixture
def table(server: Server | RemoteServer, queue_name: str) -> Iterator[Callable[[], Table]]:
    made: list[Table] = []
    numbers = itertools.count()
    with redis_py.Redis.from_url(server.url) as client:

        def make() -> Table:
            made.append(Table(server.url, client, f"{queue_name}-{next(numbers)}"))
            return made[-1]

        yield make
    for one in made:
        one.close()


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(plan=plans(), story=st.lists(moves, min_size=5, max_size=60))
def test_a_flow_is_where_its_model_is(
    table: Callable[[], Table], plan: FlowPlan, story: list[tuple[str, int, Any, str]]
) -> None:
    play(table(), plan, story)


CHILDREN = [[Step("a", 1)], [Step("b", 2)], [Step("c", 3)]]


@pytest.mark.parametrize(
    "story",
    [
        # One comes back with nothing: what stood for it must not stay.
        [("dead", 0, 1), ("replay", 0, 1), ("done", 2, None), ("all", 0, 5)],
        # One of two that failed comes back: the other's failure is told already.
        [("dead", 0, 1), ("dead", 0, 1), ("all", 0, 5), ("replay", 0, 1), ("all", 0, 6)],
    ],
)
@pytest.mark.parametrize("need", ["all", "ended"])
def test_a_flow_whose_children_come_back(
    need: Any, story: list[tuple[str, int, Any]], table: Callable[[], Table]
) -> None:
    plan = FlowPlan(CHILDREN, [Step("join")], need)
    play(table(), plan, [(*one, REASONS[0]) for one in story])


def play(there: Table, plan: FlowPlan, story: list[tuple[str, int, Any, str]]) -> None:
    """Let it happen to a flow and to its model, and compare them after each move."""
    model = FlowModel(plan)
    there.begin(plan)
    for what, number, value, reason in story:
        jobs = model.dead if what == "replay" else model.waiting
        if not jobs:
            continue
        at = number % len(jobs)
        if what == "all":
            for _ in range(len(jobs)):
                there.done(0, value)
                model.done(0, value)
        elif what in ("done", "twice"):
            there.done(at, value, times=1 + (what == "twice"))
            model.done(at, value)
        elif what == "dead":
            there.dead(at, reason)
            model.died(at, reason)
        elif what == "replay":
            there.replay(at)
            model.replay(at)
        else:
            there.copy(at)
            model.waiting.append(model.waiting[at])
        found, wanted = there.look(), said_by(model)
        if model.joined is not None:  # what the chains do behind the join's back is not counted
            for one in (found, wanted):
                del one["left"], one["failed"]
        assert found == wanted, (what, at)
        assert there.client.ttl(there.keys.flow(FLOW)) > 0


def test_names_stay_with_their_steps(table: Callable[[], Table]) -> None:
    there = table()
    there.begin(FlowPlan([[Step("one"), Step("two")]], [Step("three")]))
    started_ms = time.time_ns() // 1_000_000
    for name in (b"one", b"two", b"three"):
        ((_, fields),) = there.client.xrange(there.keys.stream)
        assert fields[NAME] == name
        assert abs(decode_envelope(fields[ENVELOPE]).created_at_ms - started_ms) < 60_000
        there.done(0, 1)
