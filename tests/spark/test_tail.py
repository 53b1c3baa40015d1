"""Following events and dead jobs: where a query begins, how much it takes, when it ends."""

import json

from tests.servers import Server
from tests.spark.direct import Redis, rows_between, step, tail_reader


def test_it_begins_at_the_end_at_the_beginning_or_in_between(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    for ms in (1000, 2000, 3000, 4000):
        redis("XADD", redis.keys.events, f"{ms}-0", "e", "active", "id", str(ms), "ts", str(ms))

    def first(**given: object) -> list[str]:
        reader = tail_reader(each_server.url, queue_name, **given)
        start = reader.initialOffset()
        assert start[queue_name]["n"] == 4 - len(expected)
        return [row["job_id"] for row in step(reader, start)[1]]

    expected = ["1000", "2000", "3000", "4000"]
    assert first(startingOffsets="earliest") == expected
    expected = ["3000", "4000"]
    assert first(startingTimestamp=2001) == expected
    assert first(startingOffsets=json.dumps({queue_name: "2000-0"})) == expected
    expected = []
    assert first() == expected


def test_the_first_place_is_told_twice_the_same(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    redis.add_events(5)
    reader = tail_reader(each_server.url, queue_name)
    start = reader.initialOffset()
    redis.add_events(5, start=5)
    assert reader.initialOffset() == start
    assert len(step(reader, start)[1]) == 5


def test_a_batch_is_bounded_and_can_be_read_again(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    redis.add_events(700)
    reader = tail_reader(each_server.url, queue_name, startingOffsets="earliest")
    place, sizes, seen = reader.initialOffset(), [], []
    while True:
        end, rows = step(reader, place, 300)
        if end == place:
            break
        restarted = tail_reader(each_server.url, queue_name)
        assert rows_between(restarted, place, end) == rows
        sizes.append(len(rows))
        seen += [row["job_id"] for row in rows]
        place = end
    assert sizes == [300, 300, 100]
    assert seen == [f"job-{i}" for i in range(700)]
    assert reader.reportLatestOffset()[queue_name]["n"] == 700


def test_several_queues_share_a_batch(each_server: Server, queue_name: str):
    names = [f"{queue_name}-{i}" for i in range(3)]
    for i, name in enumerate(names):
        Redis(each_server.url, name).add_events(10 * (i + 1))
    reader = tail_reader(each_server.url, ",".join(names), startingOffsets="earliest")
    end, rows = step(reader, reader.initialOffset(), 30)
    assert {name: place["n"] for name, place in end.items()} == dict.fromkeys(names, 10)
    end, rows = step(reader, end)
    assert [place["n"] for place in end.values()] == [10, 20, 30]
    assert len(rows) == 30


def test_available_now_ends_at_what_was_there(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    redis.add_events(250)
    reader = tail_reader(each_server.url, queue_name, startingOffsets="earliest")
    place = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    redis.add_events(100, start=250)
    seen = 0
    while True:
        end, rows = step(reader, place, 100)
        if end == place:
            break
        place, seen = end, seen + len(rows)
    assert seen == 250


def test_it_waits_for_enough_rows_but_not_for_ever(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    redis.add_events(10)
    given = {"startingOffsets": "earliest", "minOffsetsPerTrigger": 50}
    reader = tail_reader(each_server.url, queue_name, maxTriggerDelay="1h", **given)
    start = reader.initialOffset()
    assert step(reader, start) == (start, [])
    redis.add_events(50)
    assert len(step(reader, start)[1]) == 60
    hasty = tail_reader(each_server.url, queue_name, maxTriggerDelay="0ms", **given)
    assert len(step(hasty, start)[1]) == 60


def test_dead_jobs_are_followed_though_some_are_replayed(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    for i in range(20):
        redis("XADD", redis.keys.dlq, "*", "d", b"", "source_id", "1-0", "reason", str(i))
    reader = tail_reader(each_server.url, queue_name, table="dlq", startingOffsets="earliest")
    start = reader.initialOffset()
    middle, rows = step(reader, start, 10)
    assert [row["reason"] for row in rows] == [str(i) for i in range(10)]
    for entry_id, _ in redis("XRANGE", redis.keys.dlq, "-", "+", "COUNT", 15):
        redis("XDEL", redis.keys.dlq, entry_id)
    _, rows = step(reader, middle)
    assert [row["reason"] for row in rows] == [str(i) for i in range(15, 20)]
