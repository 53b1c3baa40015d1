"""A driver that has lost its name and does not know it yet does no harm to its successor's jobs."""

import pytest

from chasqui.spark.consuming.query_lease import ConsumerTakenError
from chasqui.spark.consuming.reader import ConsumeReader
from tests.servers import Server
from tests.spark.direct import Redis, consume_reader, rows_between, step
from tests.spark.test_consume import fill, ids, pending


def stalled(reader: ConsumeReader) -> None:
    """Let a driver do nothing any more, as one that is stopped or cut off: its lease runs out."""
    batches = reader._open_batches()
    batches._stopping.set()
    assert batches._thread is not None
    batches._thread.join()


def test_it_adds_no_jobs_to_a_batch_that_another_has_planned(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    expected = fill(each_server.url, queue_name, 1000)
    late = consume_reader(each_server.url, queue_name)
    start = late.initialOffset()
    end, _ = step(late, start, 500)
    stalled(late)
    reader = consume_reader(each_server.url, queue_name)
    assert ids(rows_between(reader, start, end)) == expected[:500]
    with pytest.raises(ConsumerTakenError):
        late._open_batches().take(queue_name, end["seq"], 250)
    end, rows = step(reader, end, 500)
    assert ids(rows) == expected[500:], "these were acknowledged unread"
    reader.commit(end)
    assert (redis("XLEN", redis.keys.stream), pending(redis)) == (0, 0)


def test_nor_once_that_one_has_ended(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    expected = fill(each_server.url, queue_name, 300)
    late = consume_reader(each_server.url, queue_name)
    start = late.initialOffset()
    stalled(late)
    reader = consume_reader(each_server.url, queue_name)
    end, rows = step(reader, start, 200)
    assert ids(rows) == expected[:200]
    reader.commit(end)
    reader._open_batches().close()
    with pytest.raises(ConsumerTakenError):
        late._open_batches().take(queue_name, end["seq"], 250)
    assert redis("XLEN", redis.keys.stream) == 100
    assert pending(redis) == 0, "the next driver acknowledges that batch, which is done"


def test_it_acknowledges_no_batch_of_another(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    late = consume_reader(each_server.url, queue_name)
    late.initialOffset()
    stalled(late)
    expected = fill(each_server.url, queue_name, 300)
    reader = consume_reader(each_server.url, queue_name)
    start = reader.initialOffset()
    end, _ = step(reader, start)
    with pytest.raises(ConsumerTakenError):
        late.commit({"seq": 57})
    assert ids(rows_between(reader, start, end)) == expected
    assert pending(redis) == 300
