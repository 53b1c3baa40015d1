"""How many repeat specs one scheduler keeps up with, on a server of our own.

    python -m bench.fires [--specs N] [--interval-ms MS] [--seconds S] [--server redis-8.6] [--cron]

Prints the fires of so many specs against their slots, how many came late and by how much at most,
the CPU that scheduler and server took, and the longest that one script call held the server up.
"""

import argparse
import asyncio
import resource

from chasqui import Queue, RepeatPattern, Scheduler
from chasqui.metrics import SchedulerTick
from chasqui.metrics.testing import InMemorySink
from chasqui.model.config import Endpoint
from chasqui.model.keys import FIRED, Keys
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect
from tests.servers import Server

#: Specs written at a time.
CHUNK = 500


async def write(queue: Queue, specs: int, pattern: RepeatPattern, start_ms: int) -> None:
    """Write the specs; none is due before `start_ms`."""
    for first in range(0, specs, CHUNK):
        await asyncio.gather(
            *(
                queue.upsert_repeatable_job(
                    "tick", i, repeat=pattern, key=str(i), start_after_ms=start_ms
                )
                for i in range(first, min(first + CHUNK, specs))
            )
        )


async def measure(url: str, specs: int, interval_ms: int, seconds: int, is_cron: bool) -> str:
    keys, metrics = Keys("fires"), InMemorySink()
    pattern = RepeatPattern.every(interval_ms)
    if is_cron:
        interval_ms, pattern = 1000, RepeatPattern.cron("* * * * * *")
    connection = Connection(Endpoint.parse(url), key=keys.repeat)

    async def ask(*words: object) -> object:
        return await connection.execute(*words, effect=Effect.READ)

    async def server_cpu_s() -> float:
        told = (await ask("INFO", "cpu")).decode()  # type: ignore[attr-defined]
        facts = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
        return float(facts["used_cpu_sys"]) + float(facts["used_cpu_user"])

    async with Queue(keys.queue, redis_url=url) as queue:
        now_s, _ = await ask("TIME")  # type: ignore[misc]
        # Specs of one moment are the worst for a scheduler. Writing them all takes a while.
        start_ms = (int(now_s) + 5 + specs // 1000) * 1000
        await write(queue, specs, pattern, start_ms)
        await ask("CONFIG", "SET", "slowlog-log-slower-than", 1000)
        await ask("CONFIG", "SET", "slowlog-max-len", 100_000)
        scheduler = Scheduler(url, keys.queue, metrics=metrics)
        running = asyncio.create_task(scheduler.run())
        while int((await ask("TIME"))[0]) * 1000 < start_ms:  # type: ignore[index]  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        own, others = resource.getrusage(resource.RUSAGE_SELF), await server_cpu_s()
        # Half an interval past the last slot: it has fired by then, or comes late.
        await asyncio.sleep(seconds + interval_ms / 2000)
        scheduler.shutdown()
        await running
        used, server_s = resource.getrusage(resource.RUSAGE_SELF), await server_cpu_s() - others
        own_s = used.ru_utime + used.ru_stime - own.ru_utime - own.ru_stime
    fired = [int(await ask("HGET", keys.repeat_spec(str(i)), FIRED) or 0) for i in range(specs)]
    slow = await ask("SLOWLOG", "GET", -1)
    calls = [one[2] for one in slow if one[3][0] in (b"EVALSHA", b"EVAL")]  # type: ignore[attr-defined]
    await connection.close()
    ticks = metrics.all(SchedulerTick)
    slots = specs * (seconds * 1000 // interval_ms)
    return (
        f"{sum(fired):,} fires of {slots:,} slots of {specs:,} specs; the least of a spec:"
        f" {min(fired)}\n"
        f"  late: {sum(tick.late for tick in ticks):,}; the latest by"
        f" {max(tick.lag_ms for tick in ticks)} ms\n"
        f"  CPU: scheduler {100 * own_s / seconds:.0f} %, server {100 * server_s / seconds:.0f} %,"
        f" {1e6 * own_s / max(1, sum(fired)):.1f} and {1e6 * server_s / max(1, sum(fired)):.1f}"
        " us a fire\n"
        f"  calls that took the server 1 ms or more: {len(calls)}, the longest"
        f" {max(calls, default=0) / 1000:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--specs", type=int, default=10_000)
    parser.add_argument("--interval-ms", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--server", default="redis-8.6")
    parser.add_argument("--cron", action="store_true")
    options = parser.parse_args()
    with Server(options.server) as server:
        told = asyncio.run(
            measure(server.url, options.specs, options.interval_ms, options.seconds, options.cron)
        )
    print(f"{options.server}: {told}")


if __name__ == "__main__":
    main()
