"""Calls as users write them; type checkers must accept every line and infer what is asserted."""

from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timedelta
from typing import Any, assert_type

import chasqui
from chasqui import BackoffSpec, Job, MissedFiresPolicy, Queue, RepeatableMeta, RepeatPattern, sync
from chasqui.producing.job_options import JobEntry


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
        entries: list[JobEntry] = [
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


def blocking() -> None:
    with sync.Queue("mail", on_full="wait", durable="disk") as queue:
        assert_type(queue, sync.Queue)
        assert_type(queue.add("mail", 1, delay=timedelta(1)), Job)
        assert_type(queue.add_bulk([{"name": "a", "data": 1}]), list[Job])
        assert_type(queue.iter_dlq(), Iterator[chasqui.DeadJob])
        assert_type(queue.counts().waiting, int)
        queue.wait_for_result("x", timeout=5)
    sync.Queue("mail", credential_provider=lambda host: (None, "secret"))
