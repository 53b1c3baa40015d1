"""chasquimq in a process of its own, run by the interop environment's Python.

python peer.py worker URL QUEUE         runs jobs; prints the id, name and data of each
python peer.py scheduler URL QUEUE      fires specs
python peer.py add URL QUEUE DELAY_MS   adds a delayed job; prints its id
python peer.py upsert URL QUEUE EVERY_MS|CRON
"""

import asyncio
import sys

import chasquimq


async def main() -> None:
    role, url, name, *rest = sys.argv[1:]
    if role == "worker":

        async def handle(job: chasquimq.Job) -> None:
            print(job.id, job.name, job.data, flush=True)

        await chasquimq.Worker(name, handle, redis_url=url, run_scheduler=False).run()
    elif role == "scheduler":
        await chasquimq.Scheduler(url, name, tick_interval_ms=50).run()
    elif role == "add":
        queue = chasquimq.Queue(name, redis_url=url)
        job = await queue.add("theirs", {"n": 1}, delay_ms=int(rest[0]), job_id="their-id")
        print(job.id, flush=True)
        await queue.close()
    else:
        pattern = chasquimq.RepeatPattern
        repeat = pattern.every(int(rest[0])) if rest[0].isdigit() else pattern.cron(rest[0])
        queue = chasquimq.Queue(name, redis_url=url)
        job = await queue.upsert_repeatable_job("theirs", {"n": 2}, repeat=repeat, limit=3)
        print(job.id, flush=True)
        await queue.close()


asyncio.run(main())
