"""Metrics: a sink that fails hurts nobody, and the sink for tests misses no record."""

import asyncio
import inspect
import logging

import pytest

from chasqui.metrics import (
    DlqRouted,
    JobOutcome,
    LockOutcome,
    MetricsSink,
    NoopSink,
    OutcomeKind,
    PromoterTick,
    ReaderBatch,
    RetryScheduled,
    SafeSink,
    SchedulerTick,
    guard,
)
from chasqui.metrics.testing import InMemorySink

RECORDS = {
    "promoter_tick": PromoterTick(3, 4, 5),
    "promoter_lock_outcome": LockOutcome.ACQUIRED,
    "reader_batch": ReaderBatch(64, 2),
    "job_outcome": JobOutcome(OutcomeKind.OK, 1, 1500, "mail"),
    "retry_scheduled": RetryScheduled(2, 100, "mail"),
    "dlq_routed": DlqRouted("malformed", 0, ""),
    "scheduler_tick": SchedulerTick(7, 2, 1300),
}


def tell(sink: MetricsSink, method: str) -> None:
    getattr(sink, method)(RECORDS[method])


def test_the_sink_has_these_methods_and_no_other():
    methods = [name for name, _ in inspect.getmembers(MetricsSink, inspect.isfunction)]
    assert sorted(methods) == sorted(RECORDS)


@pytest.mark.parametrize("method", RECORDS)
def test_every_method_may_be_left_out(method: str):
    class CountsNothing(MetricsSink):
        pass

    assert getattr(CountsNothing(), method)(RECORDS[method]) is None


@pytest.mark.parametrize("method", RECORDS)
def test_every_record_reaches_the_sink_through_its_guard(method: str):
    sink = InMemorySink()
    tell(guard(sink), method)
    assert sink.all(type(RECORDS[method])) == [RECORDS[method]]


@pytest.mark.parametrize("method", RECORDS)
def test_a_sink_that_raises_is_logged_once_per_kind(method: str, caplog: pytest.LogCaptureFixture):
    def fail(self: MetricsSink, record: object) -> None:
        raise ZeroDivisionError("counting is hard")

    broken = type("Broken", (MetricsSink,), dict.fromkeys(RECORDS, fail))()
    sink = SafeSink(broken)
    with caplog.at_level(logging.ERROR, "chasqui"):
        for _ in range(3):
            tell(sink, method)
    assert len(caplog.records) == 1
    assert "counting is hard" in caplog.text


def test_a_sink_that_was_written_without_the_scheduler_is_not_asked_for_it():
    class Older:
        """Derives from nothing of ours."""

    tell(SafeSink(Older()), "scheduler_tick")  # type: ignore[arg-type]


def test_a_cancelled_sink_still_cancels():
    class Cancelled(MetricsSink):
        def job_outcome(self, outcome: JobOutcome, /) -> None:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        tell(SafeSink(Cancelled()), "job_outcome")


def test_where_nobody_listens_no_record_need_be_made():
    assert guard(None) is None
    assert guard(NoopSink()) is None
    safe = SafeSink(InMemorySink())
    assert guard(safe) is safe


async def test_next_gives_each_record_once_and_misses_none():
    sink = InMemorySink()
    sink.reader_batch(ReaderBatch(1, 0))
    sink.job_outcome(RECORDS["job_outcome"])
    sink.reader_batch(ReaderBatch(2, 0))
    assert await sink.next(ReaderBatch) == ReaderBatch(1, 0)
    assert await sink.next(ReaderBatch) == ReaderBatch(2, 0)
    waiting = asyncio.ensure_future(sink.next(ReaderBatch))
    await asyncio.sleep(0)
    sink.promoter_tick(PromoterTick(0, 0, 0))
    await asyncio.sleep(0)
    assert not waiting.done()
    sink.reader_batch(ReaderBatch(3, 0))
    sink.reader_batch(ReaderBatch(4, 0))
    assert await waiting == ReaderBatch(3, 0)
    assert await sink.next(ReaderBatch) == ReaderBatch(4, 0)


async def test_two_waiters_share_the_records_and_a_cancelled_one_takes_none():
    sink = InMemorySink()
    waiting = [asyncio.ensure_future(sink.next(LockOutcome)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    sink.promoter_lock_outcome(LockOutcome.HELD)
    sink.promoter_lock_outcome(LockOutcome.ACQUIRED)
    assert {await waiting[1], await waiting[2]} == {LockOutcome.HELD, LockOutcome.ACQUIRED}


def test_the_sums():
    sink = InMemorySink()
    assert (sink.last_handler_duration_us, sink.delayed_depth, sink.is_leader) == (None, None, None)
    for kind, duration_us in ((OutcomeKind.OK, 10), (OutcomeKind.ERR, 20), (OutcomeKind.PANIC, 30)):
        sink.job_outcome(JobOutcome(kind, 1, duration_us, "mail"))
    for method in ("promoter_tick", "reader_batch", "promoter_lock_outcome", "retry_scheduled"):
        tell(sink, method)
        tell(sink, method)
    sink.dlq_routed(DlqRouted("malformed", 0, ""))
    sink.dlq_routed(DlqRouted("unrecoverable", 1, "mail"))
    assert (sink.jobs_completed, sink.jobs_failed, sink.jobs_panicked) == (1, 2, 1)
    assert sink.last_handler_duration_us == 30
    assert (sink.total_read, sink.total_reclaimed, sink.total_retries) == (128, 4, 2)
    assert (sink.total_promoted, sink.delayed_depth, sink.is_leader) == (6, 4, True)
    assert (sink.dlq_count(), sink.dlq_count("malformed"), sink.dlq_count("other")) == (2, 1, 0)
