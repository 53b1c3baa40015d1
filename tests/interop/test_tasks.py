"""Tasks and chasquimq: its worker runs what a task's call adds, and a task runs what it adds."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from chasqui import App
from chasqui.queue import Queue
from tests.servers import Server
from tests.tasks.conftest import serving

Peer = Callable[[str], Any]


@pytest.fixture
async def app(redis_86: Server, queue_name: str) -> AsyncIterator[App[None]]:
    async with App(queue_name, redis_url=redis_86.url) as app:
        yield app


def tasks_of(app: App[Any]) -> tuple[Any, Any]:
    @app.task
    async def welcome(to: str, n: int = 1) -> dict[str, Any]:
        return {"to": to, "n": n}

    @app.task
    def ship(day: date, price: Decimal = Decimal(1)) -> list[str]:
        return [day.isoformat(), str(price * 2)]

    return welcome, ship


async def test_its_worker_runs_the_jobs_of_tasks(app: App[None], peer: Peer) -> None:
    welcome, ship = tasks_of(app)
    day = date(2026, 1, 2)
    jobs = [
        await welcome.enqueue("a@b"),
        await ship.enqueue(day, Decimal("1.50")),
        *await app.enqueue_many([welcome.bind("c", n=2), ship.bind(day)]),
        await welcome.with_options(delay=0.05, job_id="own", attempts=3).enqueue("d"),
    ]
    seen = await asyncio.to_thread(peer, f"work({len(jobs)}, store_results=True)")
    wanted = [
        [jobs[0].id, "welcome", {"to": "a@b"}, 0],
        [jobs[1].id, "ship", {"day": "2026-01-02", "price": "1.50"}, 0],
        [jobs[2].id, "welcome", {"to": "c", "n": 2}, 0],
        [jobs[3].id, "ship", {"day": "2026-01-02"}, 0],
        ["own", "welcome", {"to": "d"}, 0],
    ]
    assert sorted(seen) == sorted(wanted)
    assert await jobs[0].wait_for_result(timeout=5) == {"done": {"to": "a@b"}}


async def test_tasks_run_what_it_adds(app: App[None], peer: Peer, queue: Queue) -> None:
    tasks_of(app)
    added = [
        await asyncio.to_thread(peer, source)
        for source in (
            "queue.add('welcome', {'to': 'a@b'})",
            "queue.add('ship', {'day': '2026-01-02', 'price': '1.50'})",
            "queue.add('welcome', {'to': 'later', 'n': 5}, delay_ms=50)",
        )
    ]
    async with serving(app):
        found = [await queue.wait_for_result(one[0], timeout=20) for one in added]
    assert found == [{"to": "a@b", "n": 1}, ["2026-01-02", "3.00"], {"to": "later", "n": 5}]
