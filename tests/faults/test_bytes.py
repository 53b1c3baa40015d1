"""Jobs of any bytes, and queues of any name: what is good runs, what is bad harms nothing else."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import pytest
import redis as redis_py

from chasqui import Job, PayloadTooLargeError, sync
from chasqui.consuming import arrivals
from chasqui.consuming.fate import on_arrival
from chasqui.model.keys import ENVELOPE, NAME, Keys
from chasqui.queue import Queue
from tests.consuming.conftest import Redis, Running, at_rest, envelope, until
from tests.core.memory import rss_bytes
from tests.crash.load import Seed
from tests.fuzz.corpus import Corpus
from tests.fuzz.mutate import MSGPACK, mutate
from tests.servers import Server

Start = Callable[..., Running]
AddRaw = Callable[..., Awaitable[bytes]]
Read = Callable[[], Awaitable[list[dict[bytes, bytes]]]]
#: What a worker may hold more after any number of bad jobs.
GROWTH_BYTES = 64 << 20
HUGE = 64 << 20


async def fine(job: Job) -> None:
    pass


# ── Huge ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(40)
@pytest.mark.parametrize(
    "size", [1 << 20, HUGE, pytest.param((512 << 20) + 1, marks=pytest.mark.long)]
)
def test_a_huge_payload_is_refused_before_it_is_sent(
    redis_86: Server, queue_name: str, keys: Keys, size: int
) -> None:
    with (
        redis_py.Redis.from_url(redis_86.url) as client,
        sync.Queue(queue_name, redis_url=redis_86.url) as queue,
    ):
        with pytest.raises(PayloadTooLargeError):
            queue.add("n", bytes(size))
        assert client.exists(keys.stream) == 0


@pytest.mark.fault(40)
async def test_a_huge_job_of_somebody_else_is_buried_unread(
    start: Start, add_raw: AddRaw, dead: Read, queue: Queue, redis: Redis, keys: Keys
) -> None:
    await add_raw(envelope(payload=msgpack.packb(b"x" * HUGE)), b"huge")
    await queue.add("n", None)
    before = rss_bytes()
    running = start(fine)
    await running.completed(1)
    await running.buried(1)
    # The reply, the entry, the move and the socket's buffer each hold it once.
    assert rss_bytes() - before < 6 * HUGE
    (buried,) = await dead()
    assert buried[b"reason"] == b"oversize_payload"
    await redis("DEL", keys.dlq)


@pytest.mark.fault(40, control=True)
async def test_without_the_limit_it_is_read_and_run(start: Start, add_raw: AddRaw) -> None:
    await add_raw(envelope(payload=msgpack.packb(b"x" * (4 << 20))), b"huge")
    running = start(fine, max_payload_bytes=HUGE)
    await running.completed(1)


# ── Broken ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(41)
@pytest.mark.fault(42)
@pytest.mark.parametrize(
    "count", [1_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
async def test_mutated_envelopes_among_good_ones(
    server: Server, start: Start, add_raw: AddRaw, redis: Redis, keys: Keys, count: int
) -> None:
    seed = Seed()
    corpus = Corpus(seed.random)
    pool = [corpus.envelope() for _ in range(500)]
    names = [b"n", b"\xff\xfe", b"", "n\u00e4me".encode(), b"x" * 300]
    seen: set[str] = set()

    async def handler(job: Job) -> None:
        if job.id.startswith("good-"):
            seen.add(job.id)

    running = start(handler, max_attempts=1)
    await add_raw(envelope(0, job_id="first"))
    await running.completed(1)
    before = rss_bytes()
    with redis_py.Redis.from_url(server.url) as client:
        for first in range(0, count, 1_000):
            pipeline = client.pipeline(transaction=False)
            for i in range(first, min(first + 1_000, count)):
                bad = mutate(MSGPACK, pool, seed.random)
                pipeline.xadd(keys.stream, {ENVELOPE: bad, NAME: seed.random.choice(names)})
                pipeline.xadd(keys.stream, {ENVELOPE: envelope(i, job_id=f"good-{i}")})
            pipeline.execute()
            await until(lambda: at_rest(redis, keys), "all is run or buried")
            client.delete(keys.dlq)
    assert len(seen) == count
    assert rss_bytes() - before < GROWTH_BYTES


#: By fault: no msgpack, a nesting bomb, an id that is no UTF-8.
BAD = {41: b"\xc1", 42: b"\x91" * 100_000, 43: b"\x94\xa2\xff\xfe\xc4\x01\xc0\x01\x00"}


def each_bad(**mark: bool) -> pytest.MarkDecorator:
    params = [
        pytest.param(bad, marks=pytest.mark.fault(number, **mark), id=str(number))
        for number, bad in BAD.items()
    ]
    return pytest.mark.parametrize("bad", params)


async def run_beside(
    start: Start, add_raw: AddRaw, caplog: pytest.LogCaptureFixture, bad: bytes
) -> tuple[list[str], int]:
    """A bad job between two good ones: which ran, and how many are buried, once that is all of
    them or the worker cannot read on."""
    await add_raw(envelope(1, job_id="first"), b"n")
    await add_raw(bad, b"n")
    await add_raw(envelope(2, job_id="last"), b"n")
    ran: list[str] = []

    async def handler(job: Job) -> None:
        ran.append(job.id)

    running = start(handler)

    async def is_over() -> bool:
        is_done = len(ran) == 2 and running.metrics.dlq_count() == 1
        return is_done or "cannot be read" in caplog.text

    await until(is_over, "one or the other")
    return ran, running.metrics.dlq_count()


@each_bad()
async def test_one_bad_job_harms_no_other(
    start: Start, add_raw: AddRaw, caplog: pytest.LogCaptureFixture, bad: bytes
) -> None:
    assert await run_beside(start, add_raw, caplog, bad) == (["first", "last"], 1)


@each_bad(control=True)
async def test_one_that_is_raised_instead_of_buried_takes_the_others_along(
    start: Start,
    add_raw: AddRaw,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    bad: bytes,
) -> None:
    def judge(entry: Any, limits: Any, *, is_in_hand: bool) -> Any:
        if entry.fault is not None:
            raise ValueError(entry.detail)
        return on_arrival(entry, limits, is_in_hand=is_in_hand)

    monkeypatch.setattr(arrivals, "on_arrival", judge)
    ran, buried = await run_beside(start, add_raw, caplog, bad)
    assert ("last" in ran, buried) == (False, 0)


# ── Names ───────────────────────────────────────────────────────────────────────────────────────

#: Allowed, and as like each other as they can be.
NAMES = ["a", "a:stream", "a:dlid", "a:dlid:id", "a:delayed", "a.b", "a/b", "a-b", "A", "x" * 200]
REFUSED = ["", "a}b", "{}", "{a", "a b", "a\nb", "a\0b", "*?[", "\u202eabc", "x" * 201, "\u00e4"]


@pytest.mark.fault(47)
def test_queues_whose_names_are_alike_share_nothing(server: Server, queue_name: str) -> None:
    names = [f"{name[: 200 - len(queue_name) - 1]}-{queue_name}" for name in NAMES]
    for name in names:
        with sync.Queue(name, redis_url=server.url) as queue:
            queue.add("n", name, job_id="id")
            queue.add("n", name, job_id="stream", delay_ms=60_000)
    with redis_py.Redis.from_url(server.url) as client:
        for name in names:
            keys = Keys(name)
            assert client.xlen(keys.stream) == client.zcard(keys.delayed) == 1
            with sync.Queue(name, redis_url=server.url) as queue:
                assert queue.cancel_delayed("stream") is True


@pytest.mark.fault(47)
@pytest.mark.parametrize("name", REFUSED, ids=lambda name: ascii(name[:9]))
def test_names_that_could_be_taken_for_others_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="queue name"):
        sync.Queue(name)


@pytest.mark.fault(47, control=True)
def test_without_the_rule_two_queues_share_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chasqui.model.keys.check_queue_name", lambda name: name)
    assert Keys("x").dlid("y}:stream") == Keys("x}:dlid:y").stream
