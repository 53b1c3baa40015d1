"""Scenes of workers. Jobs are added unseen: what is recorded is the worker's."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import chasqui
from chasqui import (
    BackoffSpec,
    BatchError,
    Job,
    MissedFiresPolicy,
    RepeatPattern,
    Retry,
    UnrecoverableError,
)
from tests.frames.stage import Scene, Stage

Jobs = list[tuple[str, Any, dict[str, Any]]]
Until = Callable[[], Awaitable[None]]

#: A worker that does nothing by the clock, and one thing at a time.
QUIET = {
    "concurrency": 1,
    "prefetch": 0,
    "consumer_id": "worker-1",
    "delayed_enabled": False,
    "run_scheduler": False,
}
#: With and without an id of their own: events tell more of the former.
PLAIN: Jobs = [("mail", {"n": 1}, {}), ("", None, {}), ("mail", {"n": 3}, {"job_id": "own"})]


async def nothing(job: Job) -> None:
    pass


async def double(job: Job) -> Any:
    return {"twice": job.data}


async def fail(job: Job) -> None:
    raise ValueError(f"job {job.name}")


async def give_up(job: Job) -> None:
    raise UnrecoverableError("no use")


async def run(
    stage: Stage, handler: Any, until: Until, *, settles: bool = True, **options: Any
) -> None:
    """One worker until a scene has seen enough; then its drain."""
    worker = chasqui.Worker(stage.queue, handler, redis_url=stage.url, **{**QUIET, **options})
    running = asyncio.ensure_future(worker.run())
    ending = asyncio.ensure_future(until())
    await asyncio.wait({running, ending}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    await ending
    await stage.until_sent("BLOCK")  # it reads on
    if settles:
        await stage.until(lambda: is_settled(worker))
    await worker.close()
    await running


def is_settled(worker: chasqui.Worker) -> bool:
    """Whether the worker knows that all its jobs are acknowledged or moved."""
    health = worker.health()
    return health is None or health.running + health.acks_waiting + health.moves_waiting == 0


async def one_by_one(stage: Stage, handler: Any, jobs: Jobs, **options: Any) -> None:
    """Each job is added when the worker is done with the one before."""

    async def until() -> None:
        async with stage.unseen() as queue:
            for name, data, own in jobs:
                await queue.add(name, data, **own)
                await stage.until_settled()

    await run(stage, handler, until, **options)


async def together(stage: Stage, jobs: Jobs, *, fails: bool = False, **options: Any) -> None:
    """All jobs are read at once and end in the same turn of the loop."""
    count = len(jobs)
    running, all_run = 0, asyncio.Event()

    async def handler(job: Job) -> int:
        nonlocal running
        running += 1
        if running == count:
            all_run.set()
        await all_run.wait()
        if fails:
            raise UnrecoverableError("all of them")
        return job.data

    async with stage.unseen() as queue:
        await queue.add_bulk([{"name": name, "data": data, **own} for name, data, own in jobs])
    await run(stage, handler, stage.until_settled, concurrency=count, **options)


async def batches(stage: Stage) -> None:
    """A handler takes five at a time; then it fails for one of them."""

    async def handler(jobs: list[Job]) -> None:
        bad = [job for job in jobs if job.data == 7]
        if bad:
            raise BatchError({bad[0].id: UnrecoverableError("seven")})

    async def until() -> None:
        async with stage.unseen() as queue:
            for start in (0, 5):
                await queue.add_bulk(
                    [
                        {"name": "mail", "data": i, "job_id": f"own-{i}"}
                        for i in range(start, start + 5)
                    ]
                )
                await stage.until_settled()

    await run(stage, handler, until, batch=5, batch_linger_ms=10_000)


async def retries(stage: Stage, **options: Any) -> None:
    """A job fails, waits, is promoted and runs again; two ask for their retry themselves."""

    async def handler(job: Job) -> None:
        if job.attempt == 0:
            if job.data == "asks":
                raise Retry(delay_ms=20)
            raise ValueError("not yet")

    fixed = BackoffSpec("fixed", 10, jitter_ms=0)
    exponential = BackoffSpec("exponential", 10, 40, 3.0, jitter_ms=0)
    jobs: Jobs = [
        ("mail", 1, {"job_id": "own-1", "attempts": 3, "backoff": fixed}),
        ("mail", 2, {"job_id": "own-2", "backoff": exponential}),
        ("mail", 3, {"attempts": 2, "backoff": fixed}),
        ("mail", "asks", {"job_id": "own-3"}),
    ]
    await one_by_one(stage, handler, jobs, delayed_enabled=True, **options)


async def deaths(stage: Stage, **options: Any) -> None:
    """Jobs die of every reason that a worker has."""
    handlers = {"fails": fail, "gives up": give_up, "unstorable": lambda job: object()}
    jobs: Jobs = [
        ("fails", 1, {"attempts": 1}),
        ("fails", 2, {"attempts": 1, "job_id": "own"}),
        ("gives up", 3, {}),
        ("nobody's", 4, {}),
        ("fails", "x" * 300, {}),
    ]
    if options.get("store_results"):
        jobs.append(("unstorable", 5, {}))
    await one_by_one(stage, handlers, jobs, max_payload_bytes=200, **options)


async def unreadable(stage: Stage) -> None:
    """What others wrote cannot be read."""
    for fields in ({"d": b"\xc1", "n": "mail"}, {"x": "no envelope"}):
        stage.redis.xadd(stage.key("stream"), fields)
    await run(stage, nothing, stage.until_settled)


async def heartbeat(stage: Stage) -> None:
    """A job runs until its lease was renewed."""

    async def handler(job: Job) -> None:
        await stage.until_sent("renew")

    await one_by_one(stage, handler, PLAIN[:1], claim_min_idle_ms=3000)


async def paused(stage: Stage) -> None:
    """The queue is paused while the worker waits, and goes on."""

    async def until() -> None:
        async with stage.unseen() as queue:
            await stage.until_sent("BLOCK")
            await queue.pause()
            await queue.add("mail", 1, job_id="own")
            await stage.until(lambda: stage.tap_count(b"\r\nEXISTS\r\n") > 3)
            await queue.resume()
            await stage.until_settled()

    await run(stage, nothing, until)


async def cut_short(stage: Stage) -> None:
    """A drain ends before the handler does: its job goes back."""
    begun = asyncio.Event()

    async def handler(job: Job) -> None:
        begun.set()
        await asyncio.sleep(60)

    async with stage.unseen() as queue:
        await queue.add("mail", 1, job_id="own")
    await run(stage, handler, begun.wait, settles=False, shutdown_deadline_s=0.01)


async def taken_over(stage: Stage) -> None:
    """A job that a lost worker left behind is taken over."""
    async with stage.unseen() as queue:
        await queue.add("mail", 1, job_id="own")
    stream = stage.key("stream")
    stage.redis.xgroup_create(stream, "default", "0")
    ((_, [(entry_id, _)]),) = stage.redis.xreadgroup("default", "lost", {stream: ">"})
    stage.redis.xclaim(stream, "default", "lost", 0, [entry_id], idle=60_000)
    await run(stage, nothing, stage.until_settled)


async def everything(stage: Stage) -> None:
    """A worker with its promoter and its scheduler, as most people run it."""

    async with stage.unseen() as queue:
        every, once = RepeatPattern.every(300), MissedFiresPolicy.fire_once()
        await queue.upsert_repeatable_job("tick", 2, repeat=every, limit=1, missed_fires=once)

    async def until() -> None:
        async with stage.unseen() as queue:
            await queue.add("late", 1, job_id="own", delay_ms=30)
            await stage.until_settled()
            await stage.until_sent("fire")
            await stage.until_settled()

    await run(
        stage,
        double,
        until,
        delayed_enabled=True,
        run_scheduler=True,
        store_results=True,
    )


async def wait_for_result(stage: Stage) -> None:
    """Somebody waits for what a job returns."""
    worker = chasqui.Worker(
        stage.queue, double, redis_url=stage.direct_url, store_results=True, run_scheduler=False
    )
    async with chasqui.Queue(stage.queue, redis_url=stage.url) as queue, worker:
        job = await queue.add("mail", 1, job_id="own")
        waiting = asyncio.ensure_future(job.wait_for_result(poll_interval=30))
        await stage.until_sent("XREAD")
        running = asyncio.ensure_future(worker.run())
        await waiting
        await worker.close()
        await running


def many(count: int) -> Jobs:
    return [("mail", i, {"job_id": f"own-{i}"}) for i in range(count)]


def scene(name: str, play: Callable[..., Awaitable[None]], *given: Any, **options: Any) -> Scene:
    async def played(stage: Stage) -> None:
        await play(stage, *given, **options)

    return Scene(name, played, is_loose=True)


silent = partial(scene, events_enabled=False)

SCENES = [
    silent("drain", one_by_one, nothing, PLAIN),
    scene("drain with events", one_by_one, nothing, PLAIN),
    silent("drain with results", one_by_one, double, PLAIN, store_results=True),
    scene("drain with results and events", one_by_one, double, PLAIN, store_results=True),
    scene("drain with history", one_by_one, nothing, PLAIN, history=True),
    scene("drain by threads", one_by_one, lambda job: None, PLAIN, group="own", consumer_id=None),
    silent("together", together, many(10)),
    scene("together with events", together, many(10)),
    scene("together with results", together, many(10), store_results=True, result_ttl_ms=5000),
    scene("together to the dead", together, many(10), fails=True, dlq_max_stream_len=100),
    scene("batches", batches),
    silent("retry", retries),
    scene("retry with events", retries),
    silent("deaths", deaths),
    scene("deaths with events", deaths, store_results=True, history=True),
    scene("unreadable", unreadable),
    scene("heartbeat", heartbeat),
    scene("paused", paused),
    scene("cut short", cut_short),
    scene("taken over", taken_over),
    scene("everything", everything),
    scene("wait for result", wait_for_result),
]
