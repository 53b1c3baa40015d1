"""A queue consumed as a stream: every job processed, none left pending, none acked unseen."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from chasqui import Job, NotSupportedError, Worker
from chasqui._core.envelope import encode_envelope
from chasqui.spark.consuming.query_lease import ConsumerTakenError
from chasqui.spark.reading.shaping import CorruptEntryError
from chasqui.sync import Queue
from tests.servers import Server
from tests.spark.direct import Redis, consume_reader, rows_between, step


def fill(url: str, queue: str, count: int) -> list[str]:
    with Queue(queue, redis_url=url) as producer:
        jobs = producer.add_bulk([{"name": "mail", "data": i} for i in range(count)])
    return [job.id for job in jobs]


def pending(redis: Redis) -> int:
    count: int = redis("XPENDING", redis.keys.stream, "default")[0]
    return count


def deliveries(redis: Redis) -> set[int]:
    """How often jobs were delivered, by the server's own count."""
    rows = redis("XPENDING", redis.keys.stream, "default", "-", "+", 10_000)
    return {row[3] for row in rows}


def ids(rows: list[dict[str, object]]) -> list[object]:
    return [row["job_id"] for row in rows]


def test_jobs_are_acked_when_the_next_offset_is_asked_for(each_server: Server, queue_name: str):
    url, redis = each_server.url, Redis(each_server.url, queue_name)
    expected = fill(url, queue_name, 2500)
    reader = consume_reader(url, queue_name)
    start = reader.initialOffset()
    assert start == {"seq": 0} == reader.initialOffset()
    one, rows = step(reader, start, 1500)
    assert ids(rows) == expected[:1500]
    assert {row["consumer"] for row in rows} == {"spark:etl:1"}
    assert pending(redis) == 1500
    assert ids(rows_between(reader, start, one)) == expected[:1500], "a task may read again"
    two, rows = step(reader, one, 1500)
    assert ids(rows) == expected[1500:]
    assert (redis("XLEN", redis.keys.stream), pending(redis)) == (1000, 1000)
    idle, rows = step(reader, two, 1500)
    assert (idle, rows) == (two, [])
    assert (redis("XLEN", redis.keys.stream), pending(redis)) == (0, 0)
    assert reader.partitions(two, two) == []


def test_a_batch_costs_one_delivery_however_often_it_is_computed(
    each_server: Server, queue_name: str
):
    redis = Redis(each_server.url, queue_name)
    expected = fill(each_server.url, queue_name, 700)
    reader = consume_reader(each_server.url, queue_name, fetchCount=100)
    start = reader.initialOffset()
    end, rows = step(reader, start)
    for _ in range(4):
        rows = rows_between(reader, start, end)
        assert ids(rows) == expected
    assert deliveries(redis) == {1}
    assert {row["deliveries"] for row in rows} == {1}
    reader.stop()
    again = consume_reader(each_server.url, queue_name)
    assert ids(rows_between(again, start, end)) == expected
    assert max(deliveries(redis)) <= 2


def test_a_driver_that_died_before_the_offset_log_has_its_claim_resumed(
    each_server: Server, queue_name: str
):
    expected = fill(each_server.url, queue_name, 1000)
    dead = consume_reader(each_server.url, queue_name)
    start = dead.initialOffset()
    end, _ = step(dead, start, 600)
    dead.stop()  # the offset log was never written: Spark starts from the same place
    reader = consume_reader(each_server.url, queue_name)
    again, rows = step(reader, start, 600)
    assert again == end
    assert ids(rows) == expected[:600]


def test_a_batch_that_was_logged_but_not_committed_is_read_again_and_not_acked(
    each_server: Server, queue_name: str
):
    redis = Redis(each_server.url, queue_name)
    expected = fill(each_server.url, queue_name, 300)
    dead = consume_reader(each_server.url, queue_name)
    start = dead.initialOffset()
    end, _ = step(dead, start, 300)
    dead.stop()
    reader = consume_reader(each_server.url, queue_name)
    assert ids(rows_between(reader, start, end)) == expected
    assert pending(redis) == 300
    reader.commit(end)
    assert (redis("XLEN", redis.keys.stream), pending(redis)) == (0, 0)


def test_a_lost_checkpoint_begins_with_what_was_left(each_server: Server, queue_name: str):
    expected = fill(each_server.url, queue_name, 90)
    dead = consume_reader(each_server.url, queue_name)
    place = dead.initialOffset()
    for _ in range(3):
        place, _ = step(dead, place, 30)
    dead.stop()  # batches 1 and 2 are acked, 3 is not
    reader = consume_reader(each_server.url, queue_name)
    place = reader.initialOffset()
    assert place == {"seq": 2}
    place, rows = step(reader, place)
    assert ids(rows) == expected[60:]


def test_a_second_group_is_refused(redis_86: Server, queue_name: str):
    url, redis = redis_86.url, Redis(redis_86.url, queue_name)
    expected = fill(url, queue_name, 2)
    redis("XGROUP", "CREATE", redis.keys.stream, "workers", "0")
    with pytest.raises(NotSupportedError, match="has the group 'workers'"):
        consume_reader(url, queue_name).initialOffset()
    reader = consume_reader(url, queue_name, group="workers")
    _, rows = step(reader, reader.initialOffset(), 10)
    assert ids(rows) == expected


def test_one_name_is_held_by_one_query(each_server: Server, queue_name: str):
    fill(each_server.url, queue_name, 10)
    first = consume_reader(each_server.url, queue_name)
    first.initialOffset()
    second = consume_reader(each_server.url, queue_name)
    with pytest.raises(ConsumerTakenError, match="another query consumes queue"):
        second.initialOffset()
    other = consume_reader(each_server.url, queue_name, consumer="other")
    assert other.initialOffset() == {"seq": 0}
    first.stop()
    assert second.initialOffset() == {"seq": 0}


def test_jobs_of_a_batch_are_renewed_while_the_driver_lives(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    fill(each_server.url, queue_name, 1500)
    reader = consume_reader(each_server.url, queue_name, consumerLease="1s")
    step(reader, reader.initialOffset())
    words = ("XPENDING", redis.keys.stream, "default", "-", "+", 2000)
    deliveries = {row[3] for row in redis(*words)}
    redis("XCLAIM", redis.keys.stream, "default", "spark:etl:1", 0,
          redis(*words)[0][0], "IDLE", 60_000, "JUSTID")  # fmt: skip
    batches = reader._open_batches()
    for _ in range(200):
        if max(row[2] for row in redis(*words)) < 30_000:
            break
        batches._stopping.wait(0.02)
    assert max(row[2] for row in redis(*words)) < 30_000
    assert {row[3] for row in redis(*words)} == deliveries, "a renewal is no delivery"


def test_a_batch_that_is_computed_again_after_a_restart_is_renewed(
    each_server: Server, queue_name: str
):
    redis = Redis(each_server.url, queue_name)
    fill(each_server.url, queue_name, 600)
    dead = consume_reader(each_server.url, queue_name)
    start = dead.initialOffset()
    end, _ = step(dead, start)
    dead.stop()
    words = ("XPENDING", redis.keys.stream, "default", "-", "+", 1000)
    held = [row[0] for row in redis(*words)]
    redis("XCLAIM", redis.keys.stream, "default", "spark:etl:1", 0, *held, "IDLE", 29_000,
          "JUSTID")  # fmt: skip
    reader = consume_reader(each_server.url, queue_name)
    assert reader.partitions(start, end)
    assert max(row[2] for row in redis(*words)) < 29_000


def test_what_a_worker_has_reclaimed_is_neither_read_nor_acked(
    each_server: Server, queue_name: str
):
    redis = Redis(each_server.url, queue_name)
    expected = fill(each_server.url, queue_name, 20)
    reader = consume_reader(each_server.url, queue_name)
    start = reader.initialOffset()
    end, _ = step(reader, start)
    rows = redis("XPENDING", redis.keys.stream, "default", "-", "+", 5)
    redis("XCLAIM", redis.keys.stream, "default", "worker", 0, *(row[0] for row in rows))
    assert ids(rows_between(reader, start, end)) == expected[5:]
    reader.commit(end)
    assert pending(redis) == 5
    assert redis("XLEN", redis.keys.stream) == 5


def test_workers_run_the_jobs_of_a_driver_that_died(each_server: Server, queue_name: str):
    """Its batch was computed five times, and all of its jobs have deliveries left."""
    redis = Redis(each_server.url, queue_name)
    with Queue(queue_name, redis_url=each_server.url) as producer:
        producer.add_bulk([{"name": "m", "data": n, "attempts": 3} for n in range(300)])
    dead = consume_reader(each_server.url, queue_name)
    start = dead.initialOffset()
    end, _ = step(dead, start)
    for _ in range(4):
        rows_between(dead, start, end)
    dead.stop()
    ran = set[int]()

    async def run() -> None:
        all_ran = asyncio.Event()

        async def handler(job: Job) -> None:
            ran.add(job.data)
            if len(ran) == 300:
                all_ran.set()

        worker = Worker(queue_name, handler, redis_url=each_server.url, claim_min_idle_ms=300)
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(30), worker:
            await all_ran.wait()
        await running

    asyncio.run(run())
    assert (len(ran), redis("XLEN", redis.keys.dlq)) == (300, 0)
    assert (redis("XLEN", redis.keys.stream), pending(redis)) == (0, 0)


def test_what_others_hold_fails_no_query(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    expected = fill(each_server.url, queue_name, 3)
    broken = redis("XADD", redis.keys.stream, "*", "d", b"\x93garbage")
    expected += fill(each_server.url, queue_name, 3)
    reader = consume_reader(each_server.url, queue_name, parseMode="FAILFAST")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    with pytest.raises(CorruptEntryError, match=broken.decode()):
        rows_between(reader, start, end)
    redis("XCLAIM", redis.keys.stream, "default", "worker", 0, broken)
    assert ids(rows_between(reader, start, end)) == expected


def test_a_paused_queue_gives_nothing(each_server: Server, queue_name: str):
    fill(each_server.url, queue_name, 20)
    with Queue(queue_name, redis_url=each_server.url) as queue:
        queue.pause()
        reader = consume_reader(each_server.url, queue_name)
        start = reader.initialOffset()
        assert step(reader, start) == (start, [])
        queue.resume()
    assert len(step(reader, start)[1]) == 20


def test_available_now_takes_what_was_there_and_ends(each_server: Server, queue_name: str):
    fill(each_server.url, queue_name, 100)
    reader = consume_reader(each_server.url, queue_name)
    place = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    fill(each_server.url, queue_name, 50)
    seen = 0
    while True:
        end, rows = step(reader, place, 40)
        if end == place:
            break
        place, seen = end, seen + len(rows)
    assert seen == 100


# ── Drivers that die ────────────────────────────────────────────────────────────────────────────


@pytest.mark.timeout(240)
def test_a_driver_killed_at_any_step_leaves_nothing_undone(
    redis_86: Server, valkey_9: Server, queue_name: str, tmp_path: Path
):
    """Every job is processed once, none is left pending, none acked that was not processed."""
    command = [sys.executable, "-m", "tests.spark.engine"]
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as engines:
        assert engines.stdin is not None
        assert engines.stdout is not None

        def engine(server: Server, queue: str, folder: Path, last: int) -> str:
            print(server.url, queue, folder, last, file=engines.stdin, flush=True)
            return engines.stdout.readline().strip()

        last, answer = 0, "killed"
        while answer == "killed":
            last += 1
            server = (redis_86, valkey_9)[last % 2]
            queue, folder = f"{queue_name}-{last}", tmp_path / str(last)
            redis = Redis(server.url, queue)
            expected: list[object] = [*fill(server.url, queue, 60), None]
            redis("XADD", redis.keys.stream, "*", "d", b"\x93garbage")
            expected += fill(server.url, queue, 39)
            answer = engine(server, queue, folder, last)
            assert deliveries(redis) <= {1, 2}, last
            redis("DEL", redis.keys.spark("consume:etl"))  # the dead one's lease ran out
            assert engine(server, queue, folder, 0).isdigit()
            sunk = [
                job_id
                for file in sorted((folder / "sink").iterdir())
                for job_id in json.loads(file.read_text())
            ]
            assert sunk == expected, last
            assert (redis("XLEN", redis.keys.stream), pending(redis)) == (0, 0), last
            assert redis("XLEN", redis.keys.dlq) == 1, last
            lease, driver = redis.keys.spark("consume:etl"), redis.keys.spark("consume:etl:driver")
            assert redis.spark_keys() in ([driver], [lease, driver]), last
            redis.connection.close()
        assert last > 50, "requests and files of three batches"
        engines.stdin.close()


# ── Events ──────────────────────────────────────────────────────────────────────────────────────


def events(redis: Redis) -> list[dict[bytes, bytes]]:
    entries = redis("XRANGE", redis.keys.events, "-", "+")
    return [dict(zip(flat[::2], flat[1::2], strict=True)) for _, flat in entries]


def test_consumed_jobs_write_the_events_of_a_worker(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    with Queue(queue_name, redis_url=each_server.url) as producer:
        own = ["a", "b" * 60, "c" * 256]  # each with its own kind of length before it
        jobs = producer.add_bulk(
            [{"name": "mail", "data": "x" * 10**i, "job_id": own[i]} for i in range(3)]
            + [{"name": "", "data": None}]
        )
    redis("XADD", redis.keys.stream, "*", "d", b"\x93garbage", "n", "mail")
    redis("XADD", redis.keys.stream, "*", "n", "mail")
    expected = [job.id for job in jobs]
    reader = consume_reader(each_server.url, queue_name)
    end, rows = step(reader, reader.initialOffset())
    assert len(rows) == 6
    told = events(redis)
    assert [one[b"id"].decode() for one in told] == expected
    assert [list(one) for one in told[2:]] == [
        [b"e", b"id", b"ts", b"n", b"attempt", b"created"],
        [b"e", b"id", b"ts", b"attempt"],
    ]
    assert [int(one[b"created"]) for one in told[:3]] == [job.created_at_ms for job in jobs[:3]]
    assert {(one[b"e"], one[b"attempt"]) for one in told} == {(b"active", b"1")}
    reader.commit(end)
    buried, told = events(redis)[len(told) :][:2], events(redis)[len(told) + 2 :]
    assert [(one[b"e"], one[b"id"]) for one in buried] == [(b"dlq", b"")] * 2
    assert [one[b"id"].decode() for one in told] == expected
    assert {one[b"e"] for one in told} == {b"completed"}
    assert all(int(one[b"duration_us"]) > 0 for one in told)
    assert (redis("XLEN", redis.keys.stream), pending(redis)) == (0, 0)


def test_they_count_runs_as_a_worker_does_and_are_left_out_if_asked(
    each_server: Server, queue_name: str
):
    redis = Redis(each_server.url, queue_name)
    for attempt in (1, 200, 70_000):
        envelope = encode_envelope(f"job-{attempt}", b"\xc0", 1_700_000_000_000, attempt)
        redis("XADD", redis.keys.stream, "*", "d", envelope, "n", "mail")
    reader = consume_reader(each_server.url, queue_name)
    end, _ = step(reader, reader.initialOffset())
    assert [one[b"attempt"] for one in events(redis)] == [b"2", b"201", b"70001"]
    reader.stop()
    silent = consume_reader(each_server.url, queue_name, writeEvents=False)
    silent.commit(end)
    assert len(events(redis)) == 3
    assert pending(redis) == 0
