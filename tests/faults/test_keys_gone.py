"""Streams and groups that vanish under a worker: begun anew at 0, with what has arrived since."""

import asyncio
from collections.abc import Callable

import pytest
import redis as redis_py

from chasqui import Job
from chasqui.consuming.reader import Reader
from chasqui.model.keys import DEFAULT_GROUP, ENVELOPE, Keys
from chasqui.transport.request import Effect, commands
from tests.consuming.conftest import Running, envelope
from tests.proxy import Proxy
from tests.servers import KINDS, Server

StartAt = Callable[..., Running]

#: What happens, and a job that arrives before any worker can have noticed.
ADD = "redis.call('XADD', KEYS[1], '*', 'd', ARGV[1])"
HARMS = {
    "evicted": f"redis.call('DEL', KEYS[1]) {ADD}",
    "flushed": f"redis.call('FLUSHALL') {ADD}",
    "destroyed": f"{ADD} redis.call('XGROUP', 'DESTROY', KEYS[1], ARGV[2])",
}


async def fine(job: Job) -> None:
    pass


async def lose(
    harm: str, server: Server, proxy: Proxy, queue_name: str, start_at: StartAt, limit_s: float
) -> None:
    """A worker has run one job and waits for more; the next must run all the same."""
    keys = Keys(queue_name)
    one, other = (envelope(n, job_id=str(n)) for n in range(2))
    with redis_py.Redis.from_url(server.url) as client:
        running = start_at(proxy.url, fine)
        client.xadd(keys.stream, {ENVELOPE: one})
        await running.completed(1)
        if harm == "emptied":
            proxy.is_refusing = True
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            client.xadd(keys.stream, {ENVELOPE: other})
            proxy.is_refusing = False
        else:
            client.eval(HARMS[harm], 1, keys.stream, other, DEFAULT_GROUP)
        async with asyncio.timeout(limit_s):
            await running.completed(2)


CASES = [
    pytest.param("emptied", marks=pytest.mark.fault(9)),
    pytest.param("evicted", marks=pytest.mark.fault(22)),
    pytest.param("flushed", marks=pytest.mark.fault(24)),
    pytest.param("destroyed", marks=pytest.mark.fault(25)),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", CASES)
async def test_the_group_is_made_again_at_the_start(
    kind: str,
    harm: str,
    private_server: Callable[..., Server],
    make_proxy: Callable[[str], Proxy],
    queue_name: str,
    start_at: StartAt,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = private_server(kind)
    await lose(harm, server, make_proxy(server.url), queue_name, start_at, 20)
    assert len(caplog.records) < 10, "said, but not in a storm"


@pytest.mark.fault(9, control=True)
@pytest.mark.fault(22, control=True)
@pytest.mark.fault(24, control=True)
@pytest.mark.fault(25, control=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", ["emptied", *HARMS])
async def test_made_again_at_the_end_it_passes_over_jobs(
    kind: str,
    harm: str,
    private_server: Callable[..., Server],
    make_proxy: Callable[[str], Proxy],
    queue_name: str,
    start_at: StartAt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create = Reader.join
    times = 0

    async def create_at_the_end(reader: Reader) -> None:
        nonlocal times
        times += 1
        if times > 1:
            group = (reader._keys.stream, reader._group)
            made = commands(("XGROUP", "CREATE", *group, "$", "MKSTREAM"), effect=Effect.IDEMPOTENT)
            await reader._connection.submit(made)
        await create(reader)

    monkeypatch.setattr(Reader, "join", create_at_the_end)
    server = private_server(kind)
    with pytest.raises(TimeoutError):
        await lose(harm, server, make_proxy(server.url), queue_name, start_at, 4)
    assert times > 1
