"""Workers that count in every way there is: `python -m chasqui worker tests.crash.counting:make`.

Each run and each record of the sink goes into the ledger, where a kill -9 cannot undo it; a process
that ends in peace leaves what Prometheus would have scraped last.
"""

import atexit
import json
import os
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from chasqui import Job, UnrecoverableError, Worker
from chasqui.managing import retention
from chasqui.metrics import DlqRouted, JobOutcome, OutcomeKind, PromoterTick, RetryScheduled
from chasqui.metrics.prometheus import PrometheusSink
from tests.crash.workers import SETTINGS
from tests.ledger import Ledger
from tests.metrics.test_prometheus import Both

#: How often jobs of a name fail before they are done.
FAILS = {"once": 1, "twice": 2}


def make() -> Worker:
    """The worker that the environment describes. It keeps all its events, for who reads them shares
    two cores with the workers, and what is trimmed before he comes to it cannot be counted."""
    retention.EVENTS_KEPT = 10_000_000
    told = json.loads(os.environ[SETTINGS])
    folder, who = Path(told["folder"]), told["who"]
    ledger = Ledger(folder)
    registry = CollectorRegistry()

    async def handler(job: Job) -> None:
        ledger.write("start", job.data["n"], who)
        if job.name == "dies":
            ledger.write("died", job.data["n"], who)
            raise UnrecoverableError("as told")
        if job.attempt < FAILS.get(job.name, 0):
            ledger.write("fail", job.data["n"], who)
            raise RuntimeError("as told")
        ledger.write("end", job.data["n"], who)

    atexit.register(lambda: (folder / f"{who}.prom").write_bytes(generate_latest(registry)))
    sink = Written(PrometheusSink(registry=registry), ledger, who)
    return Worker(told["queue"], handler, consumer_id=who, metrics=sink, **told["options"])


class Written(Both):
    """Writes its records down."""

    def __init__(self, other: PrometheusSink, ledger: Ledger, who: str) -> None:
        super().__init__(other)
        self._ledger = ledger
        self._who = who

    def _keep(self, record: Any) -> None:
        super()._keep(record)
        if isinstance(record, JobOutcome):
            kind = "completed" if record.kind is OutcomeKind.OK else "failed"
            self._ledger.write(kind, record.attempt, self._who)
        elif isinstance(record, RetryScheduled):
            self._ledger.write("retry", record.attempt, self._who)
        elif isinstance(record, DlqRouted):
            self._ledger.write("dlq", record.attempt, self._who)
        elif isinstance(record, PromoterTick) and record.promoted:
            self._ledger.write("promoted", record.promoted, self._who)
