"""Queues as DataFrames: `session()` or `register(spark)`, then `format("chasqui")`.

Importing this imports neither pyspark nor pyarrow; the names below do, when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chasqui.spark.archiving.archive import archive as archive
    from chasqui.spark.archiving.archive import compact as compact
    from chasqui.spark.archiving.archive import read_archive as read_archive
    from chasqui.spark.archiving.archive import read_losses as read_losses
    from chasqui.spark.consuming.failing import fail_jobs as fail_jobs
    from chasqui.spark.reporting.html import page as page
    from chasqui.spark.reporting.report import gather as gather
    from chasqui.spark.reporting.report import kept_events as kept_events
    from chasqui.spark.reporting.report import report_archive as report_archive
    from chasqui.spark.reporting.report import report_queue as report_queue
    from chasqui.spark.reporting.rollups import funnel as funnel
    from chasqui.spark.reporting.rollups import merge as merge
    from chasqui.spark.reporting.rollups import rollup as rollup
    from chasqui.spark.reporting.rollups import waits as waits
    from chasqui.spark.reporting.rollups import with_percentiles as with_percentiles
    from chasqui.spark.sessions import session as session
    from chasqui.spark.reporting.signatures import triage as triage
    from chasqui.spark.reporting.signatures import with_signature as with_signature
    from chasqui.spark.writing.writers import Enqueued as Enqueued
    from chasqui.spark.source import ChasquiDataSource as ChasquiDataSource
    from chasqui.spark.source import register as register
    from chasqui.spark.api import enqueue as enqueue
    from chasqui.spark.api import follow as follow
    from chasqui.spark.api import read as read
    from chasqui.spark.api import replay as replay
    from chasqui.spark.api import with_results as with_results

#: Per module the public names in it. A name must not be that of a module: it would hide it.
_NAMES = {
    "archiving": ("archive", "compact", "read_archive", "read_losses"),
    "failing": ("fail_jobs",),
    "html": ("page",),
    "reports": ("gather", "kept_events", "report_archive", "report_queue"),
    "rollups": ("funnel", "merge", "rollup", "waits", "with_percentiles"),
    "sessions": ("session",),
    "sink": ("Enqueued",),
    "source": ("ChasquiDataSource", "register"),
    "signatures": ("triage", "with_signature"),
    "verbs": ("enqueue", "follow", "read", "replay", "with_results"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"chasqui.spark.{home}"), name)
    globals()[name] = value
    return value
