"""Traces across processes: jobs carry the trace context in which they were added.

In the stream and in the dead-letter queue it is a field of the entry, W3C's `traceparent`. The
delayed set has no room for it: there it lies under a key of its own until the promoter puts it
back. Only recorded traces travel; other jobs are the same as without tracing.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from chasqui._core.entry import Entry
from chasqui.model.keys import RUN_BEFORE, TRACEPARENT

logger = logging.getLogger(__name__)

# Any program may write the field, and we copy it from key to key.
_CONTEXT = re.compile(rb"[!-~]{1,128}")


class Tracing(Protocol):
    """Makes spans, as `chasqui.metrics.otel.OtelTracing` does."""

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
    """A span around the `with` block. What the span itself raises is logged, once per type."""
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
        logger.error("tracing failed; logged once per type", exc_info=error, extra={"error": kind})


#: The types of errors in tracing that were logged.
_told: set[str] = set()


def check_tracing(tracing: object) -> None:
    """Raise TypeError for an object that makes no spans."""
    if tracing is not None and not callable(getattr(tracing, "sending", None)):
        raise TypeError(f"tracing must be a Tracing or None, got {type(tracing).__name__}")


def carried_by(entry: Entry) -> list[bytes]:
    """The context in which an entry's job was added, then that of its last run."""
    fields = entry.extra
    if fields is None:
        return []
    contexts = [fields.get(TRACEPARENT, b""), fields.get(RUN_BEFORE, b"")]
    if not _CONTEXT.fullmatch(contexts[0]):
        return []
    return contexts if _CONTEXT.fullmatch(contexts[1]) else contexts[:1]
