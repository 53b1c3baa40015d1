"""What an archive lacks, out of the offsets of a batch and what was kept of it."""

from datetime import UTC, datetime
from typing import Any

from chasqui.cli.spark_archive import Archived
from chasqui.spark.archiving.losses import Loss, losses_of

START = {"q": {"id": "1000-0", "n": 500, "since": 200}}
END = {"q": {"id": "3000-7", "n": 900, "since": 200, "lost": 20}}


def at(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def found(start: Any, end: Any, **kept: tuple[int, str]) -> list[Loss]:
    return losses_of(start, end, kept, 4)


def test_what_was_gone_before_planning_ends_at_the_first_row():
    (loss,) = found(START, END, q=(380, "2000-0"))
    assert loss == Loss("q", "1000-0", "2000-0", at(1), at(2), 20, 4)


def test_what_went_while_it_was_read_may_be_anywhere_in_the_batch():
    (loss,) = found(START, END, q=(350, "2000-0"))
    assert loss == Loss("q", "1000-0", "3000-7", at(1), at(3), 50, 4)
    (loss,) = found(START, END)
    assert loss == Loss("q", "1000-0", "3000-7", at(1), at(3), 400, 4)


def test_nothing_lost_is_nothing_told():
    assert not found({}, START, q=(300, "1-0"))
    assert not found(START, {**END, "q": {**END["q"], "lost": 0}}, q=(400, "1000-1"))


def test_where_an_archive_begins_there_is_nothing_to_be_behind():
    (loss,) = found({}, START, q=(290, "1-0"))
    assert (loss.after_id, loss.after_ts, loss.lost) == (None, None, 10)
    (loss,) = found({"q": {"id": "0-0", "n": 200}}, START, q=(290, "1-0"))
    assert (loss.after_id, loss.after_ts, loss.lost) == ("0-0", None, 10)


def test_a_stream_that_was_deleted_has_lost_an_unknown_number():
    (loss,) = found(END, START, q=(500, "1-0"))
    assert loss.lost is None
    archived = Archived()
    archived.add(500, [loss])
    assert (archived.lost, archived.has_lost) == (None, True)
    assert str(archived) == "events: 500 archived, an unknown number lost: a stream was deleted"


def test_a_server_that_does_not_count_is_told_of():
    assert not found({"q": {"id": "1-0"}}, {"q": {"id": "2-0"}})
    archived = Archived()
    archived.add(5, None)
    assert (archived.lost, archived.has_lost) == (None, False)
    assert str(archived).endswith("the server does not count them")


def test_batches_and_queues_add_up():
    archived = Archived()
    archived.add(380, found(START, END, q=(380, "2000-0")))
    archived.add(100, [])
    assert (archived.rows, archived.lost, archived.has_lost) == (480, 20, True)
    assert str(archived) == "events: 480 archived, 20 lost"
