"""chasquimq in a process of its own: evaluates what it is told, a JSON line each way.

Run by the tests with the Python of .venv-interop; knows nothing of chasqui.
"""

import asyncio
import dataclasses
import json
import os
import sys
from typing import Any

import chasquimq
import redis.asyncio
from chasquimq import BackoffSpec, MissedFiresPolicy, RepeatPattern, Worker  # noqa: F401


async def main(url: str, name: str) -> None:
    queue = chasquimq.Queue(name, redis_url=url)
    producer = chasquimq.Producer(url, name)
    client = redis.asyncio.Redis.from_url(url)

    async def work(count: int, failing: int = 0, **options: Any) -> list[Any]:
        """Run a worker until it has run so many jobs; what its handler saw. The first few fail."""
        seen: list[Any] = []
        enough = asyncio.Event()

        async def handler(job: Any) -> Any:
            seen.append([job.id, job.name, job.data, job.attempt])
            if len(seen) >= count:
                enough.set()
            if len(seen) <= failing:
                raise chasquimq.UnrecoverableError("as told")
            return {"done": job.data}

        worker = chasquimq.Worker(
            name,
            handler,
            redis_url=url,
            read_block_ms=20,
            scheduler_tick_ms=20,
            # A worker that was closed in mid-read may have taken a job with it.
            claim_min_idle_ms=500,
            **options,
        )
        running = asyncio.create_task(worker.run())
        try:
            async with asyncio.timeout(20):
                await enough.wait()
                # It forgets what it has not acknowledged when it is closed.
                while await client.xlen(producer.stream_key()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            seen.append("no more came")
        await worker.close()
        await running
        return seen

    scope = {**globals(), "queue": queue, "producer": producer, "work": work, "name": name}
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        try:
            value = eval(json.loads(line), scope)
            if asyncio.iscoroutine(value) or asyncio.isfuture(value):
                value = await value
            answer = {"value": plain(value)}
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


def plain(value: Any) -> Any:
    """What JSON can carry."""
    if isinstance(value, chasquimq.Job):
        return [value.id, value.name, plain(value.data)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value.hex() if isinstance(value, bytes) else value


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
    os._exit(0)  # its engine's threads do not always end well
