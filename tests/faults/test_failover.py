"""Queues whose server changes: workers and producers follow, and what a replica had is there."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import redis as redis_py

from chasqui import Job, Queue, sync
from chasqui.errors import ChasquiError, ServerError
from chasqui.model.keys import Keys
from chasqui.transport import server
from tests.consuming.conftest import Running, until
from tests.crash.conftest import eventually
from tests.ledger import Census, audit
from tests.servers import KINDS, Server
from tests.servers.groups import Cluster, Watched, ask, is_primary

StartAt = Callable[..., Running]

#: From 7.0 on sentinels can be told to look around more often than every 10 s.
QUICK = ["redis-8.6", "valkey-9", pytest.param("redis-6.2", marks=pytest.mark.long)]


#: What is written to a replica that reads nothing, and goes with the process of its primary.
MORE_THAN_A_SOCKET_HOLDS = 32 * 1024 * 1024


async def fine(job: Job) -> None:
    pass


# ── Sentinel ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(10)
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", QUICK)
async def test_a_primary_that_is_stopped_and_comes_back(
    kind: str, queue_name: str, start_at: StartAt
) -> None:
    """Under a worker that waits for jobs and producers that wait for the replica. One of them adds
    while the primary stands still, to a queue that nobody reads: when that one goes on it takes the
    job, and forgets it as a replica."""
    added: list[int] = []
    unknown: list[int] = []
    done: list[int] = []

    async def handler(job: Job) -> None:
        done.append(job.data["n"])

    with Watched(kind, down_after_ms=1000) as group:
        running = start_at(group.url, handler, read_block_ms=5000)
        options: dict[str, Any] = {"redis_url": group.url, "durable": "replica"}
        unread = f"{queue_name}-unread"
        async with Queue(queue_name, **options) as queue, Queue(unread, **options) as other:

            async def add() -> None:
                number = len(added) + len(unknown)
                try:
                    await queue.add("n", {"n": number})
                    added.append(number)
                except ChasquiError:  # it may have reached the old primary only
                    unknown.append(number)

            await add()
            await running.completed(1)
            await other.add("n", {"n": 0})
            old = group.primary
            os.kill(old.pid, signal.SIGSTOP)
            adding = asyncio.ensure_future(other.add("n", {"n": 1}))
            try:

                async def is_replaced() -> bool:
                    return await asyncio.to_thread(lambda: group.primary) is not old

                await until(is_replaced, "another one is the primary")
            finally:
                os.kill(old.pid, signal.SIGCONT)
            count = len(added)
            while len(added) < count + 5:
                await add()

            async def all_done() -> bool:
                return set(added) <= set(done)

            await until(all_done, "all that was confirmed is done")
            confirmed = [0]
            with contextlib.suppress(ChasquiError):
                await adding
                confirmed.append(1)
            await running.stop()
        found = Census.take(group.primary.url, queue_name)
        print(f"{len(unknown)} adds of unknown fate")
        assert set(found.stream) <= set(unknown)
        left = Census.take(group.primary.url, unread)
        assert audit(confirmed, [], left, unknown=[1]).faults == {}
    extra = [n for n in set(done) if done.count(n) > 1]
    print(f"{len(extra)} ran again: their acks had not reached the replica")


@pytest.mark.fault(10)
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", QUICK)
async def test_a_replica_that_lags_behind_takes_over_under_load(
    kind: str, queue_name: str, start_at: StartAt
) -> None:
    """It knows nothing of the last adds and acks. What was confirmed to be there is run, and a
    worker that holds entries that never were goes on."""
    durable: list[int] = []
    done: list[int] = []
    tried = 0

    async def handler(job: Job) -> None:
        done.append(job.data["n"])
        await asyncio.sleep(0.01)

    async def produce(queue: Queue, confirmed: list[int]) -> None:
        nonlocal tried
        while True:
            tried += 1
            number = tried
            with contextlib.suppress(ChasquiError):
                await queue.add("n", {"n": number})
                confirmed.append(number)
            await asyncio.sleep(0.005)

    async def grows(numbers: list[int]) -> None:
        enough = len(numbers) + 20

        async def is_enough() -> bool:
            return len(numbers) >= enough

        await until(is_enough, "work goes on")

    with Watched(kind, down_after_ms=1000) as group:
        running = start_at(group.url, handler)
        async with (
            Queue(queue_name, redis_url=group.url) as queue,
            Queue(queue_name, redis_url=group.url, durable="replica") as careful,
        ):
            producers = [
                asyncio.ensure_future(produce(queue, [])),
                asyncio.ensure_future(produce(careful, durable)),
            ]
            try:
                await grows(durable)
                old = group.primary
                replica = next(m for m in group.members if m is not old)
                os.kill(replica.pid, signal.SIGSTOP)
                with redis_py.Redis.from_url(old.url) as client:
                    client.set("more", b"x" * MORE_THAN_A_SOCKET_HOLDS)
                await grows(done)  # which nobody will remember
                old.kill()
                os.kill(replica.pid, signal.SIGCONT)

                async def is_replaced() -> bool:
                    return await asyncio.to_thread(lambda: group.primary) is not old

                await until(is_replaced, "another one is the primary")
                await grows(done)
            finally:
                for producer in producers:
                    producer.cancel()
                await asyncio.wait(producers)

            async def all_done() -> bool:
                return set(durable) <= set(done)

            await until(all_done, "all that was confirmed is done")

            async def is_empty() -> bool:
                found = await asyncio.to_thread(Census.take, group.primary.url, queue_name)
                return found.is_empty

            await until(is_empty, "nothing is left that nobody runs")
            await running.stop()


def lag(kind: str, private_server: Callable[..., Server], queue_name: str, durable: bool) -> None:
    """A replica that is behind takes over: what was confirmed must be there."""
    primary = private_server(kind, repl_diskless_sync_delay="0")
    replica = private_server(kind)
    confirmed = [0]
    with redis_py.Redis.from_url(replica.url) as client:
        client.replicaof("127.0.0.1", primary.port)
        eventually(
            lambda: client.info("replication")["master_link_status"] == "up", "it is in step"
        )
        with redis_py.Redis.from_url(primary.url) as main:
            eventually(lambda: main.wait(1, 100) == 1, "its primary knows that")
        options: dict[str, Any] = {"durable": "replica"} if durable else {}
        with sync.Queue(queue_name, redis_url=primary.url, **options) as queue:
            queue.add("n", {"n": 0})
            client.replicaof("NO", "ONE")
            with contextlib.suppress(ChasquiError):
                queue.add("n", {"n": 1})
                confirmed.append(1)
    primary.kill()
    found = audit(confirmed, [], Census.take(replica.url, queue_name), unknown=[1])
    assert found.faults == {}


@pytest.mark.fault(10)
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_replica_confirmed_survives(
    kind: str,
    private_server: Callable[..., Server],
    queue_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("chasqui.producing.durable.WAIT_MS", 3000)
    lag(kind, private_server, queue_name, durable=True)


@pytest.mark.fault(10, control=True)
@pytest.mark.parametrize("kind", KINDS)
def test_what_it_did_not_confirm_may_be_lost(
    kind: str, private_server: Callable[..., Server], queue_name: str
) -> None:
    with pytest.raises(AssertionError, match="lost"):
        lag(kind, private_server, queue_name, durable=False)


# ── Cluster ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=KINDS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    settings = {"appendonly": "yes", "appendfsync": "always"}
    with Cluster(request.param, cluster_require_full_coverage="no", **settings) as group:
        yield group


@pytest.fixture
async def queue(cluster: Cluster, queue_name: str) -> AsyncIterator[Queue]:
    async with Queue(queue_name, redis_url=cluster.url) as queue:
        yield queue


def stream_of(queue_name: str) -> str:
    return Keys(queue_name).stream.decode()


@pytest.fixture
def reads_alone_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker sees that its slot is elsewhere by its blocked read, not by chance."""
    for period in ("LOOK_S", "SWEEP_S"):
        monkeypatch.setattr(f"chasqui.consuming.takeovers.{period}", 1000.0)


@pytest.mark.fault(12)
@pytest.mark.slow
@pytest.mark.usefixtures("reads_alone_tell")
async def test_a_worker_follows_its_slot(
    cluster: Cluster, queue: Queue, queue_name: str, start_at: StartAt
) -> None:
    await follow(cluster, queue, queue_name, start_at, cluster.move)


@pytest.mark.fault(12)
@pytest.mark.slow
@pytest.mark.usefixtures("reads_alone_tell")
@pytest.mark.parametrize("cluster", ["redis-8.6", "valkey-9"], indirect=True)
async def test_a_worker_follows_a_slot_that_moves_at_once(
    cluster: Cluster, queue: Queue, queue_name: str, start_at: StartAt
) -> None:
    def move(slot: int, source: Server, target: Server) -> None:
        cluster.move_at_once(stream_of(queue_name), source, target)

    await follow(cluster, queue, queue_name, start_at, move)


async def follow(
    cluster: Cluster,
    queue: Queue,
    queue_name: str,
    start_at: StartAt,
    move: Callable[[int, Server, Server], None],
) -> None:
    """A slot goes three times to where the scripts are not known."""
    stream = stream_of(queue_name)
    running = start_at(cluster.url, fine, read_block_ms=2000)
    done = 0
    for _ in range(3):
        await queue.add("n", 1)
        await queue.add("n", 2, delay_ms=1)
        done += 2
        await running.completed(done)
        source = cluster.owner(stream)
        target = next(member for member in cluster.members if member is not source)
        ask(target.port, "SCRIPT FLUSH")
        await asyncio.to_thread(move, cluster.slot(stream), source, target)
    await queue.add("n", 3)
    await running.completed(done + 1)


@pytest.mark.fault(12, control=True)
@pytest.mark.slow
@pytest.mark.parametrize("code", ["MOVED", "ASK"])
async def test_without_following_an_add_fails(
    code: str, cluster: Cluster, queue: Queue, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_of(queue_name)
    await queue.is_paused()
    source = cluster.owner(stream)
    target = next(member for member in cluster.members if member is not source)
    slot = cluster.slot(stream)
    monkeypatch.delitem(server._MEANINGS, code)
    await asyncio.to_thread(cluster.start_move, slot, source, target)
    if code == "MOVED":
        await asyncio.to_thread(cluster.finish_move, slot, source, target)
    try:
        with pytest.raises(ServerError, match=code):
            await queue.add("n", 1)
    finally:
        await asyncio.to_thread(cluster.finish_move, slot, source, target)


@pytest.mark.fault(13)
@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_node_that_is_lost_and_comes_back(
    cluster: Cluster, queue: Queue, queue_name: str, start_at: StartAt
) -> None:
    """Queues of other nodes do not notice."""
    lost = cluster.owner(stream_of(queue_name))
    neighbour = next(
        name
        for name in (f"{queue_name}-{i}" for i in range(1000))
        if cluster.owner(stream_of(name)) is not lost
    )
    running = start_at(cluster.url, fine)
    await queue.add("n", 0)
    await running.completed(1)
    async with Queue(neighbour, redis_url=cluster.url) as other:
        await other.add("n", 0)
        await asyncio.to_thread(lost.kill)
        try:
            adding = asyncio.ensure_future(queue.add("n", 1))
            for n in range(50):
                await other.add("n", n)
        finally:  # other tests use the cluster too
            await asyncio.to_thread(lost.start)
            await asyncio.to_thread(cluster.wait_until_whole)
        await adding
    await running.completed(2)


@pytest.mark.fault(13, control=True)
@pytest.mark.slow
async def test_without_waiting_a_slot_without_a_node_fails_adds(
    cluster: Cluster, queue: Queue, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_of(queue_name)
    await queue.is_paused()
    slot, owner = cluster.slot(stream), cluster.owner(stream)
    monkeypatch.delitem(server._MEANINGS, "CLUSTERDOWN")
    ask(owner.port, f"CLUSTER DELSLOTS {slot}")
    try:
        with pytest.raises(ServerError, match="CLUSTERDOWN"):
            await queue.add("n", 1)
    finally:
        ask(owner.port, f"CLUSTER ADDSLOTS {slot}")
        await asyncio.to_thread(cluster.wait_until_whole)


@pytest.mark.fault(13)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_that_outlives_its_primary_confirms_nothing_that_is_lost(
    kind: str, queue_name: str
) -> None:
    """A job reaches a primary that is none any more and does not know it yet; what only that one
    had is gone when it does, and then it is primary again."""
    with Cluster(
        kind, replicas=1, cluster_node_timeout="3000", repl_diskless_sync_delay="0"
    ) as group:
        old = group.owner(stream_of(queue_name))
        new = group.members[group.members.index(old) + 3]
        with sync.Queue(queue_name, redis_url=group.url, durable="replica") as queue:
            queue.add("n", {"n": 0})
            os.kill(old.pid, signal.SIGSTOP)
            try:
                adding = threading.Thread(target=queue.add, args=("n", {"n": 1}))
                adding.start()
                eventually(lambda: is_primary(new), "the replica takes over")
            finally:
                os.kill(old.pid, signal.SIGCONT)
            eventually(lambda: not is_primary(old), "the old primary knows it")
            group.wait_until_whole()
            group.fail_over(old)
            adding.join()
        assert Census.take(old.url, queue_name).stream == [0, 1]
