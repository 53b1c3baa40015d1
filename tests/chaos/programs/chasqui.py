"""chasqui's producers, and the workers that `chasqui worker` runs."""

import asyncio
from typing import Any

from chasqui import Job, Queue, UnrecoverableError, Worker, sync
from chasqui.errors import ChasquiError, OutcomeUnknownError
from tests.chaos.programs.common import Told, mark, produce

BACKOFF_MS = 30
DRAIN_S = 15.0


def make() -> Worker:
    """The worker that the environment describes; one of them stores results."""
    told = Told.here()
    ledger, who = told.ledger(), told.who

    async def work(job: Job) -> None:
        n = job.data["n"]
        ledger.write("start", n, who)
        plan = told.plan(n)
        await asyncio.sleep(plan.takes_ms / 1000)
        if job.attempt >= plan.fails:
            ledger.write("end", n, who)
            return
        is_last = plan.ends_dead and job.attempt + 1 == plan.runs
        ledger.write("bury" if is_last else "fail", n, who)
        raise (
            UnrecoverableError("as planned") if plan.name == "bury" else RuntimeError("as planned")
        )

    async def work_with_result(job: Job) -> int:
        await work(job)
        return int(job.data["n"])

    if told.is_default:
        return Worker(told.queue, work, redis_url=told.url, consumer_id=who)
    return Worker(
        told.queue,
        work_with_result if told.place == 0 else work,
        redis_url=told.url,
        consumer_id=who,
        claim_min_idle_ms=told.lease_ms,
        shutdown_deadline_s=DRAIN_S,
        # A worker that is lost is the harness's doing, not the job's.
        max_deliveries=1_000_000,
        store_results=told.place == 0,
        result_ttl_ms=10_000,
    )


async def main() -> None:
    """Each producer has its own way: single adds at once, bulks, and no event loop."""
    told = Told.here()
    limits: list[dict[str, Any]] = [{"request_timeout_s": 2}, {}, {"request_timeout_s": 5}]
    limit = {} if told.is_default else limits[told.place % 3]
    if told.place % 3 == 0:
        async with Queue(told.queue, redis_url=told.url, **limit) as queue:
            await produce(told, lambda numbers: _singles(told, queue, numbers))
    elif told.place % 3 == 1:
        async with Queue(told.queue, redis_url=told.url) as queue:
            await produce(told, lambda numbers: _bulk(told, queue, numbers))
    else:
        with sync.Queue(told.queue, redis_url=told.url, **limit) as blocking:
            await produce(told, lambda numbers: _blocking_bulk(told, blocking, numbers))


async def _singles(told: Told, queue: Queue, numbers: list[int]) -> dict[int, str]:
    async def one(n: int) -> str:
        try:
            await queue.add(**_entry(told, n))
        except ChasquiError as error:
            return _outcome(error)
        return "ok"

    outcomes = await asyncio.gather(*map(one, numbers))
    return dict(zip(numbers, outcomes, strict=True))


async def _bulk(told: Told, queue: Queue, numbers: list[int]) -> dict[int, str]:
    try:
        await queue.add_bulk([_entry(told, n) for n in numbers])
    except ChasquiError as error:
        return dict.fromkeys(numbers, _outcome(error))
    return dict.fromkeys(numbers, "ok")


async def _blocking_bulk(told: Told, queue: sync.Queue, numbers: list[int]) -> dict[int, str]:
    try:
        queue.add_bulk([_entry(told, n) for n in numbers])
    except ChasquiError as error:
        return dict.fromkeys(numbers, _outcome(error))
    return dict.fromkeys(numbers, "ok")


def _entry(told: Told, n: int) -> dict[str, Any]:
    plan = told.plan(n)
    entry: dict[str, Any] = {"name": plan.name, "data": {"n": n, "mark": mark(n)}}
    if plan.delay_ms:
        entry["delay_ms"] = plan.delay_ms
    if plan.attempts:
        entry |= {"attempts": plan.attempts, "backoff": BACKOFF_MS}
    if plan.is_unique:
        entry["job_id"] = f"unique-{n}"
    return entry


def _outcome(error: ChasquiError) -> str:
    return "unknown" if isinstance(error, OutcomeUnknownError) else "refused"


if __name__ == "__main__":
    asyncio.run(main())
