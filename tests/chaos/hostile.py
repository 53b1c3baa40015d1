"""`python -m tests.chaos.hostile`: broken entries among good ones; all good ones must be done, all
broken ones buried, and the worker's memory stay about where it was."""

import asyncio
import logging
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import redis

from chasqui import Job, Worker
from chasqui._core.envelope import encode_envelope
from chasqui.model.keys import ENVELOPE, NAME, Keys
from chasqui.model.payload import encode
from tests.chaos.conduct import HANG_S
from tests.chaos.figure import Figure
from tests.core.memory import rss_bytes
from tests.servers import Server

QUEUE = "hostile"
BATCH = 500
#: What the worker may hold more at its most than when it began.
GROWTH_MB = 64
_ID = "01JZZZZZZZZZZZZZZZZZZZZZZZ"

Fields = dict[bytes, bytes]


def envelope(n: int) -> bytes:
    return encode_envelope(_ID, encode({"n": n}), 1_700_000_000_000, 0)


#: Each makes the fields of an entry that can never run, out of luck and a good envelope.
BROKEN: tuple[Callable[[random.Random, bytes], Fields], ...] = (
    lambda luck, good: {ENVELOPE: good[: luck.randrange(len(good))]},
    lambda luck, good: {ENVELOPE: good + luck.randbytes(1 + luck.randrange(20))},
    lambda luck, good: {ENVELOPE: b"\x91" * luck.randrange(200, 20_000)},
    lambda luck, good: {ENVELOPE: b"\xdd\xff\xff\xff\xff" + luck.randbytes(20)},
    lambda luck, good: {ENVELOPE: b"\x94\xdb\xff\xff\xff\xf0" + good},
    lambda luck, good: {ENVELOPE: b"\xc1" + luck.randbytes(luck.randrange(60))},
    lambda luck, good: {b"x": good},
    lambda luck, good: {ENVELOPE: b""},
)


def fill(url: str, count: int, seed: int) -> None:
    """Good and broken entries in turn, each kind of broken one as often as the others."""
    luck, stream = random.Random(seed), Keys(QUEUE).stream
    with redis.Redis.from_url(url) as client:
        for start in range(0, count, BATCH):
            with client.pipeline(transaction=False) as pipe:
                for n in range(start, min(start + BATCH, count)):
                    good = envelope(n)
                    pipe.xadd(stream, {ENVELOPE: good, NAME: b"work"})
                    pipe.xadd(stream, BROKEN[n % len(BROKEN)](luck, good))
                pipe.execute()


async def measure(kind: str, count: int, seed: int) -> dict[str, Any]:
    """Fill a queue, work it off, and count."""
    done = bytearray(count)
    finished = 0

    async def handle(job: Job) -> None:
        nonlocal finished
        done[job.data["n"]] += 1
        finished += 1

    with Server(kind) as server, redis.Redis.from_url(server.url) as client:
        await asyncio.to_thread(fill, server.url, count, seed)
        keys = Keys(QUEUE)
        worker = Worker(QUEUE, handle, redis_url=server.url)
        running = asyncio.ensure_future(worker.run())
        start_s = last_s = time.monotonic()
        last, rss_mb = -1, [0.0]
        while (left := client.xlen(keys.stream)) and time.monotonic() - last_s < HANG_S:
            if left != last:
                last, last_s = left, time.monotonic()
            rss_mb.append(rss_bytes() / 2**20)
            await asyncio.sleep(0.5)
        seconds = time.monotonic() - start_s
        await worker.close()
        await running
        return {
            "server": kind, "good": count, "broken": count, "seed": seed,
            "done": sum(map(bool, done)), "runs": finished, "buried": client.xlen(keys.dlq),
            "left": client.xlen(keys.stream), "seconds": round(seconds, 1),
            "rss_mb": [round(rss_mb[1]), round(max(rss_mb))],
        }  # fmt: skip


def wrong(told: dict[str, Any]) -> list[str]:
    """What must not be."""
    wanted = {"done": told["good"], "runs": told["good"], "buried": told["broken"], "left": 0}
    found = [f"{told[name]} {name}, not {count}" for name, count in wanted.items()
             if told[name] != count]  # fmt: skip
    first_mb, most_mb = told["rss_mb"]
    if most_mb > first_mb + GROWTH_MB:
        found.append(f"{first_mb} MB at the start, {most_mb} at the most")
    return found


def main() -> int:
    figure = Figure("hostile", __doc__)
    figure.parser.add_argument("--count", type=int, default=100_000, help="good and broken ones")
    asked = figure.arguments()
    logging.disable(logging.WARNING)  # of each entry that is buried there is one
    told = asyncio.run(measure(asked.server, asked.count, asked.seed))
    return figure.end(asked.json, told, wrong(told))


if __name__ == "__main__":
    sys.exit(main())
