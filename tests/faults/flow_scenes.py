"""Flows before an operation, and what must be there of them in the end, wherever it broke off."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from chasqui import sync
from chasqui.consuming.moves import Move, bury_steps
from chasqui.managing.entries import ranges
from chasqui.model.config import Endpoint
from chasqui.model.keys import DEFAULT_GROUP
from chasqui.model.payload import encode
from chasqui.model.steps import step_of
from chasqui.producing.flows import FlowPlan, Step
from chasqui.scripts import flowing
from chasqui.scripts.flowing import Bounds, StepEnd
from chasqui.scripts.settling import Consumer
from chasqui.transport.blocking import BlockingConnection
from tests.faults.boundaries import Scene
from tests.faults.programs import BULK, FLOW, NAME

BOUNDS = Bounds(600_000, 1 << 20, None)


def flow(
    chains: Sequence[Sequence[str]],
    join: Sequence[str] = (),
    *,
    owed: Collection[int] | None = None,
) -> Callable[[Scene], range]:
    """A flow of jobs with these names. They are numbered as they come, the first of each chain
    before all others. Of what is not there yet these are owed, or all."""

    def prepare(scene: Scene) -> range:
        first = len(chains)
        later = iter(range(first, first + sum(map(len, chains)) - len(chains) + len(join)))
        steps = [
            [
                Step(chain[0], {"n": i}),
                *(Step(name, {"n": next(later)}, "before") for name in chain[1:]),
            ]
            for i, chain in enumerate(chains)
        ]
        ends = [Step(name, {"n": next(later)}, "before") for name in join]
        with sync.Queue(scene.queue_name, redis_url=scene.url) as queue:
            queue.add_flow(FlowPlan(steps, ends), flow_id=FLOW)
        numbers = [step.data["n"] for chain in (*steps, ends) for step in chain]
        for n in sorted(numbers)[first:]:
            scene.ledger.write("try", n, NAME)
            if owed is None or n in owed:
                scene.ledger.write("added", n, NAME)
        return range(first)

    return prepare


def with_a_dead_child(*, is_replayed: bool) -> Callable[[Scene], range]:
    """A flow one of whose two children is dead, and its join with it; or the child was replayed."""

    def prepare(scene: Scene) -> range:
        flow([["quick"], ["quick"]], ["quick"])(scene)
        keys, client = scene.keys, scene.client
        client.xgroup_create(keys.stream, DEFAULT_GROUP, "0")
        client.xreadgroup(DEFAULT_GROUP, "before", {keys.stream: ">"})
        consumer = Consumer(keys, DEFAULT_GROUP, "before")
        connection = BlockingConnection(Endpoint.parse(scene.url), key=keys.stream)
        good, bad = connection.run(_sent(ranges(("XRANGE", keys.stream, "-", "+"))))
        place = step_of(good.job_id)
        assert place is not None
        end = StepEnd(good.id, good.job_id, place, encode(0), False, (1, "quick", 1, 5, 1))
        told: dict[str, Any] = {"events": False, "history": False}
        assert connection.run(_sent(flowing.step(consumer, [end], BOUNDS, **told))) == b"1"
        moves = [Move(bad, 1, attempt=1, reason="unrecoverable")]
        assert connection.run(_sent(bury_steps(consumer, moves, BOUNDS, **told))) == b"4"
        connection.close()
        client.xgroup_destroy(keys.stream, DEFAULT_GROUP)
        if is_replayed:
            with sync.Queue(scene.queue_name, redis_url=scene.url) as queue:
                assert queue.replay_dlq() == 1
        return range(1, 2)

    return prepare


def _sent(request: Any) -> Any:
    return (yield request)


def placed(*, stream: Iterable[int] = (), dlq: Iterable[int] = ()) -> Callable[[Scene], list[str]]:
    """These wait and these are dead, those among them that stand for the end of a flow."""

    def check(scene: Scene) -> list[str]:
        census = scene.census()
        found = sorted(census.stream), sorted(census.dlq), sorted(census.delayed)
        return [] if found == (sorted(stream), sorted(dlq), []) else [f"jobs are here: {found}"]

    return check


def begun(scene: Scene) -> list[str]:
    """All children are in, and none of them counts as ended."""
    said = scene.client.hmget(scene.keys.flow(FLOW), "total", "left", "added", "begun")
    wanted = [b"%d" % BULK] * 3 + [b"1"]
    return [] if said == wanted else [f"the flow says {said}"]


def counted(left: int, failed: int) -> Callable[[Scene], list[str]]:
    """So many chains have not ended, and so many have failed."""

    def check(scene: Scene) -> list[str]:
        said = scene.client.hmget(scene.keys.flow(FLOW), "left", "failed")
        return [] if said == [b"%d" % left, b"%d" % failed] else [f"the flow says {said}"]

    return check


def ended_with(end: str, result: int) -> Callable[[Scene], list[str]]:
    """The flow's last job ran, and its result is stored."""

    def check(scene: Scene) -> list[str]:
        with sync.Queue(scene.queue_name, redis_url=scene.url) as queue:
            found = queue.get_job_result(f"~{FLOW}~{end}")
        return [] if found == result else [f"the result is {found}"]

    return check


def told_of(event: bytes, *ends: str) -> Callable[[Scene], list[str]]:
    """The end of each of these steps was told once."""

    def check(scene: Scene) -> list[str]:
        events = [fields for _, fields in scene.client.xrange(scene.keys.events)]
        ids = sorted(fields[b"id"].decode() for fields in events if fields[b"e"] == event)
        return [] if ids == [f"~{FLOW}~{end}" for end in ends] else [f"told of {ids}"]

    return check
