"""chasquimq and chasqui on one queue: each promotes, fires and leads for the other."""

import asyncio
import contextlib
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from chasqui._core.envelope import decode_envelope, encode_envelope
from chasqui.metrics import LockOutcome
from chasqui.metrics.testing import InMemorySink
from chasqui.model.job import RepeatPattern
from chasqui.model.keys import Keys
from chasqui.model.payload import decode
from chasqui.queue import Queue
from chasqui.timed.promoter import PromoterLoop
from chasqui.timed.scheduler import SchedulerLoop
from tests.servers import Server
from tests.timed.facts import WAIT_S, Redis, eventually, running, stream_of

PYTHON = Path(__file__).parents[2] / ".venv-interop" / "bin" / "python"
PEER = Path(__file__).with_name("peer.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no chasquimq here: make interop-venv"),
]


@pytest.fixture(scope="session")
def server(redis_86: Server) -> Server:
    """The only one that chasquimq runs on."""
    return redis_86


@contextlib.asynccontextmanager
async def peer(*arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(PYTHON, PEER, *arguments, stdout=PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def line(process: Process) -> str:
    """The next line that the peer prints."""
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        return (await process.stdout.readline()).decode().strip()


async def test_their_delayed_jobs_are_promoted_by_ours(
    server: Server,
    queue_name: str,
    keys: Keys,
    redis: Redis,
    make_promoter: Callable[..., PromoterLoop],
):
    async with running(make_promoter()), peer("add", server.url, queue_name, "300") as process:
        job_id = await line(process)
        (entry,) = await stream_of(redis, keys.stream, 1)
        await stream_of(redis, keys.events, 1)
    envelope = decode_envelope(entry[b"d"])
    assert (envelope.id, entry[b"n"], decode(envelope.payload)) == (job_id, b"theirs", {"n": 1})
    assert not await redis("EXISTS", keys.didx(job_id))


async def test_our_delayed_jobs_are_promoted_by_theirs(
    server: Server, queue_name: str, keys: Keys, redis: Redis, queue: Queue
):
    async with peer("worker", server.url, queue_name) as process:
        job = await queue.add("ours", {"n": 3}, delay_ms=200)
        assert await line(process) == f"{job.id} ours {{'n': 3}}"

        async def is_forgotten() -> bool:  # by their promoter, when it comes to it
            return not await redis("EXISTS", keys.didx(job.id))

        await eventually(is_forgotten)


@pytest.mark.parametrize("pattern", ["100", "* * * * * *"])
async def test_their_specs_are_fired_by_ours(
    server: Server,
    queue_name: str,
    keys: Keys,
    redis: Redis,
    make_scheduler: Callable[..., SchedulerLoop],
    pattern: str,
):
    async with running(make_scheduler()), peer("upsert", server.url, queue_name, pattern):

        async def is_fired() -> bool:
            has_fired = await redis("XLEN", keys.stream)
            return bool(has_fired and not await redis("EXISTS", keys.repeat))

        await eventually(is_fired)
        found = await stream_of(redis, keys.stream, 1)
    # Its first fires may have been missed before we saw the spec; those are skipped.
    assert 1 <= len(found) <= 3
    for entry in found:
        assert entry[b"n"] == b"theirs"
        assert decode(decode_envelope(entry[b"d"]).payload) == {"n": 2}


async def test_our_specs_are_fired_by_theirs(
    server: Server, queue_name: str, keys: Keys, redis: Redis, queue: Queue
):
    job = await queue.upsert_repeatable_job(
        "ours", {"n": 4}, repeat=RepeatPattern.every(300), limit=3, attempts=2, backoff=10
    )
    async with peer("scheduler", server.url, queue_name):
        found = await stream_of(redis, keys.stream, 3)

        async def is_gone() -> bool:
            return not await redis("EXISTS", keys.repeat)

        await eventually(is_gone)
    assert len(found) == 3
    for entry in found:
        assert entry[b"n"] == b"ours"
        assert decode(decode_envelope(entry[b"d"]).payload) == {"n": 4}
    assert not await redis("EXISTS", keys.repeat_spec(job.id))


async def test_each_leads_in_turn(
    server: Server,
    queue_name: str,
    keys: Keys,
    redis: Redis,
    make_promoter: Callable[..., PromoterLoop],
):
    metrics = InMemorySink()
    loop = make_promoter(metrics=metrics)
    ours = loop.lock.holder.encode()

    async def they_lead() -> bool:
        return (await redis("GET", keys.promoter_lock)) not in (None, ours)

    stop = asyncio.Event()
    async with peer("worker", server.url, queue_name):
        await eventually(they_lead)
        task = asyncio.create_task(loop.run(stop))
        async with asyncio.timeout(WAIT_S):
            assert await metrics.next(LockOutcome) is LockOutcome.HELD
    # Theirs was killed: its lock ends by itself.
    async with asyncio.timeout(WAIT_S):
        assert await metrics.next(LockOutcome) is LockOutcome.ACQUIRED
    async with peer("worker", server.url, queue_name) as process:
        await redis("XADD", keys.stream, "*", "d", encode_envelope("job", b"\xc0", 1))
        assert await line(process) == "job  None"
        assert await redis("GET", keys.promoter_lock) == ours
        stop.set()
        await task
        await eventually(they_lead)
