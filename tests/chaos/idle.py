"""`python -m tests.chaos.idle`: what workers cost that have nothing to do."""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import redis
from rich.console import Console

from chasqui import Job, Worker
from tests.chaos.figure import commit
from tests.servers import KINDS, Server

RESULTS = Path(__file__).parent / "results" / "idle.json"
#: Not measured: what their start costs, and the first pauses, which grow.
SETTLE_S = 15.0
#: What all of them may cost, of a core; and what each worker may send.
CPU_PERCENT, COMMANDS_PER_S = 1.0, 2.0


async def measure(kind: str, queues: int, seconds: float) -> dict[str, Any]:
    """One process with a worker for each queue."""

    async def handle(job: Job) -> None:
        raise AssertionError("there is no job")

    with Server(kind) as server, redis.Redis.from_url(server.url) as client:
        workers = [Worker(f"idle-{i}", handle, redis_url=server.url) for i in range(queues)]
        running = [asyncio.ensure_future(worker.run()) for worker in workers]
        await asyncio.sleep(SETTLE_S)
        calls, cpu_s, start_s = _calls(client), time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        passed_s = time.monotonic() - start_s
        used_s, made = time.process_time() - cpu_s, _calls(client) - calls
        for worker in workers:
            await worker.close()
        await asyncio.gather(*running)
    return {
        "queues": queues,
        "seconds": round(passed_s, 1),
        "cpu_percent": round(used_s / passed_s * 100, 2),
        "commands_per_s_and_worker": round(made / passed_s / queues, 2),
    }


def wrong(told: dict[str, Any]) -> list[str]:
    """What costs more than it may, in words."""
    may = {"cpu_percent": CPU_PERCENT, "commands_per_s_and_worker": COMMANDS_PER_S}
    return [f"{told[what]} {what}, not {most:g}" for what, most in may.items() if told[what] > most]


def _calls(client: redis.Redis) -> int:
    """The commands that the server counts, those inside scripts included."""
    stats = client.info("commandstats")
    return sum(told["calls"] for name, told in stats.items() if name != "cmdstat_info")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.idle", description=__doc__)
    parser.add_argument("--server", choices=list(KINDS), default="redis-8.6")
    parser.add_argument("--queues", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    made_at = {"commit": commit()}
    told = made_at | asyncio.run(measure(arguments.server, arguments.queues, arguments.seconds))
    console = Console()
    console.print(told)
    known = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    known[arguments.server] = told
    arguments.json.write_text(json.dumps(known, indent=1) + "\n")
    for line in (found := wrong(told)):
        console.print(f"[red]✗ {line}[/]", soft_wrap=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
