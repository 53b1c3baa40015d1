"""Failed runs: how often, how long after, and what is kept of those that will not run again."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from chasqui import BackoffSpec, Job, Retry, UnrecoverableError
from chasqui._core.envelope import decode_delayed_member, decode_envelope
from chasqui.consuming.dispatcher import LOGGED_JOBS
from chasqui.metrics import DlqRouted, JobOutcome, OutcomeKind, RetryScheduled
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from chasqui.transport.connection import Connection
from chasqui.transport.request import Outcome, Request
from tests.consuming.conftest import Redis, Running, at_rest, attempt_of, until

Start = Callable[..., Running]
Read = Callable[[], Awaitable[list[dict[bytes, bytes]]]]


@pytest.mark.both_loops
async def test_runs_are_counted_on_the_wire_and_for_people(
    queue: Queue, start: Start, dead: Read, redis: Redis, keys: Keys
) -> None:
    seen: list[int] = []

    async def handler(job: Job) -> None:
        seen.append(job.attempt)
        raise ValueError("no luck")

    running = start(handler)
    job = await queue.add("n", {"a": 1}, attempts=3, backoff=BackoffSpec.fixed(1, jitter_ms=0))
    await running.buried(1)
    assert seen == [0, 1, 2]
    assert running.metrics.all(RetryScheduled) == [
        RetryScheduled(2, 1, "n"),
        RetryScheduled(3, 1, "n"),
    ]
    assert [outcome.attempt for outcome in running.metrics.all(JobOutcome)] == [1, 2, 3]
    assert running.metrics.all(DlqRouted) == [DlqRouted("retries_exhausted", 3, "n")]
    (buried,) = await dead()
    assert attempt_of(buried[b"d"]) == 2, "the attempt of the run that failed"
    assert decode_envelope(buried[b"d"]).id == job.id
    await until(lambda: at_rest(redis, keys), "nothing else is left")


async def test_the_delayed_member_is_the_envelope_with_the_next_attempt(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    async def handler(job: Job) -> None:
        raise ValueError

    running = start(handler, delayed_enabled=False)
    backoff = {"kind": "fixed", "delay_ms": 60_000, "max_delay_ms": 100_000}
    job = await queue.add("näme", [1, 2], attempts=5, backoff=backoff)
    await running.retried(1)
    (member,) = await redis("ZRANGE", keys.delayed, 0, 0)
    due_ms = float(await redis("ZSCORE", keys.delayed, member))
    name, envelope = decode_delayed_member(member)
    found = decode_envelope(envelope)
    assert (name, found.id, found.attempt) == ("näme", job.id, 1)
    assert found.retry is not None
    assert found.retry[0] == 5
    seconds, _ = await redis("TIME")
    assert 50_000 < due_ms - int(seconds) * 1000 < 62_000


@pytest.mark.parametrize("options", [{}, {"job_id": "mine"}, {"job_id": "mine", "delay_ms": 1}])
async def test_a_job_that_waits_for_its_retry_is_cancelled_and_its_id_stays_taken(
    queue: Queue, start: Start, redis: Redis, keys: Keys, options: dict[str, Any]
) -> None:
    async def handler(job: Job) -> None:
        raise ValueError

    running = start(handler)
    job = await queue.add("n", 1, attempts=2, backoff=20_000, **options)
    await running.retried(1)
    (member,) = await redis("ZRANGE", keys.delayed, 0, -1)
    assert await redis("GET", keys.didx(job.id)) == member
    assert 3610 <= await redis("TTL", keys.didx(job.id)) <= 3621
    assert await queue.cancel_delayed(job.id)
    assert not await queue.cancel_delayed(job.id)
    assert not await redis("EXISTS", keys.delayed, keys.didx(job.id))
    if options:
        assert not (await queue.add("n", 1, **options)).is_new
    await until(lambda: at_rest(redis, keys), "nothing is left of it")
    assert len(running.metrics.all(JobOutcome)) == 1


async def test_a_retry_is_rescheduled(queue: Queue, start: Start, redis: Redis, keys: Keys) -> None:
    async def handler(job: Job) -> None:
        if job.attempt == 0:
            raise ValueError

    running = start(handler)
    job = await queue.add("n", 1, job_id="mine", backoff=20_000)
    await running.retried(1)
    assert await queue.reschedule(job.id, delay_ms=7_200_000)
    assert 10_795 <= await redis("TTL", keys.didx(job.id)) <= 10_800
    assert await queue.reschedule(job.id, delay_ms=1)
    await running.completed(1)
    assert not await queue.reschedule(job.id, delay_ms=1)
    assert not await queue.cancel_delayed(job.id)
    assert not await redis("EXISTS", keys.didx(job.id))
    assert not (await queue.add("n", 1, job_id="mine")).is_new


async def test_jobs_that_were_promoted_and_failed_at_once_can_still_be_cancelled(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    """What the promoter does after a promotion must not undo what a worker did since."""

    async def handler(job: Job) -> None:
        raise Retry(delay_ms=1 if job.attempt < 5 else 3_600_000)

    running = start(handler)
    jobs = await queue.add_bulk([{"name": "n", "data": i, "attempts": 9} for i in range(50)])
    await running.retried(6 * len(jobs))
    assert await queue.cancel_delayed_bulk([job.id for job in jobs]) == [True] * len(jobs)
    await until(lambda: at_rest(redis, keys), "nothing is left of them")


async def test_worker_defaults_fill_what_the_job_leaves_open(queue: Queue, start: Start) -> None:
    async def handler(job: Job) -> None:
        raise ValueError

    running = start(handler, delayed_enabled=False, max_attempts=3)
    await queue.add("plain", None)
    await queue.add("open", None, backoff={"kind": "exponential", "delay_ms": 5000})
    await queue.add("fixed", None, backoff={"kind": "fixed", "delay_ms": 70_000, "jitter_ms": 0})
    await running.retried(3)
    waits = {retry.name: retry.backoff_ms for retry in running.metrics.all(RetryScheduled)}
    assert 100 <= waits["plain"] < 200, "100 ms and up to 100 of jitter"
    assert 5000 <= waits["open"] < 5100, "its own delay, the worker's jitter"
    assert waits["fixed"] == 30_000, "the worker's longest delay"


async def test_retry_asks_for_its_own_delay(queue: Queue, start: Start) -> None:
    async def handler(job: Job) -> None:
        if job.attempt == 0:
            raise Retry("not yet", delay_ms=7)
        raise Retry

    running = start(handler)
    await queue.add("n", None, attempts=3, backoff=BackoffSpec.fixed(11, jitter_ms=0))
    await running.buried(1)
    assert [retry.backoff_ms for retry in running.metrics.all(RetryScheduled)] == [7, 11]
    assert running.metrics.dlq_count("retries_exhausted") == 1


async def test_unrecoverable_goes_to_the_dlq_with_all_that_is_known(
    queue: Queue, start: Start, dead: Read
) -> None:
    class Mine(UnrecoverableError):
        pass

    async def handler(job: Job) -> None:
        def deep(n: int) -> None:
            if n:
                deep(n - 1)
            raise Mine("gone for good")

        deep(5)

    before_ms = time.time() * 1000
    running = start(handler, consumer_id="the-consumer")
    await queue.add("näme", {"a": 1})
    routed = await running.next(DlqRouted)
    assert routed == DlqRouted("unrecoverable", 1, "näme")
    (buried,) = await dead()
    assert list(buried) == [
        b"d",
        b"n",
        b"source_id",
        b"reason",
        b"error",
        b"traceback",
        b"attempts",
        b"failed_at",
        b"consumer",
    ]
    assert buried[b"n"].decode() == "näme"
    assert buried[b"reason"] == b"unrecoverable"
    assert buried[b"error"] == b"Mine: gone for good"
    assert b"in deep" in buried[b"traceback"]
    assert buried[b"traceback"].endswith(b"Mine: gone for good\n")
    assert buried[b"attempts"] == b"1"
    assert before_ms - 60_000 < int(buried[b"failed_at"]) < before_ms + 600_000
    assert buried[b"consumer"] == b"the-consumer"


@pytest.mark.parametrize("attempts", [1, 2], ids=["buried", "retried"])
async def test_large_jobs_that_fail_at_once_are_moved_by_their_size(
    queue: Queue, start: Start, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script holds the server up for as long as it moves what it was given."""
    count, size = 20, 200_000
    sent: list[int] = []
    real = Connection.post

    def post(connection: Connection, request: Request, outcome: Outcome) -> None:
        sent.append(len(request.frame))
        real(connection, request, outcome)

    monkeypatch.setattr(Connection, "post", post)
    waiting = asyncio.Barrier(count)

    async def handler(job: Job) -> None:
        await waiting.wait()
        raise ValueError

    running = start(handler, concurrency=count, delayed_enabled=False)
    jobs = [{"name": "n", "data": b"x" * size, "attempts": attempts} for _ in range(count)]
    await queue.add_bulk(jobs)
    await (running.buried if attempts == 1 else running.retried)(count)
    assert sum(sent) > count * size
    assert max(sent) < 2 << 20


async def test_huge_errors_are_cut(queue: Queue, start: Start, dead: Read) -> None:
    async def handler(job: Job) -> None:
        raise ValueError("x" * 10_000_000 + "end")

    running = start(handler)
    await queue.add("n", None, attempts=1)
    await running.buried(1)
    (buried,) = await dead()
    assert len(buried[b"error"]) == 2000
    assert len(buried[b"traceback"]) == 8192
    assert buried[b"traceback"].endswith(b"xend\n"), "its end, where the error is"


async def test_errors_that_cannot_be_told_are_buried_all_the_same(
    queue: Queue, start: Start, dead: Read
) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError("not even that")

    async def handler(job: Job) -> None:
        raise MuteError if job.data == "mute" else ValueError("\ud800 is no text")

    running = start(handler, max_attempts=1)
    await queue.add("n", "mute")
    await queue.add("n", "surrogate")
    await running.buried(2)
    assert {one[b"error"] for one in await dead()} == {
        b"MuteError: MuteError",
        b"ValueError: ? is no text",
    }


async def test_a_dead_job_that_is_replayed_starts_anew(queue: Queue, start: Start) -> None:
    seen: list[int] = []

    async def handler(job: Job) -> None:
        seen.append(job.attempt)
        if len(seen) == 1:
            raise UnrecoverableError

    running = start(handler)
    await queue.add("n", None)
    await running.buried(1)
    assert await queue.replay_dlq() == 1
    await running.completed(1)
    assert seen == [0, 0]


# ── Exceptions that are none ────────────────────────────────────────────────────────────────────


class OddError(BaseException):
    pass


def recurse(job: Job) -> Any:
    return recurse(job)


@pytest.mark.fault(48)
@pytest.mark.both_loops
@pytest.mark.parametrize("is_plain", [False, True], ids=["async", "thread"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OddError("odd"), OutcomeKind.PANIC),
        (asyncio.CancelledError("mine"), OutcomeKind.PANIC),
        (GeneratorExit(), None),
        (StopIteration(), OutcomeKind.ERR),
        (StopAsyncIteration(), OutcomeKind.ERR),
        (RecursionError("deep"), OutcomeKind.ERR),
        (MemoryError(), OutcomeKind.ERR),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_whatever_a_handler_raises_is_a_failed_run(
    valkey_9: Any,
    queue_name: str,
    start_at: Callable[..., Running],
    error: BaseException,
    kind: OutcomeKind | None,
    is_plain: bool,
) -> None:
    def plain(job: Job) -> None:
        if job.data == "fine":
            return
        raise error

    async def handler(job: Job) -> None:
        plain(job)

    running = start_at(valkey_9.url, plain if is_plain else handler, concurrency=1)
    async with Queue(queue_name, redis_url=valkey_9.url) as queue:
        await queue.add("n", None, attempts=2, backoff=BackoffSpec.fixed(1, jitter_ms=0))
        await running.buried(1)
        outcomes = running.metrics.all(JobOutcome)
        assert [outcome.attempt for outcome in outcomes] == [1, 2]
        if kind is not None:  # out of a thread GeneratorExit comes as another error
            assert {outcome.kind for outcome in outcomes} == {kind}
        await queue.add("n", "fine")
        await running.completed(1)


@pytest.mark.fault(48)
@pytest.mark.parametrize("limit_ms", [None, 10_000], ids=["", "with a time limit"])
@pytest.mark.parametrize("error", [SystemExit(7), KeyboardInterrupt()], ids=repr)
async def test_a_handler_that_ends_the_process_fails_its_run_and_run_raises_it(
    server: Any, queue: Queue, queue_name: str, redis: Redis, keys: Keys, error: Any, limit_ms: Any
) -> None:
    from chasqui import Worker

    async def handler(job: Job) -> None:
        raise error

    await queue.add("n", None, backoff=60_000)
    worker = Worker(queue_name, handler, redis_url=server.url, timeout_ms=limit_ms)
    with pytest.raises(type(error)) as caught:
        await worker.run()
    assert caught.value is error
    assert await redis("ZCARD", keys.delayed) == 1, "the job is not lost"
    assert await redis("XLEN", keys.stream) == 0
    assert not worker.is_running


@pytest.mark.parametrize("kind", ["async", "thread", "batch"])
async def test_a_handler_does_not_run_again_because_its_result_cannot_be_stored(
    queue: Queue, start: Start, dead: Read, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What it did, it would do a second time."""
    runs: list[Any] = []

    def plain(job: Job) -> Any:
        runs.append(job.data)
        return {1, 2} if job.data == "a set" else job.data

    async def handler(job: Job) -> Any:
        return plain(job)

    async def batch(jobs: list[Job]) -> list[Any]:
        return [plain(job) for job in jobs]

    chosen = {"async": handler, "thread": plain, "batch": batch}[kind]
    options = {"batch": 2, "batch_linger_ms": 500} if kind == "batch" else {}
    await queue.add("n", "a set")
    good = await queue.add("n", "good")
    running = start(chosen, store_results=True, **options)
    assert await running.next(DlqRouted) == DlqRouted("unrecoverable", 1, "n")
    assert await running.result(queue, good.id) == "good"
    (buried,) = await dead()
    assert buried[b"reason"] == b"unrecoverable"
    assert buried[b"detail"] == b"the handler ran to its end; its result could not be stored"
    assert buried[b"error"].startswith(b"TypeError: result is a set")
    assert buried[b"attempts"] == b"1"
    (told,) = [one.message for one in caplog.records if one.levelname == "ERROR"]
    assert "unrecoverable in run 1 of 25: the handler ran to its end; its result " in told
    assert "could not be stored: TypeError: result is a set" in told
    assert sorted(runs) == ["a set", "good"]
    outcomes = {outcome.kind for outcome in running.metrics.all(JobOutcome)}
    assert outcomes == {OutcomeKind.OK, OutcomeKind.ERR}


async def test_without_results_it_does_not_matter_what_is_returned(
    queue: Queue, start: Start
) -> None:
    async def handler(job: Job) -> Any:
        return {1, 2}

    running = start(handler)
    await queue.add("n", None)
    await running.completed(1)


@pytest.mark.fault(49)
async def test_a_handler_that_never_returns_does_not_hold_the_others_up(
    queue: Queue, start: Start
) -> None:
    async def handler(job: Job) -> None:
        if job.data == "hang":
            await asyncio.Event().wait()

    running = start(handler, concurrency=2, shutdown_deadline_s=0.1)
    await queue.add("n", "hang")
    await queue.add_bulk([{"name": "n", "data": i} for i in range(50)])
    await running.completed(50)
    health = running.worker.health()
    assert health is not None
    assert health.running == 1


async def test_a_flood_of_failures_leaves_the_log_readable(
    queue: Queue, start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chasqui.consuming.throttled_log.EVERY_S", 3600)
    caplog.set_level(logging.INFO, "chasqui")

    async def handler(job: Job) -> None:
        raise ValueError("no luck")

    running = start(handler)
    await queue.add_bulk([{"name": "n", "data": i, "attempts": 2, "backoff": 1} for i in range(50)])
    await running.buried(50)
    assert caplog.text.count("failed, run 1 of 2, and runs again in") == LOGGED_JOBS
    told = [record for record in caplog.records if "went to the dead-letter" in record.message]
    assert len(told) == LOGGED_JOBS
    assert all(record.job_name == "n" and record.attempt == 2 for record in told)
    await running.stop()
    summaries = [record for record in caplog.records if hasattr(record, "left_out")]
    assert [record.left_out for record in summaries] == [50 - LOGGED_JOBS] * 2
    assert all(record.message.endswith("more like this)") for record in summaries)


async def test_a_failure_is_logged_with_its_error_for_whoever_collects_them(
    queue: Queue, start: Start, caplog: pytest.LogCaptureFixture, queue_name: str
) -> None:
    async def handler(job: Job) -> None:
        raise ValueError("no luck")

    running = start(handler)
    job = await queue.add("n", 1, attempts=2, backoff=1)
    await running.buried(1)
    again, dead = [one for one in caplog.records if one.name == "chasqui.consuming.dispatcher"]
    assert (again.levelname, dead.levelname) == ("WARNING", "ERROR")
    start_of_line = f"queue {queue_name}: job {job.id} (n) "
    assert again.message.startswith(f"{start_of_line}failed, run 1 of 2, and runs again in ")
    assert dead.message == (
        f"{start_of_line}went to the dead-letter queue, retries_exhausted in run 2 of 2: "
        "ValueError: no luck"
    )
    for attempt, record in enumerate((again, dead), 1):
        assert record.exc_info is not None
        assert isinstance(record.exc_info[1], ValueError)
        assert record.exc_info[2].tb_frame.f_code.co_name == "handler", "from the handler on"
        about = (record.queue, record.job_id, record.job_name, record.attempt)
        assert about == (queue_name, job.id, "n", attempt)


async def test_a_retry_that_was_asked_for_is_no_failure(
    queue: Queue, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "chasqui")

    async def handler(job: Job) -> None:
        if job.attempt == 0:
            raise Retry("not yet", delay_ms=1)

    running = start(handler)
    await queue.add("n", 1)
    await running.retried(1)
    await running.completed(1)
    (told,) = [one for one in caplog.records if one.name == "chasqui.consuming.dispatcher"]
    assert (told.levelname, told.exc_info) == ("INFO", None)
    assert told.message.endswith(" (n) asked in run 1 of 25 to run again, in 1 ms: Retry: not yet")
