"""What `archive --follow` tells while it goes on."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from chasqui.cli import spark_archive
from chasqui.cli.spark_archive import Archived, how_far, watch


def progress(end: Any, newest: Any, rate: float = 50.0) -> Any:
    source = SimpleNamespace(
        startOffset=None, endOffset=json.dumps(end), latestOffset=json.dumps(newest)
    )
    return SimpleNamespace(
        sources=[source], inputRowsPerSecond=rate, processedRowsPerSecond=70.0, numInputRows=1
    )


END = {"a": {"id": "1000-0", "n": 10}, "b": {"id": "5000-0", "n": 20}}
NEWEST = {"a": {"id": "3500-0", "n": 40}, "b": {"id": "5000-0", "n": 20}}


def test_lag_is_that_of_the_queue_that_is_most_behind():
    assert how_far(progress(END, NEWEST)) == {"events_per_s": 50.0, "behind": 30, "lag_s": 2.5}
    assert how_far(progress(NEWEST, END))["behind"] == 0, "it is asked for at another moment"


def test_what_is_not_known_is_not_told():
    nothing = {"events_per_s": None, "behind": None, "lag_s": None}
    assert how_far(None) == nothing
    assert how_far(progress(None, None, float("nan"))) == {**nothing, "events_per_s": 70.0}
    uncounted = how_far(progress({"a": {"id": "1000-0"}}, {"a": {"id": "2000-0"}}))
    assert (uncounted["behind"], uncounted["lag_s"]) == (None, 1.0)


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
    some = Archived()
    some.add(1200, [])
    return some


def test_people_have_a_line_on_stderr(archived: Archived, capsys: pytest.CaptureFixture[str]):
    assert not watch(Query(False, True), archived)
    told = capsys.readouterr()
    line = "archived 1,200 events; lost 0 (50 a second, 30 behind, lag 2.5 s)\n"
    assert (told.out, told.err) == ("", line)


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
