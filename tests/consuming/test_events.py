"""The events stream, field by field; and that nothing about it can harm a job."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from chasqui import BackoffSpec, Job, UnrecoverableError
from chasqui.events import writer as chasqui_events
from chasqui.metrics import DlqRouted, JobOutcome, OutcomeKind, RetryScheduled
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from tests.consuming.conftest import Redis, Running, at_rest, until

Start = Callable[..., Running]
Read = Callable[[], Awaitable[list[dict[bytes, bytes]]]]


async def fine(job: Job) -> None:
    pass


async def test_every_event_of_a_job_in_order(queue: Queue, start: Start, events: Read) -> None:
    async def handler(job: Job) -> None:
        if job.attempt == 0:
            raise ValueError("no luck")
        if job.data == "bury":
            raise UnrecoverableError("never")

    running = start(handler, read_block_ms=100)
    job = await queue.add("näme", None, backoff=BackoffSpec.fixed(3, jitter_ms=0))
    await running.completed(1)

    async def all_told() -> list[dict[bytes, bytes]] | None:
        found = await events()
        return found if found and found[-1][b"e"] == b"drained" else None

    told = await until(all_told, "the queue is drained")
    names = [event[b"e"] for event in told if event[b"id"]]
    ours = [name for name in names if name != b"waiting"]
    assert ours == [b"active", b"failed", b"retry-scheduled", b"active", b"completed"]
    assert names.count(b"waiting") == 1
    fields = [list(event) for event in told if event[b"e"] in ours]
    head = [b"e", b"id", b"ts", b"n"]
    assert fields == [
        [*head, b"attempt"],
        [*head, b"attempt", b"reason", b"duration_us", b"type"],
        [*head, b"attempt", b"backoff_ms"],
        [*head, b"attempt"],
        [*head, b"attempt", b"duration_us"],
    ]
    values = [event for event in told if event[b"e"] in ours]
    assert [event[b"attempt"] for event in values] == [b"1", b"1", b"2", b"2", b"2"]
    assert {event[b"id"].decode() for event in values} == {job.id}
    assert {event[b"n"].decode() for event in values} == {"näme"}
    assert (values[1][b"type"], values[1][b"reason"]) == (b"ValueError", b"no luck")
    assert values[2][b"backoff_ms"] == b"3"
    assert all(event[b"duration_us"].isdigit() for event in values if b"duration_us" in event)
    assert list(told[-1]) == [b"e", b"id", b"ts"]


async def test_dlq_events_and_unnamed_jobs(queue: Queue, start: Start, events: Read) -> None:
    async def handler(job: Job) -> None:
        raise UnrecoverableError("never")

    running = start(handler)
    job = await queue.add("", None)
    await running.buried(1)

    async def told() -> list[dict[bytes, bytes]] | None:
        found = [event for event in await events() if event[b"e"] == b"dlq"]
        return found or None

    (event,) = await until(told, "the burial is told")
    assert list(event) == [b"e", b"id", b"ts", b"attempt", b"reason"]
    assert event[b"id"].decode() == job.id
    assert (event[b"attempt"], event[b"reason"]) == (b"1", b"unrecoverable")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        pytest.param(UnrecoverableError("never"), [b"active", b"failed", b"dlq"], id="dead"),
        pytest.param(ValueError("no luck"), [b"active", b"failed"], id="retry"),
    ],
)
async def test_a_job_moves_on_behind_what_its_run_told(
    queue: Queue,
    start: Start,
    events: Read,
    redis: Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    told: list[bytes],
) -> None:
    """Whoever sees it in its new place, or is told, finds in the events how it came there."""
    monkeypatch.setattr(chasqui_events, "FLUSH_S", 1000.0)  # nothing is sent for its own sake

    begun, gate = asyncio.Event(), asyncio.Event()

    async def handler(job: Job) -> None:
        if job.name == "holds":
            begun.set()
            await gate.wait()
            return
        raise error

    running = start(handler)
    await queue.add("holds", None)
    await running.fact(begun.wait())  # a worker that has nothing to do sends what it has
    job = await queue.add("fails", None, backoff=BackoffSpec.fixed(600_000))

    async def has_moved() -> bool:
        return bool(await redis("EXISTS", keys.dlq, keys.delayed))

    await until(has_moved, "the job is in its new place")
    found = [event[b"e"] for event in await events() if event[b"id"].decode() == job.id]
    assert found == told
    gate.set()


async def test_drained_is_told_once_per_transition(
    queue: Queue, start: Start, events: Read
) -> None:
    running = start(fine, read_block_ms=20)

    async def drains(count: int) -> Callable[[], Awaitable[bool]]:
        async def reached() -> bool:
            found = [event[b"e"] for event in await events()]
            return found.count(b"drained") >= count

        return reached

    for i in range(3):
        await queue.add_bulk([{"name": "n", "data": None}] * 3)
        await running.completed(3 * (i + 1))
        await until(await drains(i + 1), "the queue is drained")
    reads = len(running.metrics.all(JobOutcome))
    assert reads == 9
    found = [event[b"e"] for event in await events()]
    assert found.count(b"drained") == 3


@pytest.mark.both_loops
async def test_events_and_metrics_tell_the_same(
    queue: Queue, start: Start, events: Read, redis: Redis, keys: Keys
) -> None:
    async def handler(job: Job) -> None:
        if job.data % 3 == 0 and job.attempt == 0:
            raise ValueError("first run")
        if job.data % 10 == 0:
            raise UnrecoverableError("every tenth")

    running = start(handler)
    entries = [
        {"name": f"n{i % 4}", "data": i, "backoff": BackoffSpec.fixed(1, jitter_ms=0)}
        for i in range(120)
    ]
    await queue.add_bulk(entries)
    await running.completed(108)
    await running.buried(12)
    await until(lambda: at_rest(redis, keys), "all is done")
    await running.stop()
    told = await events()
    metrics = running.metrics

    def of(kind: bytes, *fields: bytes) -> list[tuple[str, ...]]:
        found = [event for event in told if event[b"e"] == kind]
        return sorted(tuple(event[field].decode() for field in fields) for event in found)

    outcomes = metrics.all(JobOutcome)
    good = [one for one in outcomes if one.kind is OutcomeKind.OK]
    bad = [one for one in outcomes if one.kind is not OutcomeKind.OK]
    assert of(b"completed", b"n", b"attempt") == sorted((o.name, str(o.attempt)) for o in good)
    assert of(b"failed", b"n", b"attempt") == sorted((o.name, str(o.attempt)) for o in bad)
    assert of(b"retry-scheduled", b"n", b"attempt", b"backoff_ms") == sorted(
        (r.name, str(r.attempt), str(r.backoff_ms)) for r in metrics.all(RetryScheduled)
    )
    assert of(b"dlq", b"n", b"attempt", b"reason") == sorted(
        (d.name, str(d.attempt), d.reason) for d in metrics.all(DlqRouted)
    )
    seen: set[tuple[bytes, bytes]] = set()
    for event in told:
        run = (event[b"id"], event.get(b"attempt", b""))
        if event[b"e"] == b"active":
            seen.add(run)
        elif event[b"e"] in (b"completed", b"failed"):
            assert run in seen, "active comes before the end of its run"


async def test_a_broken_events_key_harms_nothing(
    queue: Queue, start: Start, redis: Redis, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    await redis("SET", keys.events, "not a stream")
    running = start(fine)
    await queue.add_bulk([{"name": "n", "data": i} for i in range(200)])
    await running.completed(200)
    await until(lambda: at_rest(redis, keys), "all is acknowledged")
    assert running.metrics.jobs_failed == 0
    assert any("events" in record.getMessage() for record in caplog.records), "it is logged"


async def test_events_can_be_turned_off(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    running = start(fine, events_enabled=False)
    await queue.add("n", None, delay_ms=1)
    await running.completed(1)
    await running.stop()
    assert await redis("EXISTS", keys.events) == 0


@pytest.mark.parametrize("options", [{}, {"store_results": True}])
async def test_every_event_of_a_job_with_an_id_of_its_own_tells_when_it_was_created(
    queue: Queue, start: Start, redis: Redis, keys: Keys, events: Read, options: dict[str, bool]
) -> None:
    """A ULID tells that by itself."""

    async def handler(job: Job) -> str:
        if job.attempt == 0:
            raise ValueError("no luck")
        if job.name == "dies":
            raise UnrecoverableError("never")
        return "done"

    running = start(handler, **options)
    jobs = [
        await queue.add(name, None, job_id=own, backoff=BackoffSpec.fixed(1, jitter_ms=0))
        for own, name in (("a", "works"), ("b", "dies"), (None, "works"), ("c", ""))
    ]
    await running.completed(3)
    await running.buried(1)

    async def are_told() -> bool:
        names = [event[b"e"] for event in await events()]
        return names.count(b"completed") == 3 and names.count(b"waiting") == 4

    await until(are_told, "all is told")
    told = [event for event in await events() if event[b"id"]]
    kinds = {b"active", b"failed", b"retry-scheduled", b"waiting", b"completed", b"dlq"}
    assert {event[b"e"] for event in told} == kinds
    for job in jobs:
        own = [event for event in told if event[b"id"].decode() == job.id]
        if len(job.id) == 26:
            assert all(b"created" not in event for event in own)
        else:
            assert [list(event)[-1] for event in own] == [b"created"] * len(own)
            assert {int(event[b"created"]) for event in own} == {job.created_at_ms}
