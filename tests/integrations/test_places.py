"""Whether jobs have ended, by where they are."""

import asyncio

import pytest

from chasqui import Job, Queue, UnrecoverableError, Worker
from chasqui._core.envelope import encode_envelope
from chasqui.integrations.places import Standing, standing
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.model.payload import encode
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect
from tests.servers import Server


@pytest.mark.parametrize("job_id", [None, "mine"])
async def test_a_job_is_followed_from_place_to_place(
    server: Server, queue_name: str, job_id: str | None
) -> None:
    keys = Keys(queue_name)

    def look(*job_ids: str) -> Standing:
        connection = BlockingConnection(
            Endpoint.parse(server.url), key=keys.stream, client_name="test"
        )
        try:
            return connection.run(standing(keys, job_ids))
        finally:
            connection.close()

    assert look() == Standing()
    runs = asyncio.Event(), asyncio.Event()
    goes_on = asyncio.Event()

    async def handle(job: Job) -> None:
        if job.data == "later":
            runs[0].set()
            await goes_on.wait()
        else:
            runs[1].set()
            raise UnrecoverableError("no")

    async with Queue(queue_name, redis_url=server.url) as queue:
        later = await queue.add("n", "later", job_id=job_id, delay_ms=3_600_000)
        assert look(later.id).left == later.id, "delayed"
        await queue.reschedule(later.id, delay_ms=1)
        worker = Worker(queue_name, handle, redis_url=server.url, events_enabled=False)
        running = asyncio.ensure_future(worker.run())
        await asyncio.wait_for(runs[0].wait(), 20)
        assert look(later.id).left == later.id, "running"
        bad = await queue.add("n", "bad", job_id=job_id and "bad")
        await asyncio.wait_for(runs[1].wait(), 20)
        goes_on.set()
        await worker.close()
        await running
        assert look(later.id) == Standing(), "done"
        dead = look(later.id, bad.id).dead
        assert dead is not None
        assert (dead.job_id, dead.reason) == (bad.id, "unrecoverable")
    assert look(later.id, "other").dead is None
    assert look(later.id, "other").unknown == "other"


def test_a_job_is_found_though_its_producers_clock_was_ahead(
    server: Server, queue_name: str
) -> None:
    keys, ahead = Keys(queue_name), "7ZZZZZZZZZ0000000000000000"  # a ULID of the year 10889
    connection = BlockingConnection(Endpoint.parse(server.url), key=keys.stream, client_name="test")
    try:
        job = encode_envelope(ahead, encode(None), 0, 0)
        connection.execute("XADD", keys.stream, "*", "d", job, effect=Effect.ONCE)
        assert connection.run(standing(keys, [ahead])).left == ahead
    finally:
        connection.close()
