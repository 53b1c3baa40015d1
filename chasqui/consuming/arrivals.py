"""Delivered entries: most wait for a slot, some are buried, some are in hand already."""

import logging
from collections.abc import Sequence

from chasqui._core.entry import Entry
from chasqui.consuming.failures import Failures
from chasqui.consuming.fate import GONE, Bury, Limits, Run, on_arrival
from chasqui.consuming.held import Held
from chasqui.consuming.throttled_log import ThrottledLog
from chasqui.managing.consumers import HANDED_BACK_MS
from chasqui.metrics import MetricsSink, ReaderBatch
from chasqui.model.words import count, some

logger = logging.getLogger(__name__)


class Arrivals:
    """Sorts what a read or a takeover brings."""

    def __init__(
        self,
        held: Held,
        limits: Limits,
        failures: Failures,
        metrics: MetricsSink | None,
        log: ThrottledLog,
    ) -> None:
        self._held = held
        self._limits = limits
        self._failures = failures
        self._metrics = metrics
        self._log = log

    def sort(self, entries: Sequence[Entry | None], is_fresh: bool) -> None:
        """Let entries wait for a slot, or bury those that cannot run. Entries that are not fresh
        were assigned to us before, and nothing here holds them."""
        held = self._held
        waiting = held.waiting
        are_above = held.are_above(entries) or not is_fresh
        reclaimed = 0
        in_hand: set[bytes] | None = None
        gone: list[bytes] = []
        taken_over: list[Entry] = []
        for entry in entries:
            if entry is None:
                continue
            if are_above and entry.is_new:
                waiting.append(entry)
                continue
            if entry.fault == GONE:
                gone.append(entry.id)
                continue
            if is_fresh and (entry.idle_ms or not are_above):
                reclaimed += entry.deliveries > 0
                if in_hand is None:
                    in_hand = set(held.ids())
                if 0 < entry.idle_ms < HANDED_BACK_MS and entry.id not in in_hand:
                    taken_over.append(entry)
                if not are_above and entry.id in in_hand:
                    held.lose_to(entry)
                if entry.id in held.lost and held.replace_lost_copy(entry.id):
                    in_hand.discard(entry.id)
            is_in_hand = in_hand is not None and entry.id in in_hand
            verdict = on_arrival(entry, self._limits, is_in_hand=is_in_hand)
            if isinstance(verdict, Run):
                waiting.append(entry)
            elif isinstance(verdict, Bury):
                self._failures.bury(entry, verdict, attempt=0)
        if gone:
            self._log_gone(gone)
        if taken_over:
            self._log_taken_over(taken_over)
        if self._metrics is not None and entries:
            self._metrics.reader_batch(ReaderBatch(len(entries), reclaimed))

    def _log_gone(self, gone: list[bytes]) -> None:
        logger.error(
            "queue %s: %d entries were deleted from the stream while they were pending, "
            "and their jobs are lost: %s",
            self._log.queue,
            len(gone),
            ", ".join(entry_id.decode() for entry_id in gone[:5]),
            extra={"queue": self._log.queue, "entries": len(gone)},
        )

    def _log_taken_over(self, entries: list[Entry]) -> None:
        ids = [entry.job_id or entry.id.decode() for entry in entries]
        self._log.warning(
            "queue %s: took over %s from workers that were lost: %s",
            self._log.queue,
            count(len(ids), "job"),
            some(ids),
            jobs=len(ids),
        )
