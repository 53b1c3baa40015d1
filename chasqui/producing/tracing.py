"""Traces across processes: the context in which jobs were added travels with them.

In the stream and in the dead-letter queue it is a field of the entry, W3C's `traceparent`. The
delayed set has no room for it: there it lies under a key beside the job, until the promoter puts
it back. Only traces that are recorded travel; jobs without one are what they are without tracing.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from chasqui._core.entry import Entry
from chasqui.adding import Added, AddOptions, Batch
from chasqui.model.keys import RUN_BEFORE, TRACEPARENT
from chasqui.plans import Plans
from chasqui.transport.request import Plan

logger = logging.getLogger(__name__)

# Anybody may write a field, and what is in this one goes from place to place.
_CONTEXT = re.compile(rb"[!-~]{1,128}")


class Tracing(Protocol):
    """What makes spans; `chasqui.metrics.otel.OtelTracing` does."""

    def sending(
        self, queue: str, job_ids: Sequence[str], /
    ) -> AbstractContextManager[str | None]: ...

    def processing(
        self, queue: str, group: str, jobs: Sequence[Any], carried: Sequence[Sequence[str]], /
    ) -> AbstractContextManager[str | None]: ...


@contextmanager
def safely(
    make: Callable[..., AbstractContextManager[str | None]], *arguments: Any
) -> Iterator[str | None]:
    """A span around what is done. Whatever the span raises is logged, once, and goes no further."""
    try:
        span = make(*arguments)
        context = span.__enter__()
    except Exception as error:
        _complain(error)
        yield None
        return
    raised: BaseException | None = None
    try:
        yield context
    except BaseException as error:
        raised = error
        raise
    finally:
        try:
            trace = None if raised is None else raised.__traceback__
            span.__exit__(None if raised is None else type(raised), raised, trace)
        except Exception as error:
            if error is not raised:
                _complain(error)


def _complain(error: Exception) -> None:
    kind = type(error).__name__
    if kind not in _told:
        _told.add(kind)
        logger.error("tracing failed; told once", exc_info=error, extra={"error": kind})


#: The kinds of errors in tracing that were logged.
_told: set[str] = set()


def check_tracing(tracing: object) -> None:
    """Raise TypeError for what makes no spans."""
    if tracing is not None and not callable(getattr(tracing, "sending", None)):
        raise TypeError(f"tracing must be a Tracing or None, got {type(tracing).__name__}")


def add(tracing: Tracing | None, plans: Plans, batch: Batch, options: AddOptions) -> Plan[Added]:
    """The plan of an add, with its span around it and its context on the jobs."""
    if tracing is None or not batch.payloads:
        return plans.add(batch, options)
    return _add_traced(tracing, plans, batch, options)


def _add_traced(tracing: Tracing, plans: Plans, batch: Batch, options: AddOptions) -> Plan[Added]:
    count = len(batch.payloads)
    # Before the jobs are encoded, so that the span can name them.
    ids = batch.draw_ids(time.time_ns() // 1_000_000)
    with safely(tracing.sending, plans.keys.queue, ids) as context:
        if context is not None:
            batch.trace = context
            batch.kinds = batch.kinds or [0] * count
            batch.dues = batch.dues or [0] * count
        return (yield from plans.add(batch, options))


def carried_by(entry: Entry) -> list[bytes]:
    """The context in which an entry's job was added and, behind it, that of its last run."""
    fields = entry.extra
    if fields is None:
        return []
    contexts = [fields.get(TRACEPARENT, b""), fields.get(RUN_BEFORE, b"")]
    if not _CONTEXT.fullmatch(contexts[0]):
        return []
    return contexts if _CONTEXT.fullmatch(contexts[1]) else contexts[:1]
