"""Queues as DataFrames: `session()` or `register(spark)`, then `format("chasqui")`.

Importing this imports neither pyspark nor pyarrow; the first use of a name below does.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chasqui.spark.api import enqueue as enqueue
    from chasqui.spark.api import follow as follow
    from chasqui.spark.api import read as read
    from chasqui.spark.api import replay as replay
    from chasqui.spark.api import with_results as with_results
    from chasqui.spark.archiving.archive import archive as archive
    from chasqui.spark.archiving.archive import read_archive as read_archive
    from chasqui.spark.archiving.archive import read_losses as read_losses
    from chasqui.spark.archiving.compacting import compact as compact
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
    from chasqui.spark.reporting.signatures import triage as triage
    from chasqui.spark.reporting.signatures import with_signature as with_signature
    from chasqui.spark.sessions import session as session
    from chasqui.spark.source import ChasquiDataSource as ChasquiDataSource
    from chasqui.spark.source import register as register
    from chasqui.spark.writing.writers import Enqueued as Enqueued

#: Per module its public names. None may be the name of a module or folder beside this file: an
#: import of that one would hide it.
_NAMES = {
    "api": ("enqueue", "follow", "read", "replay", "with_results"),
    "archiving.archive": ("archive", "read_archive", "read_losses"),
    "archiving.compacting": ("compact",),
    "consuming.failing": ("fail_jobs",),
    "reporting.html": ("page",),
    "reporting.report": ("gather", "kept_events", "report_archive", "report_queue"),
    "reporting.rollups": ("funnel", "merge", "rollup", "waits", "with_percentiles"),
    "reporting.signatures": ("triage", "with_signature"),
    "sessions": ("session",),
    "source": ("ChasquiDataSource", "register"),
    "writing.writers": ("Enqueued",),
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
