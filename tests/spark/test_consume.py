"""A queue consumed as a stream: every job processed, none left pending, none acked unseen."""

import pytest

from chasqui.spark.keeper import ConsumerTakenError
from chasqui.spark.options import OptionError
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
    keeper = reader._held()
    for _ in range(200):
        if max(row[2] for row in redis(*words)) < 30_000:
            break
        keeper._stopping.wait(0.02)
    assert max(row[2] for row in redis(*words)) < 30_000
    assert {row[3] for row in redis(*words)} == deliveries, "a renewal is no delivery"


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


def test_jobs_that_cannot_be_read_must_not_be_dropped(redis_86: Server, queue_name: str):
    with pytest.raises(OptionError, match="would acknowledge jobs that nobody has seen"):
        consume_reader(redis_86.url, queue_name, parseMode="DROPMALFORMED")
