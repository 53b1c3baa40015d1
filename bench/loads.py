"""One load of `bench.compare`, in a process of its own: `loads.py CHECKOUT URL LOAD N`.

It runs as a file, with the Python of the checkout that is measured, and uses only the public API.
chasqui comes from that checkout; the meter comes from here. It prints one line of JSON: the CPU
seconds of client and server for the load alone, without imports, connecting and filling the queue.
"""

import asyncio
import gc
import json
import logging
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

Data = dict[str, Any]

PAYLOAD: Data = {"to": "user@example.com", "n": 123}
#: Tasks that add at the same time, and handlers that run at the same time.
SLOTS = 100
BACKOFF = {"kind": "fixed", "delay_ms": 1}


class Clocks:
    """What client and server have spent since the load began."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._began = (0.0, 0.0)

    def start(self) -> None:
        gc.collect()
        gc.freeze()
        self._began = self._read()

    def stop(self) -> Data:
        client_s, server_s = (
            now - then for now, then in zip(self._read(), self._began, strict=True)
        )
        return {"client_s": client_s, "server_s": server_s}

    def _read(self) -> tuple[float, float]:
        own = resource.getrusage(resource.RUSAGE_SELF)
        return own.ru_utime + own.ru_stime, self._server.cpu_s()


# ── Adding ──────────────────────────────────────────────────────────────────────────────────────


async def single(queue: Any, n: int) -> None:
    for _ in range(n):
        await queue.add("welcome", PAYLOAD)


async def gather(queue: Any, n: int) -> None:
    rest = iter(range(n))

    async def one() -> None:
        for _ in rest:
            await queue.add("welcome", PAYLOAD)

    await asyncio.gather(*(one() for _ in range(SLOTS)))


async def bulk(queue: Any, n: int, size: int) -> None:
    jobs = [{"name": "welcome", "data": PAYLOAD}] * size
    for _ in range(n // size):
        await queue.add_bulk(jobs)


async def mixed(queue: Any, n: int) -> None:
    """Bulks of 50 jobs: a quarter each has attempts, a backoff, a delay, an id of its own."""
    options: list[Data] = [{"attempts": 3}, {"backoff": BACKOFF}, {"delay_ms": 3_600_000}]
    for start in range(0, n, 50):
        jobs: list[Data] = [{"name": "welcome", "data": PAYLOAD} for _ in range(50)]
        for i, job in enumerate(jobs):
            job |= options[i % 4] if i % 4 < 3 else {"job_id": f"order-{start + i}"}
        await queue.add_bulk(jobs)


ADDING: dict[str, Callable[[Any, int], Awaitable[None]]] = {
    "single": single,
    "gather": gather,
    "bulk50": lambda queue, n: bulk(queue, n, 50),
    "bulk1000": lambda queue, n: bulk(queue, n, 1000),
    "mixed": mixed,
}


async def add(chasqui: Any, url: str, load: str, n: int, clocks: Clocks) -> Data:
    async with chasqui.Queue("bench", redis_url=url) as queue:
        await ADDING[load](queue, 1000)  # warms up
        clocks.start()
        await ADDING[load](queue, n)
        return clocks.stop()


# ── Running ─────────────────────────────────────────────────────────────────────────────────────

#: Options of the worker, and of the jobs.
WORKING: dict[str, tuple[Data, Data]] = {
    "drain": ({"events_enabled": False}, {}),
    "drain-events": ({"events_enabled": True}, {}),
    "retry": ({"events_enabled": False}, {"attempts": 3, "backoff": BACKOFF}),
}


async def work(chasqui: Any, url: str, load: str, n: int, clocks: Clocks) -> Data:
    """Run n jobs that wait in the queue, to the last acknowledgement. Jobs of `retry` fail once."""
    options, job_options = WORKING[load]
    async with chasqui.Queue("bench", redis_url=url) as queue:
        for start in range(0, n, 1000):
            numbers = range(start, min(n, start + 1000))
            entries = [{"name": "welcome", "data": {**PAYLOAD, "n": i}} for i in numbers]
            await queue.add_bulk([{**entry, **job_options} for entry in entries])
    left, is_done = n, asyncio.Event()

    async def handle(job: Any) -> None:
        nonlocal left
        if job_options and job.attempt == 0:
            raise RuntimeError("fails the first time")
        left -= 1
        if left == 0:
            is_done.set()

    worker = chasqui.Worker("bench", handle, redis_url=url, concurrency=SLOTS, **options)
    clocks.start()
    running = asyncio.ensure_future(worker.run())
    waiting = asyncio.ensure_future(is_done.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    await worker.close()
    await running
    return clocks.stop()


def main() -> None:
    checkout, url, load, n = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    sys.path[0] = str(checkout)
    import chasqui

    if Path(chasqui.__file__).parents[1] != checkout:
        sys.exit(f"chasqui comes from {chasqui.__file__}, not from {checkout}")
    sys.path[0] = str(Path(__file__).parents[1])
    import uvloop

    from bench.peers.meter import ServerInfo

    # What is logged is made, and goes nowhere.
    logger = logging.getLogger("chasqui")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    play = add if load in ADDING else work
    server = ServerInfo(url)
    spent = uvloop.run(play(chasqui, url, load, n, Clocks(server)))
    server.close()
    print(json.dumps(spent))


if __name__ == "__main__":
    main()
