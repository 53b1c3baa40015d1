"""Flows that workers run: what each step gets, who hears of the end, and what a flow leaves."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from chasqui import Job, UnrecoverableError
from chasqui._core.envelope import decode_envelope
from chasqui.errors import JobFailedError
from chasqui.metrics.otel import OtelTracing
from chasqui.model.keys import FLOW, TRACEPARENT, Keys
from chasqui.model.steps import Failed
from chasqui.producing.flows import FlowPlan, Step
from chasqui.queue import Queue
from chasqui.worker import Consumer
from tests.consuming.conftest import Redis, Running, at_rest, envelope, fields_of, told_done, until
from tests.servers import Server

Start = Callable[..., Running]
Read = Callable[[], Awaitable[list[dict[bytes, bytes]]]]


class Shop:
    """Handlers that note what they got."""

    def __init__(self) -> None:
        self.got: dict[str, list[Any]] = {}
        self.is_open = False

    async def __call__(self, job: Job) -> Any:
        self.got.setdefault(job.id, []).append(job.data)
        if job.name == "shut" and not self.is_open:
            raise UnrecoverableError("shut")
        if job.name == "late" and job.attempt == 0:
            raise ValueError("not yet")
        if job.name == "nothing":
            return None
        if job.name == "large":
            return "x" * 1_000_000
        return job.data

    @property
    def runs(self) -> int:
        return sum(map(len, self.got.values()))


@pytest.fixture
def shop() -> Shop:
    return Shop()


def children(count: int, name: str = "n") -> list[list[Step]]:
    return [[Step(name, i)] for i in range(count)]


# ── To the end ──────────────────────────────────────────────────────────────────────────────────


async def test_a_join_gets_a_thousand_results_in_the_order_of_the_children(
    queue: Queue, start: Start, shop: Shop, redis: Redis, keys: Keys
) -> None:
    running = start(shop)
    flow = await queue.add_flow(FlowPlan(children(1000), [Step("join", {"k": 1}, "all")]))
    assert flow.last is not None
    assert await running.fact(flow.last.result()) == {"k": 1, "all": list(range(1000))}
    await until(lambda: at_rest(redis, keys), "all is acknowledged")
    assert shop.runs == 1001
    assert set((await told_done(redis, keys)).values()) == {1}
    said = await redis("HMGET", keys.flow(flow.id), "total", "left", "failed")
    assert said == [b"1000", b"0", b"0"]


async def test_a_chain_hands_each_result_on(queue: Queue, start: Start, shop: Shop) -> None:
    running = start(shop)
    chain = [Step("n", 7), Step("n", {"k": 1}, "before"), Step("nothing"), Step("n", {}, "last")]
    flow = await queue.add_flow(FlowPlan([chain]))
    assert flow.last is not None
    assert await running.fact(flow.last.result()) == {"last": None}
    steps = [shop.got[f"~{flow.id}~0.{i}"] for i in range(4)]
    assert steps == [[7], [{"k": 1, "before": 7}], [{"k": 1, "before": 7}], [{"last": None}]]


async def test_only_the_last_result_is_stored_unless_the_worker_stores_all(
    queue: Queue, start: Start, shop: Shop, redis: Redis, keys: Keys
) -> None:
    plan = FlowPlan([[Step("n", 1), Step("n")]], [Step("n"), Step("n")])
    running = start(shop)
    one = await queue.add_flow(plan)
    await running.completed(4)
    await until(lambda: at_rest(redis, keys), "all is acknowledged")
    await running.stop()
    running = start(shop, store_results=True)
    two = await queue.add_flow(plan)
    await running.completed(4)
    await until(lambda: at_rest(redis, keys), "all is acknowledged")
    ids = [[f"~{flow.id}~{end}" for end in ("0.0", "0.1", "j.0", "j.1")] for flow in (one, two)]
    assert await queue.get_job_result_bulk(ids[0]) == [None, None, None, [1]]
    assert await queue.get_job_result_bulk(ids[1]) == [1, 1, [1], [1]]


async def test_a_retry_stays_a_member(queue: Queue, start: Start, shop: Shop) -> None:
    running = start(shop)
    chains = [[Step("late", 1, attempts=2, backoff=1), Step("late", {}, "r", 2, 1)], [Step("n", 2)]]
    flow = await queue.add_flow(FlowPlan(chains, [Step("late", None, None, 2, 1)]))
    assert flow.last is not None
    assert await running.fact(flow.last.result()) == [{"r": 1}, 2]
    assert {job_id: len(runs) for job_id, runs in shop.got.items()} == {
        f"~{flow.id}~0.0": 2,
        f"~{flow.id}~0.1": 2,
        f"~{flow.id}~1.0": 1,
        f"~{flow.id}~j.0": 2,
    }


async def test_history_and_events_tell_of_steps_as_of_other_jobs(
    queue: Queue, start: Start, shop: Shop, redis: Redis, keys: Keys, events: Read
) -> None:
    running = start(shop, history=True)
    flow = await queue.add_flow(FlowPlan([[Step("n", 1), Step("")], [Step("shut")]], [Step("n")]))
    await running.completed(2)
    await running.buried(1)
    await until(lambda: at_rest(redis, keys), "all is settled")
    kept = [fields_of(entry) for entry in await redis("XRANGE", keys.history, "-", "+")]
    found = {fields[b"id"].decode(): fields[b"e"] for fields in kept}
    first, second, shut = (f"~{flow.id}~{end}" for end in ("0.0", "0.1", "1.0"))
    assert found == {first: b"completed", second: b"completed", shut: b"dlq"}
    assert {decode_envelope(fields[b"d"]).id for fields in kept} == found.keys()
    told = [fields for fields in await events() if fields[b"e"] in (b"completed", b"dlq")]
    assert all(fields[b"created"].isdigit() for fields in told)
    assert sorted(fields[b"id"].decode() for fields in told) == [
        first,
        second,
        shut,
        f"~{flow.id}~j.0",
    ]


async def test_steps_stay_in_the_trace_of_their_flow(
    server: Any, queue_name: str, start: Start, shop: Shop, redis: Redis, keys: Keys
) -> None:
    class Spans(OtelTracing):
        def __init__(self) -> None:
            pass

        def sending(self, queue: str, job_ids: Any, /) -> Any:
            return contextlib.nullcontext("00-trace-of-the-flow-01")

    async with Queue(queue_name, redis_url=server.url, tracing=Spans()) as queue:
        await queue.add_flow(FlowPlan([[Step("n", 1), Step("shut")]], [Step("n")]))
    running = start(shop)
    await running.buried(1)
    (_, fields), _ = await until(lambda: two(redis, keys), "both dead letters are there")
    assert (
        dict(zip(fields[::2], fields[1::2], strict=True))[TRACEPARENT] == b"00-trace-of-the-flow-01"
    )


async def two(redis: Redis, keys: Keys) -> Any:
    found = await redis("XRANGE", keys.dlq, "-", "+")
    return found if len(found) == 2 else None


async def test_a_consumer_of_bytes_takes_part(
    server: Any, queue: Queue, queue_name: str, redis: Redis, keys: Keys, dead: Read
) -> None:
    consumer = Consumer(server.url, queue_name)
    answers = {b"\x01": b"\xa1x", b"\x02": b"\xa9torn"}

    async def handler(job: Any) -> Any:
        return answers.get(job.payload, job.payload)

    running = asyncio.ensure_future(consumer.run(handler))
    plan = FlowPlan([[Step("n", 1)], [Step("n", 3)]], [Step("n", {}, "all")])
    flow = await queue.add_flow(plan)
    assert flow.last is not None
    assert await flow.last.result() == {"all": ["x", 3]}
    flow = await queue.add_flow(FlowPlan([[Step("n", 2)]], [Step("n")]))
    assert flow.last is not None
    with pytest.raises(JobFailedError, match="children_failed"):
        await flow.last.result()
    consumer.shutdown()
    await running


# ── Failures ────────────────────────────────────────────────────────────────────────────────────


async def test_a_dead_child_makes_the_join_dead_until_its_replay_succeeds(
    queue: Queue, start: Start, shop: Shop, redis: Redis, keys: Keys, dead: Read
) -> None:
    running = start(shop)
    chains = [[Step("n", 1)], [Step("shut", 2), Step("n", {}, "r")], [Step("shut", 3)]]
    flow = await queue.add_flow(FlowPlan(chains, [Step("n"), Step("n", {}, "end")]))
    assert flow.last is not None
    with pytest.raises(JobFailedError, match=r"children_failed.*2 of 3 children failed"):
        await running.fact(flow.last.result())
    letters = await dead()
    assert [FLOW in fields for fields in letters] == [False, False, True]
    assert letters[2][FLOW] == flow.id.encode()
    assert decode_envelope(letters[2][b"d"]).id == flow.last.id
    assert await queue.replay_dlq(dry_run=True) == 2
    shop.is_open = True
    assert await queue.replay_dlq() == 2
    await until(lambda: at_rest(redis, keys), "all has run")
    assert await running.fact(flow.last.result()) == {"end": [1, {"r": 2}, 3]}
    assert await dead() == []
    assert len(shop.got[f"~{flow.id}~j.0"]) == 1


async def test_a_replay_that_fails_again_changes_nothing(
    queue: Queue, start: Start, shop: Shop, redis: Redis, keys: Keys, dead: Read
) -> None:
    running = start(shop)
    flow = await queue.add_flow(FlowPlan([[Step("shut", 1)], [Step("n", 2)]], [Step("n")]))
    await running.buried(1)
    assert await queue.replay_dlq() == 1
    await running.buried(2)
    assert flow.last is not None
    with pytest.raises(JobFailedError):
        await running.fact(flow.last.result())
    assert [FLOW in fields for fields in await dead()] == [True, False]
    assert await redis("HMGET", keys.flow(flow.id), "left", "failed") == [b"0", b"1"]


async def test_whoever_waits_for_the_end_of_a_chain_hears_that_it_broke(
    queue: Queue, start: Start, shop: Shop, dead: Read
) -> None:
    running = start(shop)
    flow = await queue.add_flow(FlowPlan([[Step("n", 1), Step("shut"), Step("n"), Step("n")]]))
    assert flow.last is not None
    with pytest.raises(JobFailedError, match=rf"step_failed.*~{flow.id}~0\.1 failed") as caught:
        await running.fact(flow.last.result())
    assert caught.value.job_id == f"~{flow.id}~0.3"
    waiting = asyncio.ensure_future(queue.wait_for_result(flow.last.id))
    shop.is_open = True
    assert await queue.replay_dlq() == 1
    await running.completed(4)
    assert await running.fact(flow.last.result()) == 1
    assert await dead() == []
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_join_that_needs_only_ends_gets_failures_in_their_places(
    queue: Queue, start: Start, shop: Shop, redis: Redis, keys: Keys
) -> None:
    running = start(shop)
    chains = [[Step("n", 1)], [Step("shut", 2), Step("n")], [Step("n", 3)]]
    flow = await queue.add_flow(FlowPlan(chains, [Step("n", {}, "all")], "ended"))
    assert flow.last is not None
    one, failed, three = (await running.fact(flow.last.result()))["all"]
    assert (one, three) == (1, 3)
    assert Failed.of(failed) == Failed(
        f"~{flow.id}~1.0", "unrecoverable", "UnrecoverableError: shut"
    )
    assert Failed.of({"~failed": 1, "more": 2}) is Failed.of(3) is None
    assert Failed.of({"~failed": 1}) is Failed.of({"~failed": {"id": 1, "reason": "x"}}) is None
    shop.is_open = True
    assert await queue.replay_dlq() == 1
    await running.completed(5)
    await until(lambda: at_rest(redis, keys), "the chain went on")
    assert len(shop.got[flow.last.id]) == 1


async def test_a_dead_join_is_a_dead_job_like_others(
    queue: Queue, start: Start, shop: Shop, dead: Read
) -> None:
    running = start(shop)
    flow = await queue.add_flow(FlowPlan(children(2), [Step("shut", {"k": 1}, "all")]))
    assert flow.last is not None
    with pytest.raises(JobFailedError, match="unrecoverable"):
        await running.fact(flow.last.result())
    assert [FLOW in fields for fields in await dead()] == [False]
    shop.is_open = True
    assert await queue.replay_dlq() == 1
    await running.completed(3)
    assert await running.fact(flow.last.result()) == {"k": 1, "all": [0, 1]}


@pytest.mark.parametrize(
    ("chains", "join"),
    [
        ([[Step("large", 1), Step("n", {"k": "y" * 100_000}, "r"), Step("n")]], []),
        ([[Step("large", 1)], [Step("large", 1)]], [Step("n"), Step("n")]),
        ([[Step("large", 1), Step("n", {"k": "y" * 100_000}, "r")]], [Step("n")]),
    ],
    ids=["step", "join", "child"],
)
async def test_a_step_that_its_arguments_make_too_large_is_dead_and_told(
    chains: Any, join: Any, queue: Queue, start: Start, shop: Shop
) -> None:
    running = start(shop)
    flow = await queue.add_flow(FlowPlan(chains, join))
    assert flow.last is not None
    with pytest.raises(JobFailedError, match=r"oversize_payload|step_failed|children_failed"):
        await running.fact(flow.last.result())
    reasons = {job.reason async for job in queue.iter_dlq()}
    assert "oversize_payload" in reasons
    assert shop.runs == len(chains)


# ── Again, late, or not there ───────────────────────────────────────────────────────────────────


async def test_a_copy_of_a_step_that_has_ended_counts_nothing(
    queue: Queue, start: Start, shop: Shop, redis: Redis, keys: Keys
) -> None:
    running = start(shop)
    flow = await queue.add_flow(
        FlowPlan([[Step("n", 1), Step("n")], [Step("late", 2, None, 2, 1)]], [Step("n")])
    )
    await running.completed(4)
    for end in ("0.0", "0.1", "1.0", "j.0"):
        await redis(
            "XADD", keys.stream, "*", "d", envelope(9, job_id=f"~{flow.id}~{end}"), "n", "n"
        )
    await running.completed(8)
    await until(lambda: at_rest(redis, keys), "all is acknowledged")
    assert shop.runs == 9
    assert flow.last is not None
    assert await queue.get_job_result(flow.last.id) == [1, 2]


async def test_a_step_whose_flow_is_gone_is_a_job_like_others(
    queue: Queue,
    start: Start,
    shop: Shop,
    redis: Redis,
    keys: Keys,
    dead: Read,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = await queue.add_flow(FlowPlan([[Step("n", 1)], [Step("shut", 2)]], [Step("n")]))
    two = await queue.add_flow(FlowPlan([[Step("n", 3)]], [Step("n")]))
    await redis("DEL", keys.flow(one.id))
    await redis("DEL", keys.flow(two.id))
    await redis("SET", keys.flow(two.id), "of another kind")
    with caplog.at_level(logging.WARNING):
        running = start(shop, store_results=True)
        await running.completed(2)
        await running.buried(1)
        await until(lambda: at_rest(redis, keys), "all is settled")
    assert shop.runs == 3
    assert len(await dead()) == 1
    assert await queue.get_job_result(f"~{one.id}~0.0") == 1
    assert f"the flow of job ~{one.id}~" in caplog.text
    assert "is gone" in caplog.text


async def test_ids_that_only_look_like_steps_are_none(
    queue: Queue,
    start: Start,
    shop: Shop,
    redis: Redis,
    keys: Keys,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """chasquimq takes any id."""
    running = start(shop)
    ids = ["~", "~~", "~a", "~a~", "~a~1", "~a~01.0", "~a~1.", "~~1.0", "é", "~a~k.0"]
    for job_id in ids:
        await redis("XADD", keys.stream, "*", "d", envelope(9, job_id=job_id), "n", "n")
    await running.completed(len(ids))
    await until(lambda: at_rest(redis, keys), "all is acknowledged")
    assert sorted(shop.got) == sorted(ids)
    assert "is gone" not in caplog.text


async def test_a_flow_is_kept_for_a_week_and_its_results_as_long_as_others(
    queue: Queue, start: Start, shop: Shop, redis: Redis, keys: Keys
) -> None:
    week_s = 7 * 86_400
    flow = await queue.add_flow(FlowPlan(children(2), [Step("n")]), flow_id="kept")
    assert week_s - 60 < await redis("TTL", keys.flow("kept")) <= week_s
    await redis("EXPIRE", keys.flow("kept"), 100)
    running = start(shop, result_ttl_ms=50_000)
    assert flow.last is not None
    assert await running.fact(flow.last.result()) == [0, 1]
    assert week_s - 60 < await redis("TTL", keys.flow("kept")) <= week_s
    assert 0 < await redis("TTL", keys.flow_results("kept")) <= 50
    await running.stop()
    await queue.obliterate()
    assert await redis("EXISTS", keys.flow("kept"), keys.flow_results("kept")) == 0


async def test_an_unwritable_flow_keeps_its_step_pending(
    queue: Queue, start: Start, shop: Shop, redis: Redis, keys: Keys
) -> None:
    """A result that cannot be kept for the join must not be lost with the acknowledgement."""
    flow = await queue.add_flow(FlowPlan(children(1), [Step("n")]))
    await redis("SET", keys.flow_results(flow.id), "of another kind")
    running = start(shop)
    await running.ended(1)
    assert await redis("XLEN", keys.stream) == 1
    await redis("DEL", keys.flow_results(flow.id))
    assert flow.last is not None
    assert await running.fact(flow.last.result()) == [0]
    assert shop.runs == 2


@pytest.mark.parametrize("kind", ["valkey-9", "redis-6.2", "redis-8.6"])
async def test_a_flow_goes_on_when_memory_is_short(
    kind: str,
    private_server: Callable[..., Server],
    start_at: Callable[..., Running],
    redis_at: Callable[[str], Redis],
    queue_name: str,
    keys: Keys,
) -> None:
    """A step frees its own entry: what follows it must not be lost with that, nor wait for more
    memory than there will be."""
    server = private_server(kind)
    redis, gate, begun = redis_at(server.url), asyncio.Event(), asyncio.Event()

    async def handler(job: Job) -> Any:
        begun.set()
        await gate.wait()
        return job.data

    async with Queue(queue_name, redis_url=server.url) as queue:
        flow = await queue.add_flow(FlowPlan([[Step("n", 1), Step("n")]] * 2, [Step("n")]))
        running = start_at(server.url, handler)
        await running.fact(begun.wait())
        await redis("CONFIG", "SET", "maxmemory", "1")
        gate.set()
        await running.completed(5)
        assert flow.last is not None
        await until(lambda: at_rest(redis, keys), "all is acknowledged")
        assert await queue.get_job_result(flow.last.id) == [1, 1]
