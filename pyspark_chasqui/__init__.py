"""Lets Spark find the format `chasqui` by name. `chasqui.spark.register` always works.

Spark imports every `pyspark_*` package when it looks for a format, and one that fails hides all
others. So this one never fails.
"""

import contextlib

with contextlib.suppress(Exception):
    from chasqui.spark.source import ChasquiDataSource as DefaultSource  # noqa: F401
