"""Calls that are wrong; type checkers must find fault with every line marked so."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date

from chasqui import App, Call, Job, Queue, Worker, WorkerConfig, WorkerOptions, sync


async def asynchronous(queue: Queue) -> None:
    Queue()  # wrong
    Queue("mail", on_full="drop")  # wrong
    Queue("mail", durable="tape")  # wrong
    Queue("mail", "redis://localhost")  # wrong
    await queue.add("mail")  # wrong
    await queue.add("mail", 1, 5)  # wrong
    await queue.add("mail", 1, delay_ms="5")  # wrong
    await queue.add("mail", 1, delay=5)  # wrong
    await queue.add("mail", 1, dealy_ms=5)  # wrong
    await queue.add("mail", 1, attempts="3")  # wrong
    await queue.add("mail", 1, backoff="fast")  # wrong
    await queue.add_unique("mail", 1)  # wrong
    await queue.add_bulk([("mail", 1)])  # wrong
    await queue.replay_dlq(where="failed")  # wrong
    await queue.cancel_delayed(5)  # wrong
    _ = (await queue.counts()).total  # wrong


async def typed(number: Job[int]) -> None:
    text: str = await number.result()  # wrong
    other: Job[str] = number  # wrong
    number.result().upper()  # wrong
    print(text, other)


def typed_blocking(number: sync.Job[int]) -> None:
    text: str = number.result()  # wrong
    other: sync.Job[str] = number  # wrong
    print(text, other)


def blocking(queue: sync.Queue) -> None:
    queue.add("mail", 1, job_id=5)  # wrong
    queue.add_bulk(5)  # wrong
    queue.reschedule("x", delay_ms=[5])  # wrong


async def handle(job: Job) -> None:
    pass


def working(config: WorkerConfig) -> None:
    Worker("mail")  # wrong
    Worker("mail", "handle")  # wrong
    Worker("mail", handle, config)  # wrong
    Worker("mail", handle, config={"concurrency": 5})  # wrong
    Worker("mail", handle, concurrency="5")  # wrong
    Worker("mail", handle, concurency=5)  # wrong
    Worker("mail", handle, timeout_ms={"welcome": "5"})  # wrong
    Worker("mail", handle, max_attempts={"mail": "5"})  # wrong
    Worker("mail", handle, backoff="5")  # wrong
    Worker("mail", handle, around=handle)  # wrong
    Worker("mail", handle, around=[handle])  # wrong
    WorkerConfig(5)  # wrong
    WorkerConfig(concurency=5)  # wrong
    WorkerConfig(concurrency="5")  # wrong
    WorkerConfig(read_block_ms=None)  # wrong
    config.concurrency = 5  # wrong


@asynccontextmanager
async def lifespan() -> AsyncIterator[str]:
    yield "context"


async def no_context_manager() -> str:
    return "context"


app = App("shop", lifespan=lifespan)


@app.task
async def size(url: str, *, limit: int = 5) -> int:
    return limit


@app.task(attempts=5)
def report(sizes: list[int], day: date) -> str:
    return ""


async def tasks() -> None:
    await size.enqueue()  # wrong
    await size.enqueue(5)  # wrong
    await size.enqueue("http://", 5)  # wrong
    await size.enqueue("http://", limt=5)  # wrong
    await size.enqueue("http://", limit="5")  # wrong
    size.bind(5)  # wrong
    report.bind(["a"], date.today())  # wrong
    report([1])  # wrong
    await report([1], date.today())  # wrong
    size.with_options(delay="5").bind("http://")  # wrong
    size.with_options(at=5).bind("http://")  # wrong
    size.with_options(atempts=5).bind("http://")  # wrong
    size.with_options(attempts=5).bind(5)  # wrong
    text: str = await (await size.enqueue("http://")).result()  # wrong
    call: Call[str] = size.bind("http://")  # wrong
    await app.enqueue_many([size])  # wrong
    await app.enqueue_many(size.bind("http://"))  # wrong
    number: int = app.context  # wrong
    app.override(5)  # wrong
    print(text, call, number)


def tasks_blocking() -> None:
    size.enqueue_sync(5)  # wrong
    text: str = size.enqueue_sync("http://").result()  # wrong
    number: int = report.enqueue_sync([1], date.today()).result()  # wrong
    print(text, number)


def apps() -> None:
    App(5)  # wrong
    App("shop", lifespan=no_context_manager)  # wrong
    App("shop", include="shop.tasks", around=5)  # wrong
    App("shop", workers={"urgent": WorkerConfig()})  # wrong
    App("shop", workers={"urgent": WorkerOptions(wieght=5)})  # wrong
    app.task(attempts="5")  # wrong
    app.task(attempt=5)  # wrong
    app.task(5)  # wrong
    app.task(timeout="5 s")  # wrong
