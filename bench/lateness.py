"""How late due jobs come: 1,000 jobs at random moments over 10 s, on a server of our own.

    python -m bench.lateness [--jobs N] [--seconds S] [--server redis-8.6] [--foreign]

Prints when each job entered the stream against its due time, both by the server's clock, so with
a resolution of one millisecond; and beside it how late this machine's timers are by themselves,
in the same run: a busy machine is late whatever it runs. With --foreign the jobs are put as
chasquimq puts them: without a ring, one at a time, each due within half a second.
"""

import argparse
import asyncio
import random
from time import monotonic

from chasqui import Queue
from chasqui._core.envelope import encode_delayed_member, encode_envelope
from chasqui.metrics import LockOutcome, PromoterTick
from chasqui.metrics.testing import InMemorySink
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.timed.promoter import Promoter
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect
from tests.servers import Server

#: What we owe: the 99th percentile.
TARGET_MS = 5


async def measure(
    url: str, jobs: int, seconds: float, is_foreign: bool
) -> tuple[list[int], list[float]]:
    """How late each job was, and each of the machine's own timers: in ms, sorted."""
    keys = Keys("lateness")
    metrics = InMemorySink()
    promoter = Promoter(url, keys.queue, metrics=metrics)
    running = asyncio.create_task(promoter.run())
    timers: list[float] = []
    sleeping = asyncio.create_task(measure_timers(timers))
    connection = Connection(Endpoint.parse(url), key=keys.delayed)
    try:
        await metrics.next(LockOutcome)
        put = put_foreign if is_foreign else put_ours
        due = await put(url, connection, keys, jobs, seconds)
        promoted = 0
        while promoted < jobs:
            promoted += (await metrics.next(PromoterTick)).promoted
        found = await connection.execute("XRANGE", keys.stream, "-", "+", effect=Effect.READ)
        late = sorted(int(one.split(b"-")[0]) - due[fields[1]] for one, fields in found)
        return late, sorted(timers)
    finally:
        sleeping.cancel()
        promoter.shutdown()
        await running
        await connection.close()


async def measure_timers(late: list[float]) -> None:
    """Sleep for random times, as the promoter does, and note how late each sleep ended."""
    while True:
        wait_s = random.uniform(0.001, 0.02)
        start_s = monotonic()
        await asyncio.sleep(wait_s)
        late.append((monotonic() - start_s - wait_s) * 1000)


async def put_ours(
    url: str, connection: Connection, keys: Keys, jobs: int, seconds: float
) -> dict[bytes, int]:
    """Add all jobs at once; when each is due, by its envelope."""
    span_ms = int(seconds * 1000)
    async with Queue(keys.queue, redis_url=url) as queue:
        await queue.add_bulk(
            [{"name": "", "data": i, "delay_ms": random.randint(500, span_ms)} for i in range(jobs)]
        )
    pairs = await connection.execute(
        "ZRANGE", keys.delayed, 0, -1, "WITHSCORES", effect=Effect.READ
    )
    return {member[4:]: int(score) for member, score in pairs}


async def put_foreign(
    url: str, connection: Connection, keys: Keys, jobs: int, seconds: float
) -> dict[bytes, int]:
    due = {}
    for i in range(jobs):
        await asyncio.sleep(seconds / jobs)
        now_s, now_us = await connection.execute("TIME", effect=Effect.READ)
        due_ms = int(now_s) * 1000 + int(now_us) // 1000 + random.randint(1, 500)
        envelope = encode_envelope(str(i), b"\xc0", due_ms)
        due[envelope] = due_ms
        member = encode_delayed_member("", envelope)
        await connection.execute("ZADD", keys.delayed, due_ms, member, effect=Effect.IDEMPOTENT)
    return due


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--server", default="redis-8.6")
    parser.add_argument("--foreign", action="store_true")
    options = parser.parse_args()
    with Server(options.server) as server:
        late, timers = asyncio.run(
            measure(server.url, options.jobs, options.seconds, options.foreign)
        )
    p50, p99 = late[len(late) // 2], late[int(len(late) * 0.99)]
    verdict = "" if options.foreign else "  PASS" if p99 <= TARGET_MS else "  SHORT"
    who = "chasquimq's" if options.foreign else "our"
    print(
        f"{options.server}: {len(late)} of {who} jobs late by"
        f" p50 {p50} ms, p99 {p99} ms, max {late[-1]} ms{verdict}\n"
        f"  timers alone: p50 {timers[len(timers) // 2]:.1f} ms,"
        f" p99 {timers[int(len(timers) * 0.99)]:.1f} ms"
    )


if __name__ == "__main__":
    main()
