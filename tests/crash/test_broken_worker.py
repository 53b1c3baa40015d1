"""Controls: workers and books that are broken on purpose, which the audit must catch."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from chasqui import Queue
from chasqui._core.entry import EntryBuilder
from chasqui._core.envelope import encode_delayed_member
from chasqui.consuming.moves import Move, bury
from chasqui.model.config import Endpoint
from chasqui.model.keys import DEFAULT_GROUP, ENVELOPE
from chasqui.scripts.settling import Consumer
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect, commands
from tests.crash.broken import BrokenWorker
from tests.ledger import Census, audit
from tests.servers import KINDS, Server


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, shared_server: Callable[[str], Server]) -> Server:
    """Each kind of server on this machine in turn."""
    return shared_server(request.param)


@pytest.fixture
def broken(server: Server, queue_name: str, tmp_path: Path) -> BrokenWorker:
    async def add() -> None:
        async with Queue(queue_name, redis_url=server.url) as queue:
            await queue.add_bulk([{"name": "quick", "data": {"n": n}} for n in range(5)])

    asyncio.run(add())
    return BrokenWorker(server.url, queue_name, tmp_path, "broken")


@pytest.fixture
def url(server: Server) -> str:
    return server.url


def faults(broken: BrokenWorker, url: str) -> dict[str, set[int]]:
    census = Census.take(url, broken.keys.queue)
    return audit(range(5), broken.ledger.read(), census).faults


def test_a_sound_one_passes(broken: BrokenWorker, url: str) -> None:
    for entry_id, envelope in broken.take():
        broken.run(envelope)
        broken.ack(entry_id)
    assert faults(broken, url) == {}


@pytest.mark.fault(1, control=True)
def test_it_acknowledges_before_the_run_and_dies(broken: BrokenWorker, url: str) -> None:
    entries = broken.take()
    broken.ack(*(entry_id for entry_id, _ in entries))
    for _, envelope in entries[:2]:
        broken.run(envelope)
    assert faults(broken, url) == {"lost": {2, 3, 4}}


def test_it_adds_the_retry_and_dies_before_the_ack(broken: BrokenWorker, url: str) -> None:
    (_, envelope), *_ = broken.take()
    broken.client.zadd(broken.keys.delayed, {encode_delayed_member("quick", envelope): 1})
    assert faults(broken, url) == {"doubled": {0}}


def test_a_zombie_buries_without_a_fence(broken: BrokenWorker, url: str, tmp_path: Path) -> None:
    """The same steps through the fenced script are refused: that is what the fence is for."""
    entries = broken.take()
    heir = BrokenWorker(url, broken.keys.queue, tmp_path, "heir")
    heir.client.xclaim(
        broken.keys.stream, DEFAULT_GROUP, "heir", 0, [entry_id for entry_id, _ in entries]
    )
    for entry_id, envelope in entries:
        heir.run(envelope)
        heir.ack(entry_id)
    (entry_id, envelope), *_ = entries
    connection = BlockingConnection(Endpoint.parse(url), key=broken.keys.stream, client_name="t")
    builder = EntryBuilder("range")
    copy = commands(("XRANGE", broken.keys.dlq, "-", "+"), effect=Effect.READ, builder=builder)
    broken.client.xadd(broken.keys.dlq, {ENVELOPE: envelope}, id=entry_id)
    (entry,) = connection.call(copy)
    broken.client.delete(broken.keys.dlq)
    move = Move(entry, 1, attempt=1, reason="unrecoverable")
    request = bury(Consumer(broken.keys, DEFAULT_GROUP, "broken"), [move], events=True)
    fenced = connection.call(request)
    connection.close()
    assert fenced == b"0"
    assert faults(broken, url) == {}

    broken.client.xadd(broken.keys.dlq, {ENVELOPE: envelope})
    broken.ack(entry_id)
    assert faults(broken, url) == {"contradictory": {0}}


def test_two_run_the_same_job_at_once(broken: BrokenWorker, url: str) -> None:
    broken.ledger.write("start", 0, "broken")
    broken.ledger.write("start", 0, "heir")
    broken.ledger.write("end", 0, "broken")
    broken.ledger.write("start", 1, "killed")
    broken.ledger.write("dead", -1, "killed")
    broken.ledger.write("start", 1, "heir")
    found = audit(range(5), broken.ledger.read(), Census.take(url, broken.keys.queue))
    assert found.overlapping == {0}
    assert found.extra == {0: 1, 1: 1}


def test_a_job_that_nobody_added(broken: BrokenWorker, url: str) -> None:
    broken.ledger.write("start", 99, "broken")
    assert faults(broken, url) == {"unexpected": {99}}


def test_it_takes_its_consumer_along(broken: BrokenWorker, url: str) -> None:
    broken.take(2)
    broken.leave()
    assert faults(broken, url) == {"stuck": {0, 1}}
