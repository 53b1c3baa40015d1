"""Scenes of promoters and schedulers that run alone."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import chasqui
from chasqui import MissedFiresPolicy, RepeatPattern
from tests.frames.stage import Scene, Stage


async def _run(duty: Any, until: Callable[[], Awaitable[None]]) -> None:
    """Let a promoter or a scheduler work until a scene has seen enough."""
    running = asyncio.ensure_future(duty.run())
    await until()
    duty.shutdown()
    await running


async def promote(stage: Stage) -> None:
    """Jobs are due before it begins; then one rings."""
    stream = stage.key("stream")

    async def until() -> None:
        await stage.until(lambda: stage.redis.xlen(stream) == 3)
        await stage.until_sent("BLPOP", "waiting")
        async with stage.unseen() as queue:
            await queue.add("late", 4, job_id="own-4", delay_ms=1)
        await stage.until(lambda: stage.redis.xlen(stage.key("events")) == 4)

    async with stage.unseen() as queue:
        for i in range(3):
            await queue.add("late", i, job_id=f"own-{i}", delay_ms=1)
    await asyncio.sleep(0.02)
    await _run(chasqui.Promoter(stage.url, stage.queue, holder_id="promoter-1"), until)


async def promoter_leads(stage: Stage) -> None:
    """The lease is renewed; another one waits for it, and gets it."""
    first = chasqui.Promoter(stage.url, stage.queue, lock_ttl_secs=1, holder_id="first")
    second = chasqui.Promoter(
        stage.url, stage.queue, lock_ttl_secs=1, promote_batch=5, max_stream_len=900
    )

    async def both_seen() -> None:
        await stage.until_sent("GETEX", "ZCOUNT")
        running = asyncio.ensure_future(second.run())
        lock = stage.key("promoter:lock")
        await stage.until(lambda: stage.tap_count(b":lock:freed") > 0)
        first.shutdown()
        await stage.until(lambda: stage.redis.get(lock) not in (None, b"first"))
        await stage.until(lambda: stage.tap_count(b"\r\n900\r\n") > 0)
        second.shutdown()
        await running

    await _run(first, both_seen)


async def fire(stage: Stage) -> None:
    """A spec fires, late and for the last time."""
    async with stage.unseen() as queue:
        await queue.upsert_repeatable_job(
            "tick",
            {"n": 1},
            repeat=RepeatPattern.every(20),
            limit=1,
            attempts=3,
            missed_fires=MissedFiresPolicy.fire_once(),
        )
    await asyncio.sleep(0.05)
    stream = stage.key("stream")

    async def until() -> None:
        await stage.until(lambda: stage.redis.xlen(stream) == 1)

    scheduler = chasqui.Scheduler(
        stage.url, stage.queue, holder_id="scheduler-1", max_stream_len=900
    )
    await _run(scheduler, until)


async def watch_events(stage: Stage) -> None:
    """Events are read from the beginning, then those that come."""
    events = chasqui.QueueEvents(stage.queue, redis_url=stage.url, last_event_id="0")
    stage.redis.xadd(stage.key("events"), {"e": "active", "id": "own-1", "ts": "1", "attempt": "1"})
    async with events:
        await anext(events)
        await stage.until_sent("XREAD")
        stage.redis.xadd(stage.key("events"), {"e": "completed", "id": "own-1", "ts": "1"})
        await anext(events)


SCENES = [
    Scene("promote", promote, is_loose=True),
    Scene("promoter leads", promoter_leads, is_loose=True),
    Scene("fire", fire, is_loose=True),
    Scene("watch events", watch_events, is_loose=True),
]
