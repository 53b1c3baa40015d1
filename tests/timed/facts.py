"""How these tests run a loop, what they put into a queue, and how they wait for what it does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from chasqui._core.envelope import decode_envelope, encode_delayed_member, encode_envelope
from chasqui.model.job import MissedFiresPolicy, RepeatPattern
from chasqui.model.keys import Keys
from chasqui.model.payload import decode
from chasqui.timed.leader_loop import LeaderLoop
from chasqui.timed.promoter import PromoterLoop
from chasqui.timed.scheduler import SchedulerLoop

#: How long a test waits for a fact before it fails.
WAIT_S = 20.0
#: The pause between two looks at a fact that nobody announces.
LOOK_S = 0.01

EVERY_MINUTE = RepeatPattern.cron("* * * * *")
MINUTE_MS = 60_000
#: For tests that may be held up, or begin just before a full minute.
ONCE = MissedFiresPolicy.fire_once()

Redis = Callable[..., Awaitable[Any]]
MakePromoter = Callable[..., PromoterLoop]
MakeScheduler = Callable[..., SchedulerLoop]


@contextlib.asynccontextmanager
async def running(loop: LeaderLoop) -> AsyncIterator[asyncio.Task[None]]:
    """Runs a loop; it is stopped at the end, and must end by itself then."""
    stop = asyncio.Event()
    task = asyncio.create_task(loop.run(stop))
    try:
        yield task
    finally:
        stop.set()
        async with asyncio.timeout(WAIT_S):
            await task


async def eventually(fact: Callable[[], Awaitable[Any]]) -> Any:
    """What a look finds as soon as it finds anything."""
    async with asyncio.timeout(WAIT_S):
        while not (found := await fact()):  # noqa: ASYNC110  nobody sets an event
            await asyncio.sleep(LOOK_S)
    return found


async def entries(redis: Redis, key: bytes) -> list[dict[bytes, bytes]]:
    """The fields of every entry of a stream, in order."""
    reply = await redis("XRANGE", key, "-", "+")
    return [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in reply]


async def stream_of(redis: Redis, key: bytes, count: int) -> list[dict[bytes, bytes]]:
    """The entries of a stream as soon as there are that many."""

    async def enough() -> bool:
        return bool(await redis("XLEN", key) >= count)

    await eventually(enough)
    return await entries(redis, key)


def member(job_id: str, name: str = "mail", payload: bytes = b"\xc0") -> bytes:
    return encode_delayed_member(name, encode_envelope(job_id, payload, 1))


async def put(redis: Redis, keys: Keys, *members: bytes, due_ms: int = 1) -> None:
    """Add members as chasquimq does: without a wake."""
    pairs = [part for one in members for part in (due_ms, one)]
    await redis("ZADD", keys.delayed, *pairs)


async def ids_in_stream(redis: Redis, keys: Keys) -> list[str]:
    return [decode_envelope(entry[b"d"]).id for entry in await entries(redis, keys.stream)]


async def now_ms(redis: Redis) -> int:
    seconds, micros = await redis("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


async def score(redis: Redis, keys: Keys, key: str) -> int | None:
    found = await redis("ZSCORE", keys.repeat, key)
    return None if found is None else int(float(found))


async def make_due(redis: Redis, keys: Keys, key: str, *, ago_ms: int) -> int:
    """Let a spec have been due for a while; since when."""
    due_ms = await now_ms(redis) - ago_ms
    await redis("ZADD", keys.repeat, due_ms, key)
    return due_ms


async def fires(redis: Redis, keys: Keys) -> list[Any]:
    """The decoded payloads of all fires."""
    found = await entries(redis, keys.stream)
    return [decode(decode_envelope(entry[b"d"]).payload) for entry in found]
