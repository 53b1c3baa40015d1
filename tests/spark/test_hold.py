"""A query with a name holds events back while it lives, and tells how far it has read."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis as redis_py

from chasqui.managing import retention
from chasqui.managing.retention import Log, LogReader
from chasqui.spark.archiving.archive import reader_of
from chasqui.spark.options import OptionError, Options
from tests.servers import Server
from tests.spark.direct import Redis, step, tail_reader

NODE = 100
WAIT_S = 60.0


def until(fact: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + WAIT_S
    while not (found := fact()):
        assert time.monotonic() < deadline_s, "it never came true"
    return found


class Events(Redis):
    """An events stream of which a hundred are kept."""

    def __init__(self, url: str, queue: str) -> None:
        super().__init__(url, queue)
        self.log = Log.events(self.keys)
        self.connection.run(retention.set_max_len(self.log, 100))

    def trim(self) -> int:
        request = retention.Trimmer(self.log).wrote(1)
        assert request is not None
        self.connection.call(request)
        return int(self("XLEN", self.keys.events))

    def reader(self) -> LogReader:
        (reader,) = self.connection.run(retention.look(self.log)).readers
        return reader


def test_what_a_query_has_not_committed_is_kept(each_server: Server, queue_name: str):
    redis = Events(each_server.url, queue_name)
    redis.add_events(1500)
    reader = tail_reader(
        each_server.url, queue_name, startingOffsets="earliest", reader="lake", readerHold=5000
    )
    start = reader.initialOffset()
    assert redis.reader().lag == 1500
    assert redis.trim() == 1500
    middle, rows = step(reader, start, 1000)
    assert len(rows) == 1000
    assert redis.trim() == 1500, "the batch may be read again"
    reader.latestOffset(middle, reader.getDefaultReadLimit())
    assert redis.reader().lag == 500
    assert 500 <= redis.trim() <= 500 + NODE
    end, rows = step(reader, middle)
    assert len(rows) == 500
    assert reader.latestOffset(end, reader.getDefaultReadLimit()) == end
    assert redis.reader().lag == 0
    assert redis.trim() <= 100 + NODE


def test_a_query_that_begins_again_holds_what_its_checkpoint_says(
    each_server: Server, queue_name: str
):
    """Spark may begin with a batch that was planned before: it asks for no offset first."""
    redis = Events(each_server.url, queue_name)
    redis.add_events(600)
    before = tail_reader(each_server.url, queue_name, startingOffsets="earliest")
    start = before.initialOffset()
    end, _ = step(before, start, 300)
    after = tail_reader(each_server.url, queue_name, reader="lake")
    after.partitions(start, end)
    assert (redis.reader().position, redis.reader().lag) == ("0-0", 600)
    assert redis.trim() == 600


def test_a_query_that_ended_is_known_and_holds_until_its_lease_ends(
    each_server: Server, queue_name: str
):
    redis = Events(each_server.url, queue_name)
    redis.add_events(700)
    reader = tail_reader(
        each_server.url, queue_name, startingOffsets="earliest", reader="lake", readerLease="1s"
    )
    reader.initialOffset()
    reader.stop()
    assert redis.reader().is_alive
    until(lambda: not redis.reader().is_alive)
    assert redis.trim() <= 100 + NODE
    assert redis.reader().lag == 700


class Renewals:
    """Counts how often a lease was seen to begin anew."""

    def __init__(self, redis: Events) -> None:
        self._redis = redis
        self._count, self._last = 0, 0

    def seen(self) -> int:
        alive_ms = self._redis.reader().alive_ms
        self._count += alive_ms > self._last
        self._last = alive_ms
        return self._count


PROGRAM = """
import sys
from tests.spark.direct import tail_reader

reader = tail_reader(
    sys.argv[1], sys.argv[2], startingOffsets="earliest", reader="lake", readerLease="1s"
)
reader.initialOffset()
print("reads", flush=True)
sys.stdin.read()
"""


def test_the_hold_of_a_driver_that_is_killed_ends(each_server: Server, queue_name: str):
    redis = Events(each_server.url, queue_name)
    redis.add_events(700)
    command = [sys.executable, "-c", PROGRAM, each_server.url, queue_name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "reads\n"
        renewals = Renewals(redis)
        until(lambda: renewals.seen() >= 6)  # it would have ended by now
        assert redis.trim() == 700
        os.kill(driver.pid, signal.SIGKILL)
    until(lambda: not redis.reader().is_alive)
    assert redis.trim() <= 100 + NODE


def test_a_user_who_may_not_hold_reads_all_the_same(
    private_server: Callable[..., Server], queue_name: str, caplog: pytest.LogCaptureFixture
):
    server = private_server("redis-8.6")
    redis = Events(server.url, queue_name)
    redis.add_events(5)
    with redis_py.Redis.from_url(server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "default", "-hset")
        with caplog.at_level(logging.WARNING):
            reader = tail_reader(server.url, queue_name, startingOffsets="earliest", reader="lake")
            start = reader.initialOffset()
            end, rows = step(reader, start)
            reader.latestOffset(end, reader.getDefaultReadLimit())
        admin.execute_command("ACL", "SETUSER", "default", "+hset")
    assert len(rows) == 5
    assert [one.message for one in caplog.records if "held back" in one.message]


def test_names_and_numbers_that_make_no_sense_are_refused():
    given = {"queue": "orders", "table": "events", "url": "redis://127.0.0.1:1"}
    for more, why in (
        ({"reader": ""}, "reader"),
        ({"reader": "a\nb"}, "reader"),
        ({"reader": "x" * 300}, "reader"),
        ({"reader": "x", "readerHold": "0"}, "readerHold"),
        ({"reader": "x", "readerLease": "0.1s"}, "readerLease"),
        ({"reader": "x", "table": "dlq"}, "table=events"),
    ):
        with pytest.raises(OptionError, match=why):
            Options.parse({**given, **more}, "s")


def test_an_archive_reads_by_the_name_of_its_folder(monkeypatch: pytest.MonkeyPatch):
    assert reader_of("/data/lake") == "archive /data/lake"
    assert reader_of("lake") == f"archive {os.getcwd()}/lake"
    assert reader_of("s3a://key:secret@bucket/lake") == "archive s3a://bucket/lake"
    assert len(retention.check_reader(reader_of("s3a://" + "ü" * 300)).encode()) <= 256
