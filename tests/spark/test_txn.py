"""Exactly once: whoever dies wherever, every row is one job. Writers are driven directly."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from chasqui._core.envelope import decode_envelope
from chasqui.errors import QueueFullError
from chasqui.model.payload import decode, encode
from chasqui.spark.options import Options
from chasqui.spark.writing.backlog import Backlog
from chasqui.spark.writing.records import find_writes, read_record
from chasqui.spark.writing.transaction import StageLostError, Transaction, forget
from chasqui.spark.writing.writers import StreamWriter
from chasqui.sync import Queue
from tests.proxy import Fault, Proxy
from tests.servers import Server
from tests.spark.direct import Redis, batches, read, struct, writer
from tests.spark.sizes import sized

SCHEMA = struct(n="bigint", name="string")


def rows(first: int, last: int) -> Any:
    numbers = list(range(first, last))
    return batches({"n": numbers, "name": ["mail"] * len(numbers)}, SCHEMA, 400)


def numbers(redis: Redis) -> list[int]:
    """What the jobs in the stream say; sorted."""
    return sorted(decode(decode_envelope(job[b"d"]).payload)["n"] for job in redis.jobs())


def ids(redis: Redis) -> list[str]:
    return [decode_envelope(job[b"d"]).id for job in redis.jobs()]


def test_nothing_is_in_the_queue_before_the_commit_and_all_of_it_after(
    each_server: Server, queue_name: str
):
    redis = Redis(each_server.url, queue_name)
    it = writer(each_server.url, SCHEMA, queue=queue_name)
    messages = [it.write(rows(0, 700)), it.write(rows(700, 1500)), it.write(rows(0, 0)), None]
    assert redis.jobs() == []
    for key in redis.spark_keys():
        assert 0 < redis("TTL", key) <= 86_400, "what is staged ends by itself"
    it.commit(messages)
    assert numbers(redis) == list(range(1500))
    assert {job[b"n"] for job in redis.jobs()} == {b"mail"}
    assert len(set(ids(redis))) == 1500
    (record,) = redis.spark_keys()  # nothing staged is left
    assert redis("TTL", record) > 86_400


@sized(1000)
def test_a_batch_that_is_committed_again_changes_nothing(
    each_server: Server, queue_name: str, size: int
):
    redis = Redis(each_server.url, queue_name)
    for _ in range(3):  # each with rows staged anew, as Spark does when it replays
        it = writer(each_server.url, SCHEMA, queue=queue_name, txnAppId="app", txnVersion=7)
        it.commit([it.write(rows(0, 600)), it.write(rows(600, size))])
        assert numbers(redis) == list(range(size))
    late = writer(each_server.url, SCHEMA, queue=queue_name, txnAppId="app", txnVersion=6)
    late.commit([late.write(rows(0, 10))])
    assert numbers(redis) == list(range(size))
    following = writer(each_server.url, SCHEMA, queue=queue_name, txnAppId="app", txnVersion=8)
    following.commit([following.write(rows(size, size + 100))])
    assert numbers(redis) == list(range(size + 100))
    assert len(redis.spark_keys()) == 1


def test_an_abort_after_a_failed_commit_keeps_what_the_resume_needs(
    each_server: Server, queue_name: str
):
    redis = Redis(each_server.url, queue_name)
    given = {"queue": queue_name, "txnAppId": "app", "maxBacklog": 300, "onBacklog": "fail"}
    it = writer(each_server.url, SCHEMA, **given)
    messages = [it.write(rows(0, 1000))]
    with pytest.raises(QueueFullError):
        it.commit(messages)
    it.abort(messages)
    assert len(redis.jobs()) == 300
    again = writer(each_server.url, SCHEMA, queue=queue_name, txnAppId="app")
    again.commit([again.write(rows(0, 400)), again.write(rows(400, 1000))])
    assert numbers(redis) == list(range(1000))
    assert len(redis.spark_keys()) == 1


def test_an_abort_drops_what_nobody_will_publish(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    it = writer(each_server.url, SCHEMA, queue=queue_name)
    messages = [it.write(rows(0, 1000)), None]
    it.abort(messages)
    assert redis.spark_keys() == []
    assert redis.jobs() == []


def test_an_unfinished_older_epoch_is_published_before_a_newer_one(
    each_server: Server, queue_name: str
):
    redis = Redis(each_server.url, queue_name)
    given = {"queue": queue_name, "txnAppId": "app", "onBacklog": "fail"}
    first = writer(each_server.url, SCHEMA, txnVersion=1, maxBacklog=200, **given)
    messages = [first.write(rows(0, 500))]
    with pytest.raises(QueueFullError):
        first.commit(messages)
    second = writer(each_server.url, SCHEMA, txnVersion=2, **given)
    second.commit([second.write(rows(500, 800))])
    assert numbers(redis) == list(range(800))


def test_rows_that_expired_before_the_commit_fail_it(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    it = writer(each_server.url, SCHEMA, queue=queue_name)
    messages = [it.write(rows(0, 10)), it.write(rows(10, 20))]
    redis("DEL", messages[1].staged[0][1].key)
    with pytest.raises(StageLostError, match="are gone"):
        it.commit(messages)
    assert redis.jobs() == []


@sized(3000)
def test_two_drivers_that_commit_one_epoch_at_once_publish_it_once(
    each_server: Server, queue_name: str, size: int
):
    redis = Redis(each_server.url, queue_name)
    writers = [
        writer(each_server.url, SCHEMA, queue=queue_name, txnAppId="app", txnVersion=1)
        for _ in range(4)
    ]
    staged = [[one.write(rows(0, 1500)), one.write(rows(1500, size))] for one in writers]
    barrier = threading.Barrier(4)

    def commit(one: Any, messages: Any) -> None:
        barrier.wait()
        one.commit(messages)

    threads = [
        threading.Thread(target=commit, args=pair) for pair in zip(writers, staged, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers(redis) == list(range(size))
    assert len(redis.spark_keys()) == 1


def test_replies_lost_on_the_way_double_nothing(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    steps = [("HSETNX", 1), ("HSETNX", 3), *(("EVALSHA", nth) for nth in range(1, 7))]
    for epoch, (command, nth) in enumerate(steps):
        with Proxy(each_server.url) as proxy:
            it = writer(proxy.url, SCHEMA, queue=queue_name, txnAppId="app", txnVersion=epoch)
            proxy.fail(Fault.CUT_AFTER, command, nth=nth)
            it.commit([it.write(rows(epoch * 1000, epoch * 1000 + 1000))])
    assert numbers(redis) == list(range(len(steps) * 1000))


def test_a_chunk_that_comes_late_is_not_published_again(each_server: Server, queue_name: str):
    """A link that was given up may still deliver what was sent over it."""
    redis = Redis(each_server.url, queue_name)
    it = writer(each_server.url, SCHEMA, queue=queue_name, txnAppId="app", maxBacklog=500,
                onBacklog="fail")  # fmt: skip
    messages = [it.write(rows(0, 800))]
    key = messages[0].staged[0][1].key
    first = redis("HGET", key, 0)
    with pytest.raises(QueueFullError):
        it.commit(messages)
    assert redis("HSETNX", key, 0, first) == 0, "its place is taken, though it was published"
    again = writer(each_server.url, SCHEMA, queue=queue_name, txnAppId="app")
    again.commit([again.write(rows(0, 800))])
    assert numbers(redis) == list(range(800))


#: Forks a driver for every line it reads, tells its pid, and at its end how that was.
DRIVERS = """
import os, sys
from tests.spark.direct import writer
from tests.spark.test_txn import SCHEMA, rows
for line in sys.stdin:
    url, queue, size = line.split()
    pid = os.fork()
    if pid == 0:
        it = writer(url, SCHEMA, queue=queue, txnAppId="app", txnVersion=1)
        most = int(size) * 7 // 9
        it.commit([it.write(rows(0, most)), it.write(rows(most, int(size)))])
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.timeout(180)
@sized(900)
def test_a_driver_killed_at_any_step_leaves_what_the_next_one_finishes(
    redis_86: Server, valkey_9: Server, queue_name: str, size: int
):
    """The process dies right after, or right before, each step of the protocol: a task asks for the
    record, stages a chunk; the write is recorded, a chunk published, the write
    done. Of many chunks the first, one in the middle and the last."""
    command = [sys.executable, "-c", textwrap.dedent(DRIVERS)]
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as drivers:
        for server, fault in ((redis_86, Fault.SWALLOW), (valkey_9, Fault.CUT_BEFORE)):
            for command, least, around in (("HMGET", 2, 0), ("HSETNX", 3, 0), ("EVALSHA", 5, 2)):
                with Proxy(server.url) as proxy:
                    write_in(drivers, proxy.url, f"{queue_name}-{command}", size).join()
                    steps = proxy.count(command)
                assert steps >= least, "each task, each chunk; begin and done"
                chosen = {*range(1, 3), steps // 2, *range(steps - around, steps + 1)}
                for step in range(1, steps + 1) if steps < 10 else sorted(chosen):
                    queue = f"{queue_name}-{command}-{step}"
                    kill_at(drivers, server, fault, command, step, queue, size)
        assert drivers.stdin is not None
        drivers.stdin.close()


class Driver(threading.Thread):
    """A driver at work in a process of its own."""

    def __init__(self, drivers: "subprocess.Popen[str]") -> None:
        super().__init__()
        self._told = drivers.stdout
        assert self._told is not None
        self.pid = int(self._told.readline())
        #: What its process ended with.
        self.status: int | None = None

    def run(self) -> None:
        assert self._told is not None
        self.status = int(self._told.readline())


def write_in(drivers: "subprocess.Popen[str]", url: str, queue: str, size: int) -> Driver:
    assert drivers.stdin is not None
    print(url, queue, size, file=drivers.stdin, flush=True)
    driver = Driver(drivers)
    driver.start()
    return driver


def kill_at(
    drivers: "subprocess.Popen[str]",
    server: Server,
    fault: Fault,
    command: str,
    step: int,
    queue: str,
    size: int,
) -> None:
    """Kill a driver at a step, let another one write the same, and see that nothing is missing or
    doubled."""
    with Proxy(server.url) as proxy:
        proxy.fail(fault, command, nth=step, times=1000)
        driver = write_in(drivers, proxy.url, queue, size)
        deadline_s = time.monotonic() + 60
        while proxy.count(command) < step:
            assert driver.is_alive()
            assert time.monotonic() < deadline_s
            driver.join(0.001)
        os.kill(driver.pid, signal.SIGKILL)
        driver.join()
    assert driver.status == -signal.SIGKILL
    redis = Redis(server.url, queue)
    it = writer(server.url, SCHEMA, queue=queue, txnAppId="app", txnVersion=1)
    it.commit([it.write(rows(0, size))])
    assert numbers(redis) == list(range(size)), (command, step, fault)
    assert len(set(ids(redis))) == size
    assert len(redis.spark_keys()) == 1, "the record; what the dead tasks staged is swept"
    redis("UNLINK", redis.keys.stream)


def test_rows_can_name_their_queues_ids_times_and_limits(each_server: Server, queue_name: str):
    other = f"{queue_name}-b"
    schema = struct(
        queue="string",
        job_id="string",
        name="string",
        run_at="timestamp",
        attempts="int",
        backoff_ms="bigint",
        to="string",
    )
    now = datetime.now(UTC)
    columns = {
        "queue": [queue_name, other, queue_name, queue_name],
        "job_id": ["a", "b", None, "d"],
        "name": ["mail", "mail", None, "mail"],
        "run_at": [None, None, now - timedelta(days=1), now + timedelta(hours=1)],
        "attempts": [3, None, None, 2],
        "backoff_ms": [None, 500, None, None],
        "to": ["w", "x", "y", "z"],
    }
    it = writer(each_server.url, schema)
    it.commit([it.write(batches(columns, schema))])
    here = read(each_server.url, queue_name, payloadFormat="json")
    assert [(row["job_id"] == "a", row["name"], row["payload"]) for row in here] == [
        (True, "mail", '{"to": "w"}'),
        (False, "", '{"to": "y"}'),
    ]
    assert here[0]["retry"]["max_attempts"] == 3
    (there,) = read(each_server.url, other)
    assert there["retry"]["delay_ms"] == 500
    (later,) = read(each_server.url, queue_name, table="delayed")
    assert (later["job_id"], later["retry"]["max_attempts"]) == ("d", 2)
    assert abs(later["run_at"] - columns["run_at"][3]) < timedelta(milliseconds=1)
    with Queue(queue_name, redis_url=each_server.url) as producer:
        assert producer.cancel_delayed("d") is True


def test_payloads_may_be_msgpack_json_or_any_column(each_server: Server, queue_name: str):
    cases: list[tuple[str, list[Any], dict[str, str], list[Any]]] = [
        ("binary", [encode({"n": 1}), None], {}, [{"n": 1}, None]),
        ("string", ['{"n": 2}', "null"], {"payloadFormat": "json"}, [{"n": 2}, None]),
        ("string", ["text"], {}, ["text"]),
        ("struct<n: bigint, to: string>", [{"n": 3, "to": "x"}], {}, [{"n": 3, "to": "x"}]),
        ("map<string, string>", [[("k", "v")]], {}, [{"k": "v"}]),
        ("timestamp", [datetime(2026, 1, 1, tzinfo=UTC)], {}, ["2026-01-01T00:00:00+00:00"]),
    ]
    expected = []
    for kind, values, given, decoded in cases:
        schema = struct(payload=kind)
        it = writer(each_server.url, schema, queue=queue_name, **given)
        it.commit([it.write(batches({"payload": values}, schema))])
        expected += decoded
    assert [decode(row["payload"]) for row in read(each_server.url, queue_name)] == expected


@pytest.mark.parametrize(
    ("kind", "value", "given", "sentence"),
    [
        ("binary", b"\xc1", {}, "a binary payload must be msgpack"),
        ("string", "{", {"payloadFormat": "json"}, "a payload is no JSON"),
    ],
)
def test_a_payload_that_no_worker_could_read_fails_the_task(
    redis_86: Server, queue_name: str, kind: str, value: Any, given: dict[str, str], sentence: str
):
    schema = struct(payload=kind)
    it = writer(redis_86.url, schema, queue=queue_name, **given)
    with pytest.raises(Exception, match=sentence):
        it.write(batches({"payload": [value]}, schema))


def test_direct_and_deduplicated_adds(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    it = writer(each_server.url, SCHEMA, queue=queue_name, delivery="at_least_once")
    it.commit([it.write(rows(0, 1000))])
    assert numbers(redis) == list(range(1000))
    schema = struct(job_id="string", n="bigint")
    for _ in range(2):
        it = writer(each_server.url, schema, queue=queue_name, delivery="dedup", dedupTtl="1h")
        columns = {"job_id": [f"id-{i}" for i in range(500)], "n": list(range(1000, 1500))}
        it.commit([it.write(batches(columns, schema))])
    assert numbers(redis) == list(range(1500))


def test_a_write_waits_for_room_in_the_queue(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    it = writer(each_server.url, SCHEMA, queue=queue_name, maxBacklog=400)
    messages = [it.write(rows(0, 1000))]
    seen: list[int] = []
    done = threading.Event()

    def drain() -> Iterator[None]:
        other = Redis(each_server.url, queue_name)
        while not done.is_set() or other("XLEN", other.keys.stream):
            depth = other("XLEN", other.keys.stream)
            assert depth <= 400
            entries = other("XRANGE", other.keys.stream, "-", "+", "COUNT", 150)
            for entry_id, fields in entries:
                seen.append(decode(decode_envelope(fields[1]).payload)["n"])
                other("XDEL", other.keys.stream, entry_id)
            yield

    worker = threading.Thread(target=lambda: [None for _ in drain()])
    worker.start()
    it.commit(messages)
    done.set()
    worker.join()
    assert sorted(seen) == list(range(1000))
    assert redis.jobs() == []


def test_jobs_that_found_no_room_keep_their_names_and_times(each_server: Server, queue_name: str):
    """What is left of a chunk is packed again, by the server."""
    redis = Redis(each_server.url, queue_name)
    schema = struct(job_id="string", name="string", run_at="timestamp", n="bigint")
    later = datetime.now(UTC) + timedelta(hours=1)
    columns = {
        "job_id": [f"id-{n}" for n in range(120)],
        "name": ["x" * n for n in range(120)],
        "run_at": [later if n % 3 == 0 else None for n in range(120)],
        "n": list(range(120)),
    }
    for most in (7, 30, 31, 1000):
        it = writer(each_server.url, schema, queue=queue_name, txnAppId="app", maxBacklog=most,
                    onBacklog="wait" if most == 1000 else "fail")  # fmt: skip
        messages = [it.write(batches(columns, schema))]
        if most == 1000:
            it.commit(messages)
        else:
            with pytest.raises(QueueFullError):
                it.commit(messages)
            assert redis("XLEN", redis.keys.stream) == most
    here = read(each_server.url, queue_name, payloadSchema="n bigint")
    there = read(each_server.url, queue_name, table="delayed", payloadSchema="n bigint")
    assert [row["payload"]["n"] for row in here] == [n for n in range(120) if n % 3]
    assert sorted(row["payload"]["n"] for row in there) == list(range(0, 120, 3))
    for row in (*here, *there):
        n = row["payload"]["n"]
        assert (row["job_id"], row["name"]) == (f"id-{n}", "x" * n)
    assert {abs(row["run_at"] - later) < timedelta(milliseconds=1) for row in there} == {True}


def test_a_stream_needs_a_name_that_survives_a_restart(redis_86: Server, queue_name: str):
    options = Options.parse({"url": redis_86.url, "queue": queue_name}, "w")
    with pytest.raises(RuntimeError, match="give txnAppId"):
        StreamWriter(options, SCHEMA).write(rows(0, 1))


def test_unfinished_writes_can_be_listed_resumed_and_discarded(
    each_server: Server, queue_name: str
):
    redis = Redis(each_server.url, queue_name)
    run = redis.connection.run
    for app in ("one", "two"):
        it = writer(
            each_server.url,
            SCHEMA,
            queue=queue_name,
            txnAppId=app,
            maxBacklog=100,
            onBacklog="fail",
        )
        with pytest.raises(QueueFullError):
            it.commit([it.write(rows(0, 150))])
    one, two = (run(read_record(redis.keys, name)) for name in run(find_writes(redis.keys)))
    assert (one.app_id, one.state, one.jobs, one.left) == ("one", "publishing", 150, 50)
    assert (two.app_id, two.left) == ("two", 150)

    def make(app: str) -> Transaction:
        backlog = Backlog(queue_name, 10**6, waits=False)
        return Transaction(redis.connection, redis.keys, app, "a-run", backlog)

    resumed = make("one").resume()
    assert resumed is not None
    assert (resumed.added, resumed.found) == (50, 100)
    assert make("one").resume() is None
    assert redis.connection.call(forget(redis.keys, "two")) == 1
    assert numbers(redis) == list(range(150))
    assert run(find_writes(redis.keys)) == ["one"]
    record = run(read_record(redis.keys, "one"))
    assert (record.app_id, record.state) == ("one", "done")
