"""A program written for chasquimq. `python program.py <package> <url> <queue>` prints what it saw,
with ids and times left out; it must print the same for either package."""

import asyncio
import importlib
import json
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

# import chasqui as chasquimq
sys.modules["chasquimq"] = importlib.import_module(sys.argv[1])

from chasquimq import (  # noqa: E402
    BackoffSpec,
    Job,
    MissedFiresPolicy,
    NotSupportedError,
    Producer,
    Queue,
    RepeatableMeta,
    RepeatPattern,
    UnrecoverableError,
    version,
)

transcript: list[Any] = []


def note(*seen: Any) -> None:
    transcript.append(
        [one if isinstance(one, bool | int | str | None) else repr(one) for one in seen]
    )


def kinds(error: BaseException) -> str:
    """What an `except` clause can tell of an error."""
    families = (TypeError, ValueError, RuntimeError, TimeoutError)
    return ", ".join(family.__name__ for family in families if isinstance(error, family))


async def refused(label: str, call: Callable[[], Awaitable[Any]]) -> None:
    try:
        note(label, "taken", repr(await call()))
    except Exception as error:
        told = kinds(error)
        note(label, "ValueError" if "ValueError" in told else told)


def values() -> None:
    for spec in (
        BackoffSpec.fixed(5),
        BackoffSpec.fixed(5, jitter_ms=2),
        BackoffSpec.exponential(10, multiplier=3.0, max_ms=99),
        BackoffSpec("fixed", 7),
        RepeatPattern.cron("* * * * *", tz="UTC"),
        RepeatPattern.every(1000),
        MissedFiresPolicy.skip(),
        MissedFiresPolicy.fire_once(),
        MissedFiresPolicy.fire_all(3),
    ):
        note(
            repr(spec),
            repr(spec.to_dict()),
            spec == type(spec)(**vars_of(spec)),
            hash(spec) == hash(spec),
        )
    note(RepeatPattern.every(5) == RepeatPattern.every(6))
    for bad in (0, True, "3", None):
        try:
            MissedFiresPolicy.fire_all(bad)
        except Exception as error:
            note("fire_all", kinds(error))
    job = Job("id", "name", {"a": 1}, 2, 5)
    note(job.id, job.name, repr(job.data), job.attempt, job.attempts_made, job.created_at_ms)
    note(job == Job("id", "name", {"a": 1}, 2, 5), job == Job("x", "name", {"a": 1}, 2, 5))
    job.data = 7
    note(job.data)
    note(issubclass(UnrecoverableError, RuntimeError), issubclass(NotSupportedError, RuntimeError))
    note(repr(RepeatableMeta("k", "n", RepeatPattern.every(5), 9)))
    note(isinstance(version(), str))


def vars_of(spec: Any) -> dict[str, Any]:
    names = spec.__dataclass_fields__
    return {name: getattr(spec, name) for name in names}


async def adding(queue: Any) -> None:
    job = await queue.add("mail", {"to": "ada"})
    note(
        type(job).__name__,
        len(job.id),
        job.name,
        repr(job.data),
        job.attempt,
        job.created_at_ms > 0,
    )
    note((await queue.add("mail", 1, job_id="mine")).id)
    note((await queue.add_unique("mail", 1, job_id="unique", attempts=3, backoff=50)).id)
    note((await queue.add("", None, backoff={"kind": "fixed", "delay_ms": 5})).name)
    jobs = await queue.add_bulk(
        [
            {"name": "a", "data": 1},
            {"name": "b", "data": [2], "delay_ms": 60_000, "job_id": "late"},
            {"name": "c", "data": {"x": b"y"}, "attempts": 2},
        ]
    )
    note(*((one.name, one.data) for one in jobs))
    note(jobs[1].id, await queue.add_bulk([]))
    for delay in (
        {"delay_ms": 60_000},
        {"delay_ms": 1500.7},
        {"delay_ms": datetime.now(UTC) + timedelta(minutes=1)},
        {"delay": timedelta(hours=1)},
        {"delay_ms": datetime(2001, 1, 1)},
        {"delay_ms": 0},
    ):
        job = await queue.add("later", 1, job_id=f"id-{len(transcript)}", **delay)
        note(job.id, await queue.cancel_delayed(job.id), await queue.cancel_delayed(job.id))
    note(await queue.cancel_delayed("late"), await queue.cancel_delayed("nobody"))


async def refusing(queue: Any) -> None:
    for options in (
        {"delay_ms": -1},
        {"delay_ms": float("nan")},
        {"delay_ms": True},
        {"delay_ms": "soon"},
        {"delay": 5},
        {"delay": timedelta(-1)},
        {"delay": timedelta(1), "delay_ms": 5},
        {"backoff": True},
        {"backoff": "x"},
        {"backoff": {"kind": "odd", "delay_ms": 1}},
        {"job_id": ""},
        {"job_id": "  "},
        {"job_id": 5},
        {"missed_fires": MissedFiresPolicy.skip()},
        {"repeat": 5},
        {"repeat": {"kind": "odd"}},
    ):
        await refused(repr(options), partial(queue.add, "n", 1, **options))
    await refused("set", lambda: queue.add("n", {1}))
    await refused("datetime", lambda: queue.add("n", datetime(2001, 1, 1)))
    await refused("surrogate", lambda: queue.add("n", "\ud800"))
    await refused("unique", lambda: queue.add_unique("n", 1, job_id=""))
    job = Job("id", "n", 1, 0, 5)
    await refused("no queue", lambda: job.wait_for_result())
    ours = await queue.add("n", 1)
    await refused("timeout", lambda: ours.wait_for_result(timeout=0))
    await refused("poll", lambda: ours.wait_for_result(poll_interval=-1))
    await refused("never", lambda: ours.wait_for_result(timeout=0.1, poll_interval=0.02))


async def repeating(queue: Any) -> None:
    job = await queue.upsert_repeatable_job(
        "tick", {"a": 1}, repeat=RepeatPattern.every(60_000), limit=3, attempts=2, job_id="other"
    )
    note(job.id, job.name, repr(job.data), job.attempt)
    job = await queue.add("nightly", 1, repeat={"kind": "cron", "expression": "0 2 * * *"})
    note(job.id)
    await queue.upsert_repeatable_job(
        "nightly",
        1,
        repeat=RepeatPattern.cron("0 2 * * *"),
        missed_fires=MissedFiresPolicy.fire_once(),
    )
    for meta in await queue.get_repeatable_jobs():
        note(meta.key, meta.job_name, repr(meta.pattern), meta.limit, repr(meta.missed_fires))
        note(meta.next_fire_ms > 0, await queue.remove_repeatable_by_key(meta.key))
    note(await queue.remove_repeatable_by_key("tick::every:60000"))
    note(repr(await queue.get_repeatable_jobs(limit=5)))


async def asking(queue: Any) -> None:
    note(
        repr(await queue.get_job_result("nobody")),
        repr(await queue.get_job_result_bulk(["a", "b"])),
    )
    note(repr(await queue.peek_dlq()), await queue.replay_dlq(limit=5))
    note(queue.name == sys.argv[3], queue.is_closed)


async def engine(url: str, name: str) -> None:
    producer = Producer(url, name, pool_size=2)
    for call in (
        producer.add(b"\x01"),
        producer.add_with_options(b"\x01", {"name": "n", "retry": {"max_attempts": 2}}),
        producer.add_in(60_000, b"\x01"),
        producer.add_at(5, b"\x01"),
    ):
        note(len(await call))
    note(await producer.add_in_with_options(60_000, b"\x01", {"id": "mine too"}))
    note(len(await producer.add_bulk([b"\x01", b"\x02"])), await producer.add_bulk([]))
    note(len(await producer.add_bulk_named([("a", b"\x01"), ("b", b"\x02")])))
    note(len(await producer.add_in_bulk(60_000, [b"\x01"] * 3)))
    note(repr(await producer.cancel_delayed_bulk(["mine too", "nobody"])))
    spec = {"job_name": "t", "pattern": {"kind": "every", "interval_ms": 9000}, "payload": b"\x01"}
    note(await producer.upsert_repeatable(spec))
    listed = await producer.list_repeatable(10)
    note(repr([{**one, "next_fire_ms": 0} for one in listed]))
    note(await producer.remove_repeatable_by_key("t::every:9000"))
    note(repr(await producer.get_result("x")), repr(await producer.get_result_bulk(["x"])))
    note(producer.stream_key(), producer.delayed_key(), producer.dlq_key())
    await refused("str payload", lambda: producer.add("text"))
    await refused("negative", lambda: producer.add_in(-1, b"x"))
    await refused(
        "no pattern", lambda: producer.upsert_repeatable({"job_name": "t", "payload": b""})
    )
    await producer.shutdown()


async def main(url: str, name: str) -> None:
    values()
    queue = Queue(name, redis_url=url, max_delay_secs=0)
    async with queue:
        await adding(queue)
        await refusing(queue)
        await repeating(queue)
        await asking(queue)
    note(queue.is_closed)
    await queue.close()
    await engine(url, name)
    try:
        await Queue(name, redis_url="redis://127.0.0.1:1").add("n", 1)
    except RuntimeError:
        note("unreachable")


asyncio.run(main(sys.argv[2], sys.argv[3]))
for line in transcript:
    print(json.dumps(line).replace(sys.argv[3], "QUEUE"))
sys.stdout.flush()
if sys.argv[1] == "chasquimq":
    import os

    os._exit(0)  # its engine's threads do not always end well
