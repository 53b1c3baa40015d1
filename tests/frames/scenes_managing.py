"""Scenes of people and tools that look after a queue."""

import asyncio
from datetime import timedelta

import chasqui
from chasqui import MissedFiresPolicy, RepeatPattern, UnrecoverableError
from tests.frames.calls import both, call
from tests.frames.scenes_adding import HOUR, T0_MS, moment
from tests.frames.stage import Stage

EVERY = RepeatPattern.every(60_000)
CRON = RepeatPattern.cron("30 4 1 1 *", tz="Europe/Madrid")


async def some_dead(stage: Stage) -> None:
    """Let six jobs die, three of each of two names."""

    async def fail(job: chasqui.Job) -> None:
        raise UnrecoverableError(f"no use in {job.data}")

    async with (
        stage.unseen() as queue,
        chasqui.Worker(
            stage.queue, fail, redis_url=stage.direct_url, concurrency=1, consumer_id="undertaker"
        ) as worker,
    ):
        for i in range(6):
            await queue.add(("mail", "post")[i % 2], i, job_id=f"dead-{i}")
        await _until_run(stage, worker)
    # Their ids are known to the scene.
    dlq = stage.key("dlq")
    dead = stage.redis.xrange(dlq)
    stage.redis.delete(dlq)
    for i, (_, fields) in enumerate(dead, 1):
        stage.redis.xadd(dlq, fields, f"{i}-0")


async def some_results(stage: Stage) -> None:
    async def double(job: chasqui.Job) -> int:
        return job.data * 2

    async with (
        stage.unseen() as queue,
        chasqui.Worker(
            stage.queue, double, redis_url=stage.direct_url, store_results=True, concurrency=1
        ) as worker,
    ):
        for i in range(3):
            await queue.add("mail", i, job_id=f"done-{i}")
        await _until_run(stage, worker)


async def _until_run(stage: Stage, worker: chasqui.Worker) -> None:
    running = asyncio.ensure_future(worker.run())
    await stage.until_settled()
    await worker.close()
    await running


async def some_delayed(stage: Stage) -> None:
    async with stage.unseen() as queue:
        for i in range(4):
            await queue.add("late", i, job_id=f"late-{i}", delay=HOUR)


SCENES = [
    *both(
        "cancel",
        call("cancel_delayed", "late-0"),
        call("cancel_delayed", "late-0"),
        call("cancel_delayed_bulk", ["late-1", "nobody"]),
        call("reschedule", "late-2", delay_ms=60_000),
        call("reschedule", "late-3", delay=HOUR),
        call("reschedule", "late-3", delay_ms=moment(2 * HOUR)),
        call("reschedule", "nobody", delay_ms=60_000),
        call("free_job_id", "late-1"),
        prepare=some_delayed,
    ),
    *both(
        "dead jobs",
        call("peek_dlq"),
        call("peek_dlq", 2),
        call("iter_dlq"),
        call("iter_dlq", name="mail", reason="unrecoverable"),
        call("iter_dlq", since=moment(-timedelta(days=1)), until=moment(timedelta(days=1))),
        call("replay_dlq", dry_run=True),
        call("replay_dlq", 1),
        call("replay_dlq", ids=["3-0", "4-0"]),
        call("replay_dlq", name="post"),
        call("delete_dlq", 1),
        call("delete_dlq", where=lambda job: True),
        prepare=some_dead,
    ),
    *both(
        "repeatables",
        call("upsert_repeatable_job", "digest", {"n": 1}, repeat=EVERY),
        call("upsert_repeatable_job", "digest", {"n": 1}, repeat=CRON, attempts=3, backoff=500),
        call(
            "upsert_repeatable_job",
            "digest",
            None,
            repeat=EVERY,
            limit=4,
            start_after_ms=T0_MS + 7_200_000,
            end_before_ms=T0_MS + 86_400_000,
            missed_fires=MissedFiresPolicy.fire_all(3),
            key="own-key",
        ),
        call("add", "digest", 2, repeat={"kind": "every", "interval_ms": 90_000}),
        call("get_repeatable_jobs"),
        call("get_repeatable_jobs", 2),
        call("remove_repeatable_by_key", "own-key"),
        call("remove_repeatable_by_key", "nobody"),
    ),
    *both(
        "results",
        call("get_job_result", "done-0"),
        call("get_job_result_bulk", ["done-1", "done-2", "nobody"]),
        prepare=some_results,
    ),
    *both(
        "the whole queue",
        call("counts"),
        call("counts", "another-group"),
        call("pause"),
        call("is_paused"),
        call("resume"),
        call("set_events_max_len", 500),
        call("set_events_max_len", None),
        call("get_events_retention"),
        call("forget_events_reader", "nobody"),
        call("set_history_max_len", 500),
        call("get_history_retention"),
        call("forget_history_reader", "nobody"),
        call("obliterate", raises=(chasqui.NotSupportedError,)),
        call("obliterate", force=True),
        call("obliterate"),
        prepare=some_delayed,
    ),
]
