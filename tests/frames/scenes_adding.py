"""Scenes of producers: how jobs are added."""

import asyncio
import time
from datetime import UTC, datetime, timedelta

import chasqui
import chasqui.sync
from chasqui import BackoffSpec, NotSupportedError, QueueFullError
from tests.frames.calls import both, call
from tests.frames.stage import Scene, Stage

#: The client's clock stands still: see play.py.
T0_MS = time.time_ns() // 1_000_000
HOUR = timedelta(hours=1)
#: One value of each type that a payload may have, and of each size that msgpack writes its own way.
PAYLOADS = [
    None,
    True,
    0,
    -1,
    127,
    -33,
    65_536,
    2**63,
    0.5,
    "",
    "ada@example.com",
    'ñandú <&> \\ "',
    "x" * 40,
    b"\x00\xff",
    [],
    [1, [2, {"three": None}]],
    {},
    {"to": "ada", "n": 7, "tags": ["a", "b"], b"raw": b"\r\n"},
]
BACKOFFS = [
    0,
    2000,
    {"kind": "fixed", "delay_ms": 5},
    BackoffSpec("exponential", 100, 60_000, 2.5, 50),
]


def moment(ahead: timedelta) -> datetime:
    """A time counted from the client's clock."""
    return datetime.fromtimestamp(T0_MS // 1000, UTC) + timedelta(milliseconds=T0_MS % 1000) + ahead


def jobs(count: int, name: str = "mail") -> list[dict[str, object]]:
    return [{"name": name, "data": {"n": i}} for i in range(count)]


def mixed(prefix: str) -> list[dict[str, object]]:
    """Jobs with every option, alone and together, beside jobs with none."""
    return [
        {"name": "plain", "data": 1},
        {"name": "plain", "data": 2, "attempts": 3},
        {"name": "retried", "data": 3, "attempts": 7, "backoff": BACKOFFS[3]},
        {"name": "late", "data": 4, "delay_ms": 3_600_000},
        {"name": "late", "data": 5, "delay": HOUR},
        {"name": "late", "data": 6, "delay_ms": moment(HOUR)},
        {"name": "once", "data": 7, "job_id": f"{prefix}-7"},
        {"name": "once", "data": 8, "job_id": f"{prefix}-8", "delay": HOUR, "backoff": 50},
        {"name": "", "data": 9, "delay_ms": 0},
    ]


ADDS = [call("add", "mail", data) for data in PAYLOADS]
OPTIONS = [
    *(call("add", "retried", 1, backoff=backoff) for backoff in BACKOFFS),
    call("add", "retried", 2, attempts=5),
    call("add", "retried", 3, attempts=2**32 - 1, backoff=10),
    call("add", "late", 4, delay_ms=3_600_000),
    call("add", "late", 5, delay=HOUR, attempts=2),
    call("add", "late", 6, delay_ms=moment(HOUR)),
    call("add", "late", 7, delay_ms=moment(-HOUR)),
    call("add", "once", 8, job_id="own"),
    call("add", "once", 8, job_id="own"),
    call("add", "once", 9, job_id="own-2", unique_for=60),
    call("add", "once", 10, job_id="own-3", delay=HOUR, unique_for=86_400),
    call("add_unique", "once", 11, job_id="own-4"),
    call("add_unique", "once", 12, job_id="own-5", delay_ms=60_000, backoff=BACKOFFS[3]),
]
BULKS = [
    call("add_bulk", []),
    call("add_bulk", jobs(1)),
    call("add_bulk", [*jobs(2, "mail"), *jobs(2, "post"), *jobs(1, "")]),
    call("add_bulk", [{"name": "mail", "data": data} for data in PAYLOADS]),
    call("add_bulk", [{"name": "mail", "data": i, "attempts": i} for i in range(1, 4)]),
]
MIXED = [
    call("add_bulk", mixed("first")),
    call("add_bulk", mixed("first")[6:]),
    call("add_bulk", mixed("second"), unique_for=90),
    call("add_bulk", [{"name": "late", "data": i, "delay_ms": 60_000} for i in range(300)]),
]
BOUNDED = [
    call("add", "mail", 1),
    call("add_bulk", jobs(2)),
    call("add_bulk", jobs(3), raises=(QueueFullError,)),
    call("add", "once", 1, job_id="own"),
    call("add", "late", 1, delay=HOUR),
    call("add", "mail", 2, raises=(QueueFullError,)),
]
DURABLE = [
    call("add", "mail", 1, raises=(NotSupportedError,)),
    call("add", "once", 2, job_id="own", raises=(NotSupportedError,)),
    call("add_bulk", jobs(260), raises=(NotSupportedError,)),
]


async def gather(stage: Stage) -> None:
    async with chasqui.Queue(stage.queue, redis_url=stage.url) as queue:
        await queue.add("mail", 0)  # connected: what follows leaves in one turn
        await asyncio.gather(*(queue.add("mail", {"n": i}) for i in range(100)))
        names = ("mail", "post")
        await asyncio.gather(*(queue.add(names[i % 2], i, attempts=i + 1) for i in range(4)))


async def raw_producer(stage: Stage) -> None:
    producer = chasqui.Producer(stage.url, stage.queue, max_stream_len=5000)
    await producer.add(b"\x01")
    await producer.add_with_options(b"\x02", {"name": "raw", "id": "own"})
    await producer.add_with_options(b"\x03", {"retry": {"max_attempts": 2, "backoff": BACKOFFS[2]}})
    await producer.add_bulk([b"\x04", b"\x05"])
    await producer.add_bulk_with_options([b"\x06", b"\x07"], {"name": "raw"})
    await producer.add_bulk_named([("one", b"\x08"), ("two", b"\x09")])
    await producer.add_in(60_000, b"\x0a")
    await producer.add_in_with_options(60_000, b"\x0b", {"name": "raw", "id": "own-2"})
    await producer.add_in_bulk(60_000, [b"\x0c", b"\x0d"])
    await producer.add_at(T0_MS + 3_600_000, b"\x0e")
    await producer.add_at_with_options(T0_MS + 3_600_000, b"\x0f", {"name": "raw"})
    await producer.cancel_delayed("own-2")
    await producer.peek_dlq(3)
    await producer.replay_dlq(3)
    await producer.get_result_bulk(["own", "own-2"])
    await producer.list_repeatable(5)
    await producer.shutdown()


async def unknown_scripts(stage: Stage) -> None:
    """The server has lost its scripts: the sources are sent."""
    async with chasqui.Queue(stage.queue, redis_url=stage.url) as queue:
        for _ in range(2):
            stage.redis.script_flush()
            await queue.add("mail", 1)
            await queue.add("once", 2, job_id="own")
            await queue.counts()


async def unknown_scripts_blocking(stage: Stage) -> None:
    with chasqui.sync.Queue(stage.queue, redis_url=stage.url) as queue:
        for _ in range(2):
            stage.redis.script_flush()
            queue.add("mail", 1)
            queue.add("once", 2, job_id="own")
            queue.counts()


SCENES = [
    *both("add", *ADDS),
    *both("add with options", *OPTIONS),
    Scene("gather", gather),
    *both("bulk", *BULKS),
    *both("bulk 50", call("add_bulk", jobs(50))),
    *both("bulk 1000", call("add_bulk", jobs(1000))),
    *both("bulk mixed", *MIXED),
    *both("bounded", *BOUNDED, queue={"max_backlog": 4}),
    *both("trimmed", *BULKS[:2], *OPTIONS[6:9], queue={"max_stream_len": 1000}),
    *both("durable", *DURABLE, queue={"durable": "disk"}),
    Scene("raw producer", raw_producer),
    Scene("unknown scripts", unknown_scripts),
    Scene("sync unknown scripts", unknown_scripts_blocking),
]
