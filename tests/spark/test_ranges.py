"""Ranges leave no gap and share no entry; losses are counted to the entry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chasqui.spark.options import Options
from chasqui.spark.reading import ranges
from chasqui.spark.reading.pacing import FIRST_PAGE, FULL_PAGE, PAGE, PAGE_BYTES, ReadPacing
from chasqui.spark.reading.ranges import DataLossError, Mark, Position
from tests.servers import Server
from tests.spark.direct import Redis, rows_between, step, tail_reader

FAST = Options(server_share=1.0)
COUNTS = st.lists(st.integers(1, 5000), max_size=60)


@given(counts=COUNTS, most_rows=st.integers(1, 20_000), least=st.integers(0, 20))
def test_ranges_cover_every_mark_once_and_in_order(counts: list[int], most_rows: int, least: int):
    marks = [Mark(f"{i + 1}-0", count) for i, count in enumerate(counts)]
    cut = ranges.cut("0-0", marks, most_rows, least)
    assert sum(one.count for one in cut) == sum(counts)
    places = ["0-0", *(one.last for one in cut)]
    assert [one.after for one in cut] == places[:-1]
    if counts:
        assert places[-1] == marks[-1].id
        fair = sum(counts) / max(1, len(cut))
        assert all(one.count <= fair + 2 * max(counts) + most_rows for one in cut)
        assert all(one.count <= max(most_rows, *counts, 1) for one in cut)


@given(ms=st.integers(0, 2**48), seq=st.integers(0, 2**63))
def test_a_time_splits_ids_where_it_says(ms: int, seq: int):
    entry = ranges.order(f"{ms}-{seq}")
    assert ranges.order(ranges.before_ms(ms)) < entry or (ms, seq) == (0, 0)
    assert entry <= ranges.order(ranges.until_ms(ms))
    assert ms == 0 or entry > ranges.order(ranges.until_ms(ms - 1))


def test_pages_are_short_whatever_the_size_of_entries():
    assert [ReadPacing(Options(server_share=share)).most for share in (0.5, 1.0)] == [
        PAGE,
        FULL_PAGE,
    ]
    pacing = ReadPacing(Options(fetch_count=500, server_share=1.0))
    assert pacing.ask() == FIRST_PAGE
    pacing.rest(FIRST_PAGE, FIRST_PAGE * 50)
    assert pacing.ask() == 500
    assert pacing.ask(7) == 7
    pacing.rest(500, 500 * PAGE_BYTES // 20)
    assert pacing.ask() == 20
    pacing.rest(20, 20 << 20)
    assert pacing.ask() == 1


class Clock:
    """Time that passes as it is told to."""

    def __init__(self) -> None:
        self.now_s = self.used_s = 0.0
        self.rests: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.used_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.rests.append(round(seconds, 6))

    def page(
        self, pacing: ReadPacing, waited_s: float, worked_s: float = 0.0, rows: int = 1
    ) -> None:
        """A page that the server took so long for, and the task itself so long."""
        pacing.ask()
        self.now_s += waited_s + worked_s
        self.used_s += worked_s
        pacing.rest(rows, rows)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("chasqui.spark.reading.pacing.time", clock)
    return clock


def test_a_task_rests_for_the_share_that_is_not_its_own(clock: Clock):
    pacing = ReadPacing(Options(server_share=0.1))
    clock.page(pacing, waited_s=0.01)
    assert clock.rests == [0.09]
    clock.page(pacing, waited_s=0.01, worked_s=0.06)  # the server was free meanwhile
    assert clock.rests == [0.09, 0.03]
    clock.page(pacing, waited_s=0.01, worked_s=0.2)
    assert clock.rests == [0.09, 0.03]


def test_one_reader_alone_and_full_speed_take_no_rest(clock: Clock):
    clock.page(ReadPacing(Options(server_share=0.1), is_alone=True), waited_s=0.01)
    clock.page(ReadPacing(FAST), waited_s=0.01)
    assert clock.rests == []


def test_a_rest_is_never_longer_than_a_second_but_for_a_limit_of_rows(clock: Clock):
    clock.page(ReadPacing(Options(server_share=0.01)), waited_s=60)  # a server that was away
    assert clock.rests == [1]
    clock.page(ReadPacing(Options(max_read_rows_per_second=10)), waited_s=4, rows=100)
    assert clock.rests == [1, 6]


def test_a_walk_counts_what_is_there(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    redis.add_events(2500)
    run = redis.connection.run
    walked = run(ranges.walk(redis.keys.events, Position("0-0", 0), ReadPacing(FAST), step=700))
    assert walked.count == 2500
    assert walked.lost == 0
    assert walked.end.ordinal == 2500
    assert run(ranges.tip(redis.keys.events)) == walked.end
    half = run(
        ranges.walk(redis.keys.events, Position("0-0", 0), ReadPacing(FAST), most=1000, step=300)
    )
    assert half.count == 1000
    rest = run(ranges.walk(redis.keys.events, half.end, ReadPacing(FAST), step=300))
    assert rest.count == 1500
    assert rest.end == walked.end
    nothing = run(ranges.walk(b"{chasqui:none}:events", Position("0-0", 0), ReadPacing(FAST)))
    assert (nothing.count, nothing.lost) == (0, 0)


def test_trimmed_entries_are_counted_to_the_entry(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    redis.add_events(1000)
    reader = tail_reader(
        each_server.url, queue_name, startingOffsets="earliest", failOnDataLoss=False
    )
    start, rows = step(reader, reader.initialOffset(), 100)
    assert len(rows) == 100
    redis("XTRIM", redis.keys.events, "MAXLEN", "=", 640)  # 360 are gone, 260 of them unread
    end, rows = step(reader, start)
    assert len(rows) == 640
    assert end[queue_name]["lost"] == 260
    assert end[queue_name]["n"] == 1000
    strict = tail_reader(each_server.url, queue_name, startingOffsets="earliest")
    with pytest.raises(DataLossError, match=r"^260 entries of events of queue"):
        step(strict, start)


def test_entries_trimmed_before_the_query_began_are_not_lost(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    redis.add_events(300)
    redis("XTRIM", redis.keys.events, "MAXLEN", "=", 100)
    reader = tail_reader(each_server.url, queue_name, startingOffsets="earliest")
    start = reader.initialOffset()
    assert start == {queue_name: {"id": "0-0", "n": 200, "since": 200}}
    end, rows = step(reader, start)
    assert len(rows) == 100
    assert end[queue_name]["n"] == 300


def test_entries_trimmed_between_planning_and_reading_fail_the_task(
    each_server: Server, queue_name: str
):
    redis = Redis(each_server.url, queue_name)
    redis.add_events(500)
    reader = tail_reader(each_server.url, queue_name, startingOffsets="earliest")
    start = reader.initialOffset()
    end, _ = step(reader, start, 400)
    redis("XTRIM", redis.keys.events, "MAXLEN", "=", 450)
    with pytest.raises(DataLossError, match=r"^50 entries"):
        rows_between(reader, start, end)  # a task of the same planning
    restarted = tail_reader(each_server.url, queue_name)
    with pytest.raises(DataLossError, match=r"^50 entries"):
        restarted.partitions(start, end)  # the batch planned again after a restart
    tolerant = tail_reader(each_server.url, queue_name, failOnDataLoss=False)
    assert len(rows_between(tolerant, start, end)) == 350


def test_a_stream_that_was_deleted_and_made_anew_is_a_loss(each_server: Server, queue_name: str):
    redis = Redis(each_server.url, queue_name)
    redis.add_events(50)
    reader = tail_reader(each_server.url, queue_name, startingOffsets="earliest")
    start, _ = step(reader, reader.initialOffset())
    redis("DEL", redis.keys.events)
    redis.add_events(20)
    with pytest.raises(DataLossError, match=r"^an unknown number of entries"):
        step(reader, start)


def test_where_the_server_does_not_count_a_strict_query_is_refused(
    redis_62: Server, queue_name: str
):
    redis = Redis(redis_62.url, queue_name)
    redis.add_events(30)
    with pytest.raises(ValueError, match="does not count the entries ever added"):
        tail_reader(redis_62.url, queue_name, startingOffsets="earliest").initialOffset()
    reader = tail_reader(redis_62.url, queue_name, startingOffsets="earliest", failOnDataLoss=False)
    end, rows = step(reader, reader.initialOffset())
    assert len(rows) == 30
    assert "n" not in end[queue_name]
