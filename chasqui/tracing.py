"""Traces across processes: the context in which a job was added, kept beside it until it is done.

It lies under a key of the job's own, not in its entry: the delayed set has no room for it. So it
survives delays, retries and replays, whoever moves the job, chasquimq included. Only traces that
are recorded are kept. Whatever goes wrong here, the job is added and run all the same.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from chasqui.adding import DELAYED, RELATIVE, Added, AddOptions, Batch, ulids
from chasqui.errors import ChasquiError
from chasqui.keys import Keys
from chasqui.plans import Plans
from chasqui.request import Effect, Plan, commands

logger = logging.getLogger(__name__)

#: How long a context is kept past the job's due time; that of a done job goes at once.
TRACE_TTL_S: Final = 86_400


class Tracing(Protocol):
    """What makes spans; `chasqui.metrics.otel.OtelTracing` does."""

    def sending(
        self, queue: str, job_ids: Sequence[str], /
    ) -> AbstractContextManager[str | None]: ...

    def processing(
        self, queue: str, group: str, jobs: Sequence[Any], carried: Sequence[Sequence[str]], /
    ) -> AbstractContextManager[str | None]: ...


def add(tracing: Tracing | None, plans: Plans, batch: Batch, options: AddOptions) -> Plan[Added]:
    """The plan of an add, with its span around it and its context on the server before the jobs."""
    if tracing is None or not batch.payloads:
        return (yield from plans.add(batch, options))
    at_ms = time.time_ns() // 1_000_000
    ids = batch.ids or [None] * len(batch.payloads)
    # Before the jobs are encoded, so that their keys can be written first.
    drawn = [ulids.next(at_ms) if job_id is None else job_id for job_id in ids]
    batch.ids = list(drawn)
    with tracing.sending(plans.keys.queue, drawn) as context:
        if context is not None:
            try:
                yield _keep(plans.keys, batch, drawn, context, at_ms)
            except ChasquiError as error:
                logger.debug("the trace of %d jobs is not kept: %s", len(drawn), error)
        return (yield from plans.add(batch, options))


def _keep(keys: Keys, batch: Batch, ids: Sequence[str], context: str, at_ms: int) -> Any:
    kinds = batch.kinds or [0] * len(ids)
    dues = batch.dues or [0] * len(ids)
    calls = []
    for job_id, kind, due_ms in zip(ids, kinds, dues, strict=True):
        ahead_ms = due_ms if kind & RELATIVE else due_ms - at_ms
        ttl_s = TRACE_TTL_S + (max(0, ahead_ms) // 1000 if kind & DELAYED else 0)
        # Not over another's: the id may be taken, and this job not added.
        calls.append(("SET", keys.trace(job_id), context, "EX", ttl_s, "NX"))
    return commands(*calls, effect=Effect.IDEMPOTENT, raises=False)
