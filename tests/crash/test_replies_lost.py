"""Commands whose reply is lost, or that never arrive: done once, however often they are sent."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from chasqui import Queue, Worker
from chasqui.scripts import settling
from tests.crash.conftest import eventually
from tests.crash.workers import Runs
from tests.ledger import Census, Ledger, audit
from tests.proxy import Fault, Proxy
from tests.servers import Server

#: A job of each name leaves the stream in its own way.
NAMES = ("quick", "fail", "bury")


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.url) as proxy:
        yield proxy


@pytest.mark.fault(16)
@pytest.mark.parametrize("fault", [Fault.CUT_AFTER, Fault.CUT_BEFORE], ids=["after", "before"])
@pytest.mark.parametrize("what", ["ack", "complete", "retry", "bury"])
async def test_what_the_server_did_is_not_done_twice(
    server: Server,
    proxy: Proxy,
    queue_name: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    what: str,
    fault: Fault,
) -> None:
    stores = what == "complete"
    worker = Worker(
        queue_name,
        Runs(tmp_path, "worker").handlers(),
        redis_url=proxy.url,
        events_enabled=False,
        delayed_enabled=False,
        run_scheduler=False,
        store_results=stores,
    )
    async with Queue(queue_name, redis_url=server.url) as queue, worker:
        running = asyncio.ensure_future(worker.run())
        # Each has happened once, so that no script is unknown when the fault comes.
        await queue.add_bulk([{"name": name, "data": {"n": n}} for n, name in enumerate(NAMES)])
        await at_rest(server.url, queue_name, delayed=1, dlq=1)

        links = proxy.accepted
        if what == "ack" and proxy.count("XACKDEL"):
            proxy.fail(fault, "XACKDEL")
        else:
            proxy.fail(fault, "EVALSHA", holding=getattr(settling, what.upper()).sha)
        name = {"retry": "fail", "bury": "bury"}.get(what, "quick")
        job = await queue.add(name, {"n": 3}, attempts=3, backoff=60_000)
        await asyncio.to_thread(proxy.wait_for, lambda: proxy.accepted > links)
        await at_rest(
            server.url, queue_name, delayed=1 + (what == "retry"), dlq=1 + (what == "bury")
        )
        assert await queue.get_job_result(job.id) == (3 if stores else None)
        await worker.close()
        await running
    found = audit(range(4), Ledger(tmp_path).read(), Census.take(server.url, queue_name))
    assert found.faults == {}
    assert found.extra_runs == 0
    assert "taken over" not in caplog.text, "nobody else was there"


async def at_rest(url: str, queue_name: str, *, delayed: int, dlq: int) -> None:
    """Return when nothing is in the stream and so much is elsewhere; fails if it is ever more."""

    def is_so() -> bool:
        census = Census.take(url, queue_name)
        assert len(census.delayed) <= delayed
        assert len(census.dlq) <= dlq
        return not census.stream and (len(census.delayed), len(census.dlq)) == (delayed, dlq)

    await asyncio.to_thread(eventually, is_so, f"{delayed} delayed, {dlq} dead")
