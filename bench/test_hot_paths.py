"""What every job goes through, timed one by one: `make bench-check`.

The names are those of bench/baseline.json.
"""

import asyncio

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.contests import COUNT, KEY, NOW_MS, PAYLOAD, RESP3, fields_ours
from bench.player import ONE, Player
from chasqui import Job, Queue, Worker
from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import xackdel, xadd_run_event
from chasqui._core.entry import EntryBuilder
from chasqui._core.envelope import decode_envelope, encode_envelope
from chasqui._core.reply import ReplyReader
from chasqui.model.keys import Keys
from chasqui.producing import job_options
from chasqui.producing.operations import QueueOperations
from chasqui.producing.settings import PLAIN
from chasqui.transport.request import Request

DATA = {"to": "user@example.com", "n": 123}
JOBS = [{"name": "welcome", "data": DATA} for _ in range(COUNT)]
DISPATCHED = 10_000


def entries() -> list:
    reader = ReplyReader()
    reader.feed(RESP3)
    return reader.read(EntryBuilder("streams"))


def fresh_reply(start: int) -> bytes:
    """XREADGROUP's answer of COUNT jobs that nobody had before."""
    rows = []
    for i in range(start, start + COUNT):
        id, job = b"1794797194831-%d" % i, encode_envelope(f"{i:026d}", PAYLOAD, NOW_MS, 0)
        head = b"*4\r\n$%d\r\n%b\r\n*4\r\n$1\r\nd\r\n" % (len(id), id)
        body = b"$%d\r\n%b\r\n$1\r\nn\r\n$7\r\nwelcome\r\n:0\r\n:0\r\n" % (len(job), job)
        rows.append(head + body)
    return b"%%1\r\n$%d\r\n%b\r\n*%d\r\n" % (len(KEY), KEY, COUNT) + b"".join(rows)


def calibrate() -> int:
    """A fixed mix of what the interpreter does, to measure the machine with."""
    table: dict[str, int] = {}
    parts: list[bytes] = []
    for i in range(20_000):
        key = f"key-{i & 255}"
        table[key] = table.get(key, 0) + len(key)
        parts.append(key.encode())
        if not i & 1023:
            parts = [b"".join(parts)[:64]]
    return sum(table.values())


@pytest.mark.parametrize("turn", ["first", "last"])
def test_calibration(turn: str, benchmark: BenchmarkFixture):
    assert benchmark(calibrate) > 0


def test_encode_bulk(benchmark: BenchmarkFixture):
    operations = QueueOperations(Keys("bench"), None)

    def encode() -> int:
        asked = next(operations.add(job_options.many(JOBS, 0), PLAIN))
        requests = [asked] if isinstance(asked, Request) else list(asked)
        return sum(len(request.frame) for request in requests)

    assert benchmark(encode) > COUNT * len(PAYLOAD)


def test_parse_replies(benchmark: BenchmarkFixture):
    assert len(benchmark(fields_ours(RESP3))) == COUNT


def test_envelope(benchmark: BenchmarkFixture):
    id = "01KA5P6Y7Z8A9B0C1D2E3F4G5H"

    def there_and_back() -> str:
        for _ in range(COUNT):
            envelope = decode_envelope(encode_envelope(id, PAYLOAD, NOW_MS, 0))
        return envelope.id

    assert benchmark(there_and_back) == id


def test_build_acks(benchmark: BenchmarkFixture):
    ids, buffer = [entry.id for entry in entries()], CommandBuffer()

    def build() -> int:
        for _ in range(100):
            buffer.clear()
            xackdel(buffer, KEY, b"default", ids)
        return len(buffer)

    assert benchmark(build) > COUNT * 10


def test_build_events(benchmark: BenchmarkFixture):
    runs, buffer = entries(), CommandBuffer()

    def build() -> int:
        buffer.clear()
        for entry in runs:
            xadd_run_event(buffer, KEY, b"completed", entry, NOW_MS, 1, 250)
        return len(buffer)

    assert benchmark(build) > COUNT * 50


def test_dispatch(benchmark: BenchmarkFixture):
    """10k jobs that do nothing, from the socket to the acknowledgement."""
    replies = [fresh_reply(start) for start in range(0, DISPATCHED, COUNT)]

    async def run() -> int:
        seen, done = 0, asyncio.Event()

        async def handler(job: Job) -> None:
            nonlocal seen
            seen += 1
            if seen == DISPATCHED:
                done.set()

        with Player(replies) as player:
            worker = Worker(
                "bench", handler, redis_url=player.url, events_enabled=False,
                delayed_enabled=False, run_scheduler=False,
            )  # fmt: skip
            running = asyncio.ensure_future(worker.run())
            await done.wait()
            await worker.close()
            await running
        return seen

    assert benchmark(lambda: asyncio.run(run())) == DISPATCHED


def test_add(benchmark: BenchmarkFixture):
    """10k adds by 100 tasks at once."""

    async def run() -> int:
        added = 0
        with Player(script_reply=ONE) as player:
            async with Queue("bench", redis_url=player.url) as queue:

                async def one() -> None:
                    nonlocal added
                    for _ in range(100):
                        await queue.add("welcome", DATA)
                        added += 1

                await asyncio.gather(*(one() for _ in range(100)))
        return added

    assert benchmark(lambda: asyncio.run(run())) == 10_000
