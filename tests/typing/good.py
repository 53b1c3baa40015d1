"""Calls as users write them; type checkers must accept every line and infer what is asserted."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, assert_type

import chasqui
from chasqui import (
    App,
    BackoffSpec,
    Call,
    Job,
    MissedFiresPolicy,
    Queue,
    RepeatableMeta,
    RepeatPattern,
    Worker,
    WorkerConfig,
    WorkerGroup,
    WorkerOptions,
    sync,
)
from chasqui.producing.job_options import JobDict


async def provider(host: str | None) -> tuple[str | None, str | None]:
    return None, "secret"


async def asynchronous() -> None:
    async with Queue(
        "mail", redis_url="redis://localhost", credential_provider=provider, max_backlog=5
    ) as queue:
        assert_type(queue, Queue)
        assert_type(await queue.add("mail", {"to": "ada"}), Job)
        await queue.add("mail", None, delay_ms=5, attempts=3, backoff=100, job_id="x")
        await queue.add("mail", [1], delay=timedelta(1), backoff=BackoffSpec.fixed(5))
        await queue.add("mail", "x", delay_ms=datetime.now(), backoff={"kind": "fixed"})
        await queue.add("mail", 1, repeat=RepeatPattern.every(5))
        await queue.add("mail", 1, repeat={"kind": "every"}, missed_fires=MissedFiresPolicy.skip())
        await queue.add_unique("mail", 1, job_id="x", unique_for=5.5)
        entries: list[JobDict] = [
            {"name": "a", "data": 1},
            {"name": "b", "data": 2, "delay_ms": 5},
        ]
        assert_type(await queue.add_bulk(entries), list[Job])
        plain: list[dict[str, Any]] = [{"name": "a", "data": 1}]
        await queue.add_bulk(plain)
        assert_type(await queue.cancel_delayed("x"), bool)
        assert_type(await queue.cancel_delayed_bulk(("x", "y")), list[bool])
        assert_type(await queue.reschedule("x", delay_ms=5), bool)
        assert_type(await queue.peek_dlq(), list[dict[str, Any]])
        assert_type(queue.iter_dlq(name="mail"), AsyncIterator[chasqui.DeadJob])
        await queue.replay_dlq(5, where=lambda job: job.attempt > 3, dry_run=True)
        assert_type(await queue.delete_dlq(ids=["1-1"], since=datetime.now()), int)
        assert_type(await queue.get_repeatable_jobs(), list[RepeatableMeta])
        assert_type(await queue.counts(), chasqui.Counts)
        job = await queue.add("mail", 1)
        await job.wait_for_result(timeout=5)
        assert_type(job.is_new, bool)
        assert_type(await job.result(), Any)


async def typed(number: Job[int], nothing: Job[None]) -> None:
    assert_type(await number.result(), int)
    assert_type(await number.wait_for_result(), int)
    await nothing.result()
    several: list[Job[int]] = [number]
    whatever: Job[object] = number
    bare: Job = number
    await handle(several[0])
    assert_type(await bare.result(), Any)
    await whatever.result()


def typed_blocking(number: sync.Job[int], text: sync.Job[str]) -> None:
    assert_type(number.result(), int)
    assert_type(text.wait_for_result(timeout=5), str)
    bare: sync.Job = number
    assert_type(bare.result(), Any)


def blocking() -> None:
    with sync.Queue("mail", on_full="wait", durable="disk") as queue:
        assert_type(queue, sync.Queue)
        assert_type(queue.add("mail", 1, delay=timedelta(1)), sync.Job)
        assert_type(queue.add_bulk([{"name": "a", "data": 1}]), list[sync.Job])
        assert_type(queue.iter_dlq(), Iterator[chasqui.DeadJob])
        assert_type(queue.counts().waiting, int)
        queue.wait_for_result("x", timeout=5)
    sync.Queue("mail", credential_provider=lambda host: (None, "secret"))


async def handle(job: Job) -> str:
    return job.name


def resize(job: Job) -> None:
    pass


async def hook(job: Job, run: Callable[[], Awaitable[Any]]) -> Any:
    assert_type(chasqui.current_job(), Job)
    return await run()


async def handle_batch(jobs: list[Job]) -> None:
    pass


def working() -> None:
    config = WorkerConfig(concurrency=5, processes={"resize": 2}, redis_url="redis://localhost")
    assert_type(config.concurrency, int)
    assert_type(config.consumer_id, str | None)
    Worker("mail", handle)
    Worker("mail", resize, threads=4, timeout_ms=5_000, around=[hook])
    hooks: list[chasqui.Around] = [hook]
    WorkerConfig(around=hooks)
    Worker("mail", resize, max_attempts=3, backoff=BackoffSpec.fixed(5))
    Worker("mail", resize, max_attempts={"mail": 3}, backoff={"mail": BackoffSpec.fixed(5)})
    Worker("mail", resize, backoff={"kind": "fixed", "delay_ms": 5})
    WorkerConfig(backoff={"mail": 5, "letter": {"kind": "fixed", "delay_ms": 5}})
    Worker(queue_name="mail", handler={"welcome": handle, "resize": resize}, config=config)
    Worker("mail", handle_batch, config=WorkerConfig(batch=50, batch_linger_ms=5))
    worker = Worker("mail", handle, config=config, consumer_id="me", credential_provider=provider)
    assert_type(worker.consumer_id, str)
    assert_type(worker.health(), chasqui.Health | None)


@asynccontextmanager
async def lifespan() -> AsyncIterator[dict[str, int]]:
    yield {}


app = App(
    "shop",
    lifespan=lifespan,
    around=[hook],
    workers={"urgent": WorkerOptions(concurrency=5, weight=3)},
    slots=10,
)
plain = App()


@app.task
async def size(url: str, *, limit: int = 5) -> int:
    return app.context["a"] + limit


@app.task(attempts=5, timeout=timedelta(seconds=10), backoff=BackoffSpec.fixed(5), aliases=["old"])
async def price(n: int) -> Decimal:
    return Decimal(n)


@app.task(unique_for=60, unique_by="day", processes=2)
def report(sizes: list[int], day: date) -> str:
    return f"{day}: {sum(sizes)} bytes"


@plain.task(every=timedelta(minutes=5), queue="late")
def tick() -> None: ...


async def tasks() -> None:
    assert_type(app, App[dict[str, int]])
    assert_type(plain, App[None])
    assert_type(app.context, dict[str, int])
    job = await size.enqueue("http://", limit=3)
    assert_type(job, Job[int])
    assert_type(await job.result(), int)
    assert_type(await (await price.enqueue(n=5)).result(), Decimal)
    assert_type(await (await report.enqueue([1], date.today())).result(), str)
    assert_type(await size("http://"), int)
    assert_type(report([1], day=date.today()), str)
    assert_type(size.bind("http://"), Call[int])
    assert_type(await size.bind("http://").enqueue(), Job[int])
    assert_type(await app.enqueue_many([size.bind("a"), size.bind("b")]), list[Job[int]])
    late = size.with_options(delay=5, job_id="x", attempts=3, backoff=5, queue="late")
    assert_type(await late.enqueue("http://"), Job[int])
    assert_type(await late("http://"), int)
    await size.with_options(at=datetime.now(UTC)).enqueue("http://")
    await size.with_options(delay=timedelta(1), unique_for=5.5, job_id="x").enqueue("http://")
    await tick.enqueue()
    with app.override({"a": 1}), plain.override(None):
        pass
    async with app:
        assert_type(app.queue(), Queue)
    assert_type(app.worker_group(["urgent"], burst=True, concurrency=5), WorkerGroup)


def tasks_blocking() -> None:
    assert_type(size.enqueue_sync("http://"), sync.Job[int])
    assert_type(size.enqueue_sync("http://").result(), int)
    assert_type(report.bind([1], date.today()).enqueue_sync(), sync.Job[str])
    assert_type(app.enqueue_many_sync(map(price.bind, [1, 2])), list[sync.Job[Decimal]])
    assert_type(app.sync_queue("late"), sync.Queue)
