"""What a server is set to and could lose jobs by: said in the log, before it happens."""

import logging
from collections.abc import Callable

import pytest

from chasqui import Queue
from chasqui.transport import server
from tests.consuming.conftest import Redis, Running
from tests.servers import KINDS, Server

StartAt = Callable[..., Running]
EVICTS = "it may drop jobs"
EARLY = "may confirm durable adds"


async def fine(job: object) -> None:
    pass


@pytest.mark.fault(22)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["allkeys-lru", "noeviction"])
async def test_a_server_that_evicts_is_told_of(
    kind: str,
    policy: str,
    private_server: Callable[..., Server],
    queue_name: str,
    start_at: StartAt,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not of one that refuses instead: else nobody would listen."""
    private = private_server(kind, maxmemory_policy=policy)
    async with Queue(queue_name, redis_url=private.url) as queue:
        running = start_at(private.url, fine)
        await queue.add("n", 1)
        await running.completed(1)
    assert (EVICTS in caplog.text) == (policy != "noeviction")


@pytest.mark.fault(22)
@pytest.mark.parametrize("kind", KINDS)
async def test_an_evicted_queue_begins_anew(
    kind: str,
    private_server: Callable[..., Server],
    queue_name: str,
    start_at: StartAt,
    redis_at: Callable[[str], Redis],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server makes room by dropping the queue under a worker that waits for it."""
    caplog.set_level(logging.INFO, "chasqui")
    private = private_server(kind, maxmemory_policy="allkeys-random")
    redis = redis_at(private.url)
    async with Queue(queue_name, redis_url=private.url) as queue:
        running = start_at(private.url, fine)
        await queue.add("n", 1)
        await running.completed(1)
        told = caplog.text.count("created")
        await redis("CONFIG", "SET", "maxmemory", 1)
        while await redis("DBSIZE"):
            await redis("CONFIG", "SET", "maxmemory", 1)  # each time it evicts some
        await redis("CONFIG", "SET", "maxmemory", 0)
        await queue.add("n", 2)
        await running.completed(2)
    assert caplog.text.count("created") > told, "that the group was gone can be seen"


@pytest.mark.fault(7)
@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9"])
async def test_a_server_that_confirms_too_early_is_told_of(
    kind: str,
    private_server: Callable[..., Server],
    queue_name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_warned_of_disk", set())
    private = private_server(kind, appendonly="yes", appendfsync="everysec")
    for _ in range(2):
        async with Queue(queue_name, redis_url=private.url, durable="disk") as queue:
            await queue.add("n", 1)
    assert caplog.text.count(EARLY) == (kind == "valkey-9")
