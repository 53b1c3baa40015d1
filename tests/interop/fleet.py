"""chasquimq in a process of its own, as a producer or as a worker of planned jobs.

    fleet.py URL QUEUE produce FIRST COUNT
    fleet.py URL QUEUE work LEDGER          until its input ends

Run by the tests with the Python of .venv-interop; knows nothing of chasqui.
"""

import asyncio
import os
import sys
from typing import Any

import chasquimq
from plans import entries, outcome


async def produce(queue: Any, first: int, count: int) -> None:
    await queue.add_bulk(entries(first, count))


async def work(url: str, name: str, ledger: str) -> None:
    book = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def handler(job: Any) -> None:
        wrong = outcome(job.data, job.attempt)
        if wrong == "final":
            raise chasquimq.UnrecoverableError("as planned")
        if wrong:
            raise ValueError("as planned")
        os.write(book, b"%d\n" % job.data["n"])

    worker = chasquimq.Worker(name, handler, redis_url=url, concurrency=20, read_block_ms=50)
    running = asyncio.create_task(worker.run())
    print("works", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await worker.close()
    await running


async def main(url: str, name: str, what: str, *rest: str) -> None:
    if what == "produce":
        queue = chasquimq.Queue(name, redis_url=url)
        await produce(queue, int(rest[0]), int(rest[1]))
        await queue.close()
    else:
        await work(url, name, rest[0])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
