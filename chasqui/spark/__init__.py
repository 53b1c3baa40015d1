"""Queues as DataFrames: `session()` or `register(spark)`, then `format("chasqui")`.

Importing this imports neither pyspark nor pyarrow; the names below do, when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chasqui.spark.sessions import session as session
    from chasqui.spark.source import ChasquiDataSource as ChasquiDataSource
    from chasqui.spark.source import register as register

_HOMES = {
    "ChasquiDataSource": "source",
    "register": "source",
    "session": "sessions",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"chasqui.spark.{home}"), name)
    globals()[name] = value
    return value
