"""Hours of work in a minute: links break every moment, and in the end all is as it was."""

import asyncio
import gc
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import redis as redis_py

from chasqui import Queue, Worker
from chasqui.consuming.engine import Health
from chasqui.scripts import settling
from chasqui.transport.connection import Connection
from chasqui.transport.link import Link
from tests.chaos.soak import measure, wrong
from tests.consuming.conftest import until
from tests.core.memory import rss_bytes
from tests.faults.careless import careless
from tests.proxy import Proxy
from tests.servers import KINDS, Server

#: Rounds until pools, caches and free lists are full, then those that count.
WARM_UP, ROUNDS = 4, 10
JOBS = 200
#: Of a queue, and of its worker: commands, reads, the promoter, the heartbeat.
LINKS = 5
#: What may be more in the end: what an allocator holds on to, the server's own, and what is on its
#: way at that moment.
RSS_BYTES, SERVER_BYTES, OBJECTS = 4 << 20, 1 << 20, 20


@dataclass(frozen=True)
class Footprint:
    """What a process and its server hold."""

    rss_bytes: int
    files: int
    tasks: int
    server_bytes: int
    #: Those that do not end by themselves.
    keys: int
    #: Objects of chasqui: links, requests, whatever was not let go.
    objects: int

    @classmethod
    def take(cls, client: redis_py.Redis) -> "Footprint":
        client.memory_purge()
        gc.collect()
        return cls(
            rss_bytes(),
            len(os.listdir("/proc/self/fd")),
            len(asyncio.all_tasks()),
            client.info("memory")["used_memory"],
            sum(client.ttl(key) == -1 for key in client.scan_iter(count=1000)),
            sum(str(type(one).__module__).startswith("chasqui") for one in gc.get_objects()),
        )

    def excess(self, before: "Footprint") -> dict[str, int]:
        """What has grown beyond what it may."""
        may = {"rss_bytes": RSS_BYTES, "server_bytes": SERVER_BYTES, "objects": OBJECTS}
        grown = {name: value - getattr(before, name) for name, value in vars(self).items()}
        return {name: by for name, by in grown.items() if by > may.get(name, 0)}


class Soak:
    """A queue and a worker behind a proxy that cuts their links, round after round."""

    def __init__(self, server: Server, proxy: Proxy, queue_name: str) -> None:
        #: What each job carries.
        self.data: object = {"n": 0}
        self._proxy = proxy
        self._client = redis_py.Redis.from_url(server.url)
        self._done = 0
        self._queue = Queue(queue_name, redis_url=proxy.url)
        self._worker = Worker(
            queue_name,
            self._handle,
            redis_url=proxy.url,
            events_enabled=False,
            store_results=True,
            result_ttl_ms=200,
            read_block_ms=500,
            claim_min_idle_ms=3000,
        )

    async def _handle(self, job: Any) -> int:
        if job.name == "hold":
            await until(self._has_all_links, "a beat dials the last link")
        if job.name == "again" and job.attempt == 0:
            raise ValueError("not yet")
        self._done += 1
        return self._done

    async def round(self) -> None:
        """Jobs of every kind, and cut links before, between and behind them."""
        target = self._done + JOBS
        for part in range(4):
            kinds: list[dict[str, Any]] = [{}, {"delay_ms": 10}, {"attempts": 3, "backoff": 5}, {}]
            names = ["plain", "later", "again", "plain"]
            await self._queue.add_bulk(
                [
                    {"name": names[n % 4], "data": self.data, **kinds[n % 4]}
                    for n in range(JOBS // 4)
                ]
            )
            if part % 2:
                self._proxy.cut()

        async def all_done() -> bool:
            return self._done >= target

        await until(all_done, f"{JOBS} more jobs are done")

    async def rest(self) -> Footprint:
        """Wait until every link is back and nothing is on its way; what is held then."""
        await self._queue.add("hold", None)  # who holds nothing has no heart that beats

        async def is_at_rest() -> bool:
            health = self._worker.health()
            is_idle = health is not None and not _is_busy(health)
            return is_idle and not self._results() and self._is_linked()

        await until(is_at_rest, "every link is back and nothing is on its way")
        return Footprint.take(self._client)

    async def _has_all_links(self) -> bool:
        return self._proxy.open_links >= LINKS

    async def _is_up(self) -> bool:
        health = self._worker.health()
        return health is not None and health.is_connected

    def _results(self) -> bool:
        return any(True for _ in self._client.scan_iter("*:result:*", count=1000))

    def _is_linked(self) -> bool:
        """Whether each link is there once, and the promoter waits at its own."""
        ours = [client for client in self._client.client_list() if "chasqui" in client["name"]]
        is_waiting = any(client["cmd"] == "blpop" for client in ours)
        return len(ours) == self._proxy.open_links == LINKS and is_waiting

    async def run(self, rounds: int, warm_up: int = WARM_UP) -> dict[str, int]:
        """What is held too much after so many rounds."""
        async with self._queue, self._worker:
            running = asyncio.ensure_future(self._worker.run())
            await until(self._is_up, "it is connected")  # a link that breaks before is an error
            for _ in range(warm_up):
                await self.round()
            before = await self.rest()
            for _ in range(rounds):
                await self.round()
            after = await self.rest()
            await self._worker.close()
            await running
        print(f"{before}\n{after}\n{self._proxy.accepted} links")
        self._client.close()
        return after.excess(before)


def _is_busy(health: Health) -> bool:
    busy = health.running + health.prefetched + health.acks_waiting + health.moves_waiting
    return bool(busy) or not health.is_connected


@pytest.fixture
def soak(
    private_server: Callable[..., Server], make_proxy: Callable[[str], Proxy], queue_name: str
) -> Callable[[str], Soak]:
    """Makes one at a server of its own."""

    def make(kind: str) -> Soak:
        server = private_server(kind)
        return Soak(server, make_proxy(server.url), queue_name)

    return make


@pytest.mark.fault(55)
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
async def test_all_is_as_it_was(soak: Callable[[str], Soak], kind: str) -> None:
    assert await soak(kind).run(ROUNDS) == {}


@pytest.mark.fault(55)
@pytest.mark.long
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_grows_by_the_hour(kind: str) -> None:
    """Without a proxy in the process: it keeps books of every command and link."""
    assert wrong(await measure(kind, 3600)) == []


@pytest.mark.fault(55, control=True)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_links_that_are_not_forgotten_are_caught(
    soak: Callable[[str], Soak], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_lost = Connection._on_lost

    def keep(self: Connection, link: Link) -> None:
        on_lost(self, link)
        self._flow.links.add(link)

    monkeypatch.setattr(Connection, "_on_lost", keep)
    assert "objects" in await soak(kind).run(2, warm_up=1)


@pytest.mark.fault(55, control=True)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_entries_that_are_not_deleted_are_caught(
    soak: Callable[[str], Soak], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeps = careless(settling.COMPLETE, "XDEL", instead="return 1")
    monkeypatch.setattr(settling, "COMPLETE", keeps)
    wasteful = soak(kind)
    wasteful.data = "x" * 4096  # so that two rounds are enough
    assert "server_bytes" in await wasteful.run(2, warm_up=1)


@pytest.mark.fault(55, control=True)
async def test_memory_and_descriptors_that_leak_are_caught(redis_86: Server) -> None:
    """Python gives back what nobody holds: there is nothing of ours to switch off."""
    with redis_py.Redis.from_url(redis_86.url) as client:
        before = Footprint.take(client)
        # Not from the allocator: it may have that much left over from other tests.
        block, leaked = mmap.mmap(-1, 16 << 20), os.dup(0)
        try:
            block.write(bytes(len(block)))
            excess = Footprint.take(client).excess(before)
        finally:
            os.close(leaked)
            block.close()
    assert {"rss_bytes", "files"} <= excess.keys()


@pytest.mark.fault(55)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("queues", "watched_s"),
    [(20, 10.0), pytest.param(100, 60.0, marks=[pytest.mark.long, pytest.mark.timeout(300)])],
)
async def test_idle_queues_cost_next_to_nothing(
    redis_86: Server,
    make_proxy: Callable[[str], Proxy],
    queue_name: str,
    queues: int,
    watched_s: float,
) -> None:
    """At most two commands a second from each worker."""
    proxy = make_proxy(redis_86.url)

    async def handler(job: Any) -> None:
        pass

    workers = [Worker(f"{queue_name}-{n}", handler, redis_url=proxy.url) for n in range(queues)]
    running = [asyncio.ensure_future(worker.run()) for worker in workers]

    def all_idle() -> bool:  # each one's first read does not wait
        return proxy.count("BLPOP") >= queues and proxy.count("XREADGROUP") >= 2 * queues

    await asyncio.to_thread(proxy.wait_for, all_idle)
    before, cpu_s = len(proxy.commands), time.thread_time()
    await asyncio.sleep(watched_s)  # the rate is the fact
    rate, cpu_s = len(proxy.commands) - before, time.thread_time() - cpu_s
    for worker in workers:
        await worker.close()
    await asyncio.gather(*running)
    rate /= watched_s * queues
    print(f"{rate:.2f} commands/s from each worker, {cpu_s / watched_s:.2%} of a core")
    assert rate <= 2.0
