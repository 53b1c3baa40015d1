"""Delayed jobs and retries come back to a queue on which only a consuming query works."""

import logging
import time
from collections import Counter
from typing import Any

import pytest

from chasqui.consuming.fate import Limits
from chasqui.scripts.settling import Consumer
from chasqui.spark.consuming.failing import Mover
from chasqui.spark.consuming.reader import ConsumeReader
from chasqui.sync import Queue
from tests.servers import Server
from tests.spark.direct import Redis, consume_reader, step


def next_batch(
    reader: ConsumeReader, start: dict[str, int]
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """The next batch that has rows."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        end, rows = step(reader, start)
        if rows:
            return end, rows
        time.sleep(0.01)
    raise AssertionError("no jobs came")


def test_a_delayed_job_comes_though_no_worker_lives(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    reader = consume_reader(each_server.url, queue_name)
    start = reader.initialOffset()
    with Queue(queue_name, redis_url=each_server.url) as queue:
        job = queue.add("mail", 1, delay_ms=300)
    _, rows = next_batch(reader, start)
    assert [row["job_id"] for row in rows] == [job.id]
    events = [fields[:2] for _, fields in redis("XRANGE", redis.keys.events, "-", "+")]
    assert [b"e", b"waiting"] in events


def test_a_job_that_failed_comes_again_though_no_worker_lives(each_server: Server, queue_name: str):
    with Queue(queue_name, redis_url=each_server.url) as queue:
        queue.add_bulk([{"name": "m", "data": i, "attempts": 3, "backoff": 50} for i in range(3)])
    redis = Redis(each_server.url, queue_name)
    reader = consume_reader(each_server.url, queue_name, writeEvents=False)
    place, runs = reader.initialOffset(), list[int]()
    counts = {"retried": 0, "buried": 0, "lost": 0}
    while len(runs) < 9:
        place, rows = next_batch(reader, place)
        runs += [row["attempt"] for row in rows]
        owner = ("default", rows[0]["consumer"])
        mover = Mover(redis.connection, Consumer(redis.keys, *owner), "no good", False)
        mover.run([row["entry_id"] for row in rows], Limits(), False, counts)
    assert Counter(runs) == {0: 3, 1: 3, 2: 3}
    assert counts == {"retried": 6, "buried": 3, "lost": 0}
    assert redis("EXISTS", redis.keys.events) == 0


def test_the_end_of_a_query_lets_another_promote(
    each_server: Server, queue_name: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "chasqui")
    redis = Redis(each_server.url, queue_name)
    reader = consume_reader(each_server.url, queue_name)
    reader.initialOffset()
    deadline_s = time.monotonic() + 30
    while not redis("EXISTS", redis.keys.promoter_lock) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    reader.stop()
    assert "this process is now its promoter" in caplog.text
    assert redis("EXISTS", redis.keys.promoter_lock) == 0
    other = consume_reader(each_server.url, queue_name)
    with Queue(queue_name, redis_url=each_server.url) as queue:
        queue.add("mail", 1, delay_ms=50)
    assert len(next_batch(other, other.initialOffset())[1]) == 1
