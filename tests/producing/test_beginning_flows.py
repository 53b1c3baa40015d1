"""Flows begin once: in chunks, again, half way, and with plans that are refused."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis as redis_py

from chasqui import sync
from chasqui._core.envelope import decode_envelope
from chasqui.errors import PayloadError, QueueFullError
from chasqui.model.config import Endpoint
from chasqui.model.keys import ENVELOPE, Keys
from chasqui.model.payload import decode
from chasqui.model.steps import StepId, check_flow_id, step_of
from chasqui.producing.flows import EncodedFlow, FlowPlan, Step
from chasqui.producing.new_jobs import CHUNK_JOBS
from chasqui.transport.blocking import BlockingConnection
from chasqui.worker import Worker
from tests.servers import Server

CHILDREN = 2 * CHUNK_JOBS + 7


def plan_of(count: int = CHILDREN, size: int = 0) -> FlowPlan:
    return FlowPlan(
        [[Step("n", {"i": i, "x": "x" * size}), Step("then", {}, "r")] for i in range(count)],
        [Step("join")],
    )


def there(redis: redis_py.Redis, keys: Keys) -> Counter[str]:
    entries = redis.xrange(keys.stream)
    return Counter(decode_envelope(fields[ENVELOPE]).id for _, fields in entries)


def wanted(flow_id: str, count: int = CHILDREN) -> Counter[str]:
    return Counter(f"~{flow_id}~{i}.0" for i in range(count))


async def test_each_child_is_added_once(queue: Any, redis: redis_py.Redis, keys: Keys) -> None:
    flow = await queue.add_flow(plan_of())
    assert (flow.total, flow.last.id, flow.last.name) == (CHILDREN, f"~{flow.id}~j.0", "join")
    assert there(redis, keys) == wanted(flow.id)
    data = [decode(decode_envelope(one[ENVELOPE]).payload) for _, one in redis.xrange(keys.stream)]
    assert [one["i"] for one in data] == list(range(CHILDREN))
    said = redis.hgetall(keys.flow(flow.id))
    assert {said[name] for name in (b"total", b"left", b"added")} == {b"%d" % CHILDREN}
    assert {name for name in said if name.startswith(b"n")} == {
        b"need",
        b"nj.0",
        *(b"n%d.1" % i for i in range(CHILDREN)),
    }


async def test_the_same_flow_again_adds_nothing(
    queue: Any, redis: redis_py.Redis, keys: Keys
) -> None:
    for size in (0, 50_000, 10):  # which cuts them into other chunks
        flow = await queue.add_flow(plan_of(size=size), flow_id="mine")
        assert flow.id == "mine"
        assert there(redis, keys) == wanted("mine")


@pytest.mark.parametrize("parts", [1, 2])
async def test_a_flow_that_was_begun_half_way_is_completed(
    parts: int, make_queue: Callable[..., Any], redis: redis_py.Redis, keys: Keys, server: Server
) -> None:
    """Children that end meanwhile do not make the join come early."""
    half = EncodedFlow(plan_of(size=8000), "mine")
    connection = BlockingConnection(Endpoint.parse(server.url), key=keys.stream)
    for part in half.slices()[:parts]:
        request = half.chunk(keys, part, max_len=None, max_backlog=None, trace="")
        assert connection.run(_sent(request)) == part.stop
    late = half.chunk(keys, half.slices()[parts + 1], max_len=None, max_backlog=None, trace="")
    assert connection.run(_sent(late)) == part.stop  # those before it are missing
    connection.close()
    assert there(redis, keys) == wanted("mine", part.stop)
    seen: Counter[str] = Counter()

    async def handler(job: Any) -> int:
        seen[job.id] += 1
        return int(job.data["i"]) if job.name == "n" else 0

    worker = Worker(keys.queue, handler, redis_url=server.url, read_block_ms=100)
    running = asyncio.ensure_future(worker.run())
    while redis.xlen(keys.stream):  # noqa: ASYNC110 - only the server knows
        await asyncio.sleep(0.01)
    assert seen.keys() == {f"~mine~{i}.{s}" for i in range(part.stop) for s in (0, 1)}
    queue = make_queue()
    flow = await queue.add_flow(plan_of(), flow_id="mine")
    result = await queue.wait_for_end(flow.last.id)
    assert result == 0
    await worker.close()
    await running
    assert seen.keys() == {
        flow.last.id,
        *(f"~mine~{i}.{s}" for i in range(CHILDREN) for s in (0, 1)),
    }
    assert set(seen.values()) == {1}


def _sent(request: Any) -> Any:
    return (yield request)


async def test_another_plan_under_the_id_is_refused(
    queue: Any, redis: redis_py.Redis, keys: Keys
) -> None:
    await queue.add_flow(plan_of(3), flow_id="mine")
    with pytest.raises(ValueError, match=r"'mine' was begun with 3 chains, and now has 4"):
        await queue.add_flow(plan_of(4), flow_id="mine")
    assert there(redis, keys) == wanted("mine", 3)


async def test_a_full_queue_takes_no_flow(
    make_queue: Callable[..., Any], redis: redis_py.Redis, keys: Keys
) -> None:
    queue = make_queue(max_backlog=300)
    await queue.add_flow(plan_of(10), flow_id="small")
    with pytest.raises(QueueFullError):
        await queue.add_flow(plan_of(291), flow_id="mine")
    assert not redis.exists(keys.flow("mine"))
    await queue.add_flow(plan_of(290), flow_id="mine")
    assert redis.xlen(keys.stream) == 300
    with pytest.raises(ValueError, match="301 jobs at once never fit"):
        await make_queue(max_backlog=300, on_full="wait").add_flow(plan_of(301))
    waiting = asyncio.ensure_future(
        make_queue(max_backlog=300, on_full="wait").add_flow(plan_of(1), flow_id="late")
    )
    redis.xtrim(keys.stream, maxlen=0, approximate=False)
    assert (await waiting).id == "late"
    assert there(redis, keys) == wanted("late", 1)


@pytest.mark.parametrize("kind", ["valkey-9", "redis-8.6"])
async def test_a_durable_flow_is_on_disk(
    kind: str, queue_at: Callable[..., Any], private_server: Callable[..., Server], keys: Keys
) -> None:
    server = private_server(kind, appendonly="yes", appendfsync="everysec")
    queue = queue_at(server.url, durable="disk")
    flow = await queue.add_flow(plan_of())
    server.kill()
    server.start()
    with redis_py.Redis.from_url(server.url) as client:
        assert there(client, keys) == wanted(flow.id)
        assert client.hget(keys.flow(flow.id), "begun") == b"1"


async def test_a_key_of_another_kind_is_an_error(
    queue: Any, redis: redis_py.Redis, keys: Keys
) -> None:
    redis.set(keys.flow("mine"), "of another kind")
    with pytest.raises(Exception, match="WRONGTYPE"):
        await queue.add_flow(plan_of(3), flow_id="mine")
    assert not redis.exists(keys.stream)


# ── Plans and ids ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: FlowPlan([]), ValueError, "from 1 to 100000 chains, got 0"),
        (lambda: FlowPlan([[]]), ValueError, r"chains\[0\] must have from 1 to 100 steps"),
        (lambda: FlowPlan([[Step("n")] * 101]), ValueError, r"chains\[0\] must have from 1 to 100"),
        (lambda: FlowPlan([[Step("n")]] * 100_001), ValueError, "got 100001"),
        (lambda: FlowPlan([[Step("n")]], [Step("n")] * 101), ValueError, "join must have at most"),
        (lambda: FlowPlan([[Step("n")]], need="ended"), ValueError, "flows with a join"),
        (lambda: FlowPlan([[Step("n")]], need="some"), ValueError, "need must be 'all' or 'ended'"),  # type: ignore[arg-type]
        (lambda: FlowPlan([[Step("n", {1})]]), TypeError, r"chains\[0\]\[0\]: data is a set"),
        (lambda: FlowPlan([[Step("n"), Step("n", 1)]]), ValueError, r"chains\[0\]\[1\]: data must"),
        (lambda: FlowPlan([[Step("n")]], [Step("n", 1, "r")]), TypeError, r"join\[0\]: data must"),
        (
            lambda: FlowPlan([[Step("n")]], [Step("n", {"r": 1}, "r")]),
            ValueError,
            "has 'r' already",
        ),
        (lambda: FlowPlan([[Step("n"), Step("n", {}, 1)]]), TypeError, "result_as must be a str"),  # type: ignore[arg-type]
        (lambda: FlowPlan([[Step("n", attempts=0)]]), ValueError, "attempts must be from 1"),
        (lambda: FlowPlan([[Step("n" * 257)]]), ValueError, "name takes more than 256 bytes"),
        (lambda: FlowPlan([[Step("n", "x" * 2**20)]]), PayloadError, "the limit"),
    ],
)
def test_what_is_no_plan_is_refused_before_anything_is_sent(
    make: Callable[[], FlowPlan], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        EncodedFlow(make())


@pytest.mark.parametrize(
    ("flow_id", "says"),
    [
        ("", "flow_id must be a non-empty"),
        ("~a", "flow_id must not begin with '~'"),
        ("a{", "flow_id must hold no braces"),
        ("a:r", "must not end with ':r'"),
        ("é" * 121, "flow_id takes more than 240 bytes"),
        (5, "flow_id must be a non-empty"),
    ],
)
def test_what_is_no_id_of_a_flow(flow_id: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_flow_id(flow_id)


@pytest.mark.parametrize("flow_id", ["a", "a~b", "order:17", "é", "~x~0.0"[1:]])
def test_where_a_step_stands_is_read_back_from_its_id(flow_id: str) -> None:
    for chain, step in (("0", 0), ("99999", 99), ("j", 3)):
        place = StepId(check_flow_id(flow_id), chain, step)
        assert step_of(str(place)) == place


async def test_ids_of_steps_are_for_flows(queue: Any, redis: redis_py.Redis, keys: Keys) -> None:
    says = "job_id must not begin with '~', which marks the steps of flows"
    with pytest.raises(ValueError, match=says):
        await queue.add("n", 1, job_id="~mine")
    with pytest.raises(ValueError, match=says):
        await queue.add_unique("n", 1, job_id="~mine", delay_ms=5)
    rows = [{"name": "n", "data": 1, "job_id": one} for one in ("a", "b~", "~c")]
    with pytest.raises(ValueError, match=rf"jobs\[2\]: {says}"):
        await queue.add_bulk(rows)
    assert not redis.exists(keys.stream)


def test_a_flow_without_a_single_end_has_no_last_job() -> None:
    assert EncodedFlow(FlowPlan([[Step("n")], [Step("n")]])).flow().last is None
    one = EncodedFlow(FlowPlan([[Step("n"), Step("m")]]), "f").flow()
    assert one.last is not None
    assert (one.last.id, one.last.name) == ("~f~0.1", "m")
    assert isinstance(sync.Queue.add_flow.__doc__, str)
