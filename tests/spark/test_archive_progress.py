"""What `archive --follow` tells while it goes on."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from chasqui.cli import spark_archive
from chasqui.cli.spark_archive import Archived, Queries, how_far, watch


def progress(end: Any, newest: Any) -> Any:
    source = SimpleNamespace(
        startOffset=None, endOffset=json.dumps(end), latestOffset=json.dumps(newest)
    )
    return SimpleNamespace(sources=[source])


END = {"a": {"id": "1000-0", "n": 10}, "b": {"id": "5000-0", "n": 20}}
NEWEST = {"a": {"id": "3500-0", "n": 40}, "b": {"id": "5000-0", "n": 20}}


def test_lag_is_that_of_the_queue_that_is_most_behind():
    assert how_far(progress(END, NEWEST)) == {"behind": 30, "lag_s": 2.5}
    assert how_far(progress(NEWEST, END))["behind"] == 0, "it is asked for at another moment"


def test_what_is_not_known_is_not_told():
    nothing = {"behind": None, "lag_s": None}
    assert how_far(None) == nothing
    assert how_far(progress(None, None)) == nothing
    uncounted = how_far(progress({"a": {"id": "1000-0"}}, {"a": {"id": "2000-0"}}))
    assert (uncounted["behind"], uncounted["lag_s"]) == (None, 1.0)


class Clock:
    """Seconds that pass only when told."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_the_rate_is_that_of_the_last_minute():
    clock = Clock()
    archived = Archived(clock=clock)
    assert archived.per_s is None, "nothing is known before the first batch"
    clock.now_s += 10
    archived.add(1200, [])
    assert archived.per_s == 120, "of the first batch, too"
    clock.now_s += 20
    archived.add(0, [])
    assert archived.per_s == 40, "it does not fall to 0 right after a batch"
    clock.now_s += 61
    assert archived.per_s == 0
    archived.add(600, [])
    assert archived.per_s == 10


def test_both_tables_are_one_line():
    clock = Clock()
    jobs = Archived("job", clock=clock)
    both = Archived(beside=jobs, clock=clock)
    clock.now_s += 10
    both.add(41_201, [])
    assert (both.per_s, both.total_per_s) == (4120.1, 4120.1)
    jobs.add(20_000, None)
    assert (both.per_s, both.total_per_s) == (4120.1, 6120.1)
    assert str(both) == (
        "events: 41,201 archived, 0 lost; "
        "finished jobs: 20,000 archived, an unknown number lost: the server does not count them"
    )
    queries = Queries(Query(), Query())
    assert how_far(queries.lastProgress) == {"behind": 60, "lag_s": 2.5}


class Query:
    """A query that is interrupted, or over, after some seconds."""

    def __init__(self, *answers: bool) -> None:
        self._answers = list(answers)
        self.lastProgress = progress(END, NEWEST)
        self.is_stopped = False

    def awaitTermination(self, timeout: int) -> bool:
        if not self._answers:
            raise KeyboardInterrupt
        return self._answers.pop(0)

    def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def archived(monkeypatch: pytest.MonkeyPatch) -> Archived:
    monkeypatch.setattr(spark_archive, "_SAY_EVERY_S", 0)
    clock = Clock()
    some = Archived(clock=clock)
    clock.now_s += 24
    some.add(1200, [])
    return some


def test_people_have_a_line_on_stderr(archived: Archived, capsys: pytest.CaptureFixture[str]):
    assert not watch(Query(False, True), archived)
    told = capsys.readouterr()
    line = "events: 1,200 archived, 0 lost (50 a second, 30 behind, lag 2.5 s)\n"
    assert (told.out, told.err) == ("", line)


def test_before_the_first_batch_it_starts(archived: Archived, capsys: pytest.CaptureFixture[str]):
    query = Query(False, True)
    query.lastProgress = None
    watch(query, Archived())
    assert capsys.readouterr().err == "starting …\n"


def test_programs_have_json_lines_on_stdout(archived: Archived, capsys: pytest.CaptureFixture[str]):
    watch(Query(False, False, True), archived, as_lines=True)
    told = capsys.readouterr()
    facts = {"events": 1200, "lost": 0, "events_per_s": 50.0, "behind": 30, "lag_s": 2.5}
    assert [json.loads(line) for line in told.out.splitlines()] == [facts, facts]
    assert told.err == ""


def test_an_interrupt_stops_the_query_and_is_quiet(
    archived: Archived, capsys: pytest.CaptureFixture[str]
):
    query = Query()
    assert watch(query, archived)
    assert query.is_stopped
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_that_has_ended_spark_as_well_is_no_error(archived: Archived):
    class Gone(Query):
        def stop(self) -> None:
            raise ConnectionError("the JVM is gone")

    assert watch(Gone(), archived)
