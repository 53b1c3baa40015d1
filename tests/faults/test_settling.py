"""The end of a run is settled by a script: what a full server takes, and whose a job is by then."""

from collections.abc import Callable

import pytest

from chasqui import Job, Queue, UnrecoverableError
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.scripts import settling
from tests.consuming.conftest import Redis, Running, at_rest, until
from tests.faults.careless import careless
from tests.servers import KINDS, Server

Start = Callable[..., Running]


async def drain_without_memory(
    server: Server,
    keys: Keys,
    start_at: Callable[..., Running],
    redis: Redis,
    caplog: pytest.LogCaptureFixture,
) -> bool:
    """A job with a result is done while the server is full; whether it leaves the queue before its
    acknowledgement is refused."""

    async def handler(job: Job) -> int:
        return 1

    async with Queue(keys.queue, redis_url=server.url) as queue:
        await queue.add("n", {"n": 0})
    await redis("XGROUP", "CREATE", keys.stream, DEFAULT_GROUP, "0")
    await redis("CONFIG", "SET", "maxmemory", "1")
    start_at(server.url, handler, store_results=True, events_enabled=False)

    async def is_over() -> bool:
        return "acks are refused" in caplog.text or await at_rest(redis, keys)

    await until(is_over, "one or the other")
    is_drained = await at_rest(redis, keys)
    await redis("CONFIG", "SET", "maxmemory", "0")
    return is_drained


@pytest.mark.fault(21)
@pytest.mark.parametrize("kind", KINDS)
async def test_without_memory_results_keep_no_job_in_the_queue(
    kind: str,
    private_server: Callable[..., Server],
    keys: Keys,
    start_at: Callable[..., Running],
    redis_at: Callable[[str], Redis],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = private_server(kind)
    assert await drain_without_memory(server, keys, start_at, redis_at(server.url), caplog)


@pytest.mark.fault(21, control=True)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_result_that_is_stored_before_the_ack_keeps_it_there(
    kind: str,
    private_server: Callable[..., Server],
    keys: Keys,
    start_at: Callable[..., Running],
    redis_at: Callable[[str], Redis],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores_first = "server.call('SET', KEYS[2], 'the result')"
    complete = careless(settling.COMPLETE, "XACK", instead=stores_first)
    monkeypatch.setattr(settling, "COMPLETE", complete)
    server = private_server(kind)
    assert not await drain_without_memory(server, keys, start_at, redis_at(server.url), caplog)


async def settle_as_a_zombie(
    server: Server, keys: Keys, start: Start, redis: Redis, script: str
) -> bool:
    """A run is over whose job has another owner by then; whether that one still has it."""
    group = (keys.stream, DEFAULT_GROUP)

    async def handler(job: Job) -> int:
        ((entry_id, *_),) = await redis("XPENDING", *group, "-", "+", 1)
        await redis("XCLAIM", *group, "heir", 0, entry_id)
        if script == "RETRY":
            raise ValueError
        if script == "BURY":
            raise UnrecoverableError
        return 1

    running = start(handler, store_results=True, delayed_enabled=False)
    async with Queue(keys.queue, redis_url=server.url) as queue:
        await queue.add("n", {"n": 0}, backoff=60_000)

    async def is_settled() -> bool:
        health = running.worker.health()
        return health is not None and (health.lost == 1 or not await redis("XLEN", keys.stream))

    await until(is_settled, "it is settled or refused")
    return bool(await redis("XPENDING", *group, "-", "+", 1, "heir"))


FENCED = pytest.mark.parametrize("script", ["COMPLETE", "RETRY", "BURY"])


@FENCED
@pytest.mark.fault(5)
async def test_what_has_another_owner_is_left_alone(
    server: Server, keys: Keys, start: Start, redis: Redis, script: str
) -> None:
    assert await settle_as_a_zombie(server, keys, start, redis, script)


@FENCED
@pytest.mark.fault(5, control=True)
async def test_without_a_look_at_the_owner_it_is_taken_away(
    server: Server,
    keys: Keys,
    start: Start,
    redis: Redis,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
) -> None:
    always_ours = """
    local held = ask(...)
    if held[1] then held[1][2] = ARGV[2] end
    return held
    """
    unfenced = careless(getattr(settling, script), "XPENDING", instead=always_ours)
    monkeypatch.setattr(settling, script, unfenced)
    assert not await settle_as_a_zombie(server, keys, start, redis, script)
