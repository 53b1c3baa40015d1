"""Servers that stand still, are busy, were demoted or say no: waited for, asked again, or told.

Each of the scenes is played twice: as it is, and as a control with the one protection gone that
it is about.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import redis as redis_py

from chasqui import Job, Queue
from chasqui.errors import ServerError
from chasqui.model.keys import Keys
from chasqui.transport import server
from tests.consuming.conftest import PAST_LEASE, Renewals, Running, renew_nothing, until
from tests.hoarding import hoard
from tests.proxy import Proxy
from tests.servers import KINDS, Server
from tests.servers.groups import ask

StartAt = Callable[..., Running]


async def fine(job: Job) -> None:
    pass


class Stage:
    """A server of its own behind a proxy, with a queue and a worker that has run a job."""

    def __init__(self, private: Server, proxy: Proxy, queue: Queue, running: Running) -> None:
        self.private = private
        self.proxy = proxy
        self.queue = queue
        self.running = running
        self.done = 1

    async def ask(self, command: str) -> str:
        """Behind the product's back."""
        return await asyncio.to_thread(ask, self.private.port, command)

    async def run_one(self, **options: Any) -> None:
        """Add a job and see that it is done."""
        await self.queue.add("n", self.done, **options)
        self.done += 1
        await self.running.completed(self.done)


@pytest.fixture(params=KINDS)
async def stage(
    request: pytest.FixtureRequest,
    private_server: Callable[..., Server],
    make_proxy: Callable[[str], Proxy],
    queue_name: str,
    start_at: StartAt,
) -> AsyncIterator[Stage]:
    allows = {} if request.param == "redis-6.2" else {"enable_debug_command": "yes"}
    private = private_server(request.param, **allows)
    proxy = make_proxy(private.url)
    async with Queue(queue_name, redis_url=proxy.url) as queue:
        running = start_at(proxy.url, fine)
        await queue.add("n", 0)
        await running.completed(1)
        yield Stage(private, proxy, queue, running)


# ── The scenes ──────────────────────────────────────────────────────────────────────────────────


async def demote(stage: Stage) -> None:
    """The primary becomes a replica under open links, and a primary again."""
    await stage.ask("REPLICAOF 127.0.0.1 1")
    adding = asyncio.ensure_future(stage.run_one())
    links = stage.proxy.accepted
    try:
        await unless_done(adding, lambda: stage.proxy.accepted > links)
    finally:
        await stage.ask("REPLICAOF NO ONE")
    await adding


async def keep_busy(stage: Stage) -> None:
    """A script that does not end, while jobs are added and one falls due."""
    await stage.ask("CONFIG SET lua-time-limit 1")
    await stage.queue.add("n", "late", delay_ms=50)
    endless = asyncio.ensure_future(stage.ask('EVAL "while true do end" 0'))

    async def is_busy() -> bool:
        return (await stage.ask("PING")).startswith("-BUSY")

    await until(is_busy, "the server is busy")
    adding = asyncio.ensure_future(stage.queue.add("n", stage.done))
    try:
        seen = len(stage.proxy.commands)
        await unless_done(adding, lambda: len(stage.proxy.commands) > seen + 5)
    finally:
        await stage.ask("SCRIPT KILL")
        await endless
    await adding
    stage.done += 2
    await stage.running.completed(stage.done)


async def flush_scripts(stage: Stage) -> None:
    """The server forgets all scripts, over and over."""
    for _ in range(5):
        await stage.ask("SCRIPT FLUSH")
        await stage.run_one()
        await stage.ask("SCRIPT FLUSH")
        await stage.run_one(delay_ms=1)


async def unless_done(task: "asyncio.Future[Any]", fact: Callable[[], bool]) -> None:
    """Return when a fact has become true, or when that makes no difference any more."""

    async def is_so() -> bool:
        return task.done() or fact()

    await until(is_so, "the server is asked again")


SCENES = [
    pytest.param(demote, "READONLY", id="demoted", marks=pytest.mark.fault(11)),
    pytest.param(keep_busy, "BUSY", id="busy", marks=pytest.mark.fault(20)),
    pytest.param(flush_scripts, "NOSCRIPT", id="scripts flushed", marks=pytest.mark.fault(23)),
]


@pytest.mark.parametrize(("scene", "code"), SCENES)
async def test_work_goes_on(
    stage: Stage,
    scene: Callable[[Stage], Awaitable[None]],
    code: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    links = stage.proxy.accepted
    await scene(stage)
    await stage.run_one()
    told = [record for record in caplog.records if record.levelname != "INFO"]
    assert len(told) < 10, "said, but not in a storm"
    assert stage.proxy.accepted - links < 20, "dialled, but not in a storm"


@pytest.mark.fault(11, control=True)
@pytest.mark.fault(20, control=True)
@pytest.mark.fault(23, control=True)
@pytest.mark.parametrize(("scene", "code"), [scene.values for scene in SCENES])
async def test_without_its_answer_a_refusal_reaches_the_caller(
    stage: Stage,
    scene: Callable[[Stage], Awaitable[None]],
    code: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(server._MEANINGS, code)
    with pytest.raises(ServerError, match=code):
        await scene(stage)


# ── A server that stands still ──────────────────────────────────────────────────────────────────


#: Renewals wait for a third of it: longer than the server stands still.
LEASE_MS = 4500
STANDSTILLS = pytest.mark.parametrize("how", ["CLIENT PAUSE 600 WRITE", "DEBUG SLEEP 0.6"])


@STANDSTILLS
@pytest.mark.fault(19)
async def test_a_server_that_stands_still_is_waited_for(
    how: str, stage: Stage, start_at: StartAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For less than a lease: nobody dials anew, and what runs is not run again."""
    await _runs_once(stage, start_at, how, monkeypatch)


@STANDSTILLS
@pytest.mark.fault(19, control=True)
async def test_without_renewals_a_pause_is_a_second_run(
    how: str, stage: Stage, start_at: StartAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew_nothing(monkeypatch)
    with pytest.raises(AssertionError, match="some ran twice"):
        await _runs_once(stage, start_at, how, monkeypatch)


async def _runs_once(
    stage: Stage, start_at: StartAt, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker has its hands full before a standstill and until a lease after it; another one
    takes over what lapses."""
    monkeypatch.setattr("chasqui.consuming.takeovers.LOOK_S", 0.2)
    hoard(monkeypatch.setattr)
    await stage.running.stop()
    runs: Counter[int] = Counter()
    gate = asyncio.Event()

    async def handler(job: Job) -> None:
        runs[job.data] += 1
        if job.name != "quick":
            await gate.wait()

    options = {"claim_min_idle_ms": LEASE_MS, "read_block_ms": 100}
    full = start_at(stage.proxy.url, handler, concurrency=2, read_count=5, **options)
    await stage.queue.add_bulk([{"name": "n", "data": n} for n in range(5)])

    async def all_in_hand() -> bool:
        return len(runs) == 2 and (await stage.queue.counts()).pending == 5

    await until(all_in_hand, "two run and three wait")
    rival = start_at(stage.proxy.url, handler, **options)
    await stage.queue.add("quick", 5)
    await rival.completed(1)
    links = stage.proxy.accepted
    standing = asyncio.ensure_future(stage.ask(how))
    await stage.queue.add("n", 6)  # answered when the server moves again
    await standing
    keys = Keys(stage.queue.name)
    with redis_py.Redis.from_url(stage.private.url) as client:
        renewals = Renewals(client, keys)

        async def goes_on() -> bool:
            is_past = renewals.look() >= PAST_LEASE
            return 6 in runs and (is_past or max(runs.values()) > 1)

        await until(goes_on, "work goes on, and the leases without their renewals would be over")
        gate.set()

        async def is_empty() -> bool:
            return bool(client.xlen(keys.stream) == 0)

        await until(is_empty, "all is acknowledged")
    assert full.metrics.jobs_completed + rival.metrics.jobs_completed >= 7
    assert set(runs.values()) == {1}, f"some ran twice: {runs}"
    # Heartbeats and promoters may have been about to make their first one.
    assert stage.proxy.accepted <= links + 4, "no link was given up"
