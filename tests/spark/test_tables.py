"""Delta Lake and Iceberg: archives and exports in them, each batch once, without jars."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F

from chasqui.errors import ChasquiError, NotSupportedError
from chasqui.spark.archiving.tables import (
    SessionDelta,
    SessionIceberg,
    Txn,
    split_location,
    tables_of,
)
from tests.cli.conftest import call
from tests.servers import Server
from tests.spark.conftest import unavailable
from tests.spark.direct import Redis


@pytest.fixture(params=["delta", "iceberg"])
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A format that the driver writes; Iceberg with a catalog in a file."""
    found: str = request.param
    package = {"delta": "deltalake", "iceberg": "pyiceberg"}[found]
    if importlib.util.find_spec(package) is None:
        unavailable(f"there is no {package} here")
    for name, value in {
        "TYPE": "sql",
        "URI": f"sqlite:///{tmp_path}/catalog.db",
        "WAREHOUSE": f"file://{tmp_path}/warehouse",
    }.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__TESTING__{name}", value)
    if found == "iceberg":
        import pyiceberg.catalog
        from pyiceberg.utils.config import Config

        # It looks at the environment when it is imported, which another test may have done.
        monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
    return found


def place(kind: str, tmp_path: Path, name: str) -> str:
    return f"delta:{tmp_path / name}" if kind == "delta" else f"iceberg:testing.{name}"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("lake", ("parquet", "lake")),
        ("parquet:lake", ("parquet", "lake")),
        ("s3a://bucket/lake", ("parquet", "s3a://bucket/lake")),
        ("delta:s3a://bucket/lake", ("delta", "s3a://bucket/lake")),
        ("iceberg:prod.orders", ("iceberg", "prod.orders")),
    ],
)
def test_a_place_begins_with_its_format(text: str, parts: tuple[str, str]):
    assert split_location(text) == parts


class Session:
    """A session with settings, which notes what it is asked to do."""

    def __init__(self, **conf: str) -> None:
        self.done: list[Any] = []
        given = {name.replace("__", "."): value for name, value in conf.items()}
        self.conf = SimpleNamespace(get=lambda name, default=None: given.get(name, default))


def test_a_session_that_has_the_format_is_asked(monkeypatch: pytest.MonkeyPatch):
    delta = Session(spark__sql__extensions="io.delta.sql.DeltaSparkSessionExtension")
    assert isinstance(tables_of(delta, "delta", "lake"), SessionDelta)
    iceberg = Session(spark__sql__catalog__prod="org.apache.iceberg.spark.SparkCatalog")
    assert isinstance(tables_of(iceberg, "iceberg", "prod.orders"), SessionIceberg)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("delta", ("chasqui[delta]", "io.delta:delta-spark_2.13", "DeltaSparkSessionExtension")),
        ("iceberg", ("chasqui[iceberg]", "iceberg-spark-runtime", "spark.sql.catalog.prod")),
    ],
)
def test_what_is_missing_is_told_by_name(
    kind: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotSupportedError) as caught:
        tables_of(Session(), kind, "prod.orders")
    for word in words:
        assert word in str(caught.value)


def test_iceberg_needs_the_name_of_a_catalog():
    with pytest.raises(ValueError, match=r"iceberg: takes catalog\.namespace\.table"):
        tables_of(Session(), "iceberg", "orders")


class Written:
    """A DataFrame that notes how it is written, whatever the words are called."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    @property
    def write(self) -> "Written":
        return self

    def __getattr__(self, name: str) -> Any:
        def note(*words: Any, **named: Any) -> "Written":
            self.done.append((name, *words, *named.items()))
            return self

        return note


def test_a_session_with_delta_names_the_transaction():
    df = Written()
    assert SessionDelta(None).append("lake/events", df, Txn("query", 7)) is None
    assert df.done == [
        ("format", "delta"),
        ("mode", "append"),
        ("options", ("txnAppId", "query"), ("txnVersion", 7)),
        ("save", "lake/events"),
    ]


@pytest.mark.parametrize(
    ("exists", "done", "last"),
    [(False, None, ["create"]), (True, None, ["append"]), (True, 6, ["append"]), (True, 7, [])],
)
def test_a_session_with_iceberg_appends_a_batch_once(exists: bool, done: Any, last: list[str]):
    asked: list[str] = []

    def sql(query: str) -> Any:
        asked.append(query)
        return SimpleNamespace(first=lambda: (done,))

    catalog = SimpleNamespace(tableExists=lambda name: exists)
    df = Written()
    tables = SessionIceberg(SimpleNamespace(catalog=catalog, sql=sql))
    tables.append("prod.orders.events", df, Txn("query", 7))
    table = "`prod`.`orders`.`events`"
    assert df.done[:2] == [
        ("writeTo", table),
        ("option", "snapshot-property.chasqui.txn.query", "7"),
    ]
    assert [name for name, *_ in df.done[2:]] == last
    assert all(f"FROM {table}.snapshots" in query for query in asked)


def test_the_archive_holds_every_event_once(
    spark: Any, redis_86: Server, queue_name: str, tmp_path: Path, kind: str
):
    from chasqui.spark import compact, read, read_archive, read_losses
    from chasqui.spark.archiving.archive import Archive
    from chasqui.spark.archiving.folders import Folder

    Redis(redis_86.url, queue_name).add_events(30)
    df = read(spark, "events", queue_name, url=redis_86.url).cache()
    ids = sorted(row["entry_id"] for row in df.select("entry_id").collect())
    lake, log = place(kind, tmp_path, "lake"), tmp_path / "ck"
    (log / "offsets").mkdir(parents=True)
    (log / "metadata").write_text('{"id": "some-query"}')
    archive = Archive(spark, lake, str(log))

    def write(rows: Any, batch: int, until: int) -> tuple[int, list[int | None]]:
        """A batch, and the same once more, as if the driver had died behind its write."""
        end = {queue_name: {"id": ids[until - 1], "n": until, "since": 0}}
        (log / "offsets" / f"{batch}").write_text(f"v1\n{{}}\n{json.dumps(end)}")
        written, losses = archive.write(rows, batch)
        Folder(spark, str(log)).delete("written")
        again = archive.write(rows.limit(1), batch)
        assert again == (written, losses)
        assert archive.write(rows, batch) == (0, []), "it is known to be whole"
        return written, [loss.lost for loss in losses or ()]

    assert write(df.where(F.col("entry_id").isin(ids[:20])), 0, 20) == (20, [])
    assert read_losses(spark, lake).collect() == []
    assert write(df.where(F.col("entry_id").isin(ids[23:])), 1, 30) == (7, [3])
    assert write(df.where("false"), 2, 30) == (0, [])
    rows = read_archive(spark, lake)
    kept = sorted(row["entry_id"] for row in rows.collect())
    assert kept == [*ids[:20], *ids[23:]]
    (loss,) = read_losses(spark, lake).collect()
    assert (loss["queue"], loss["after_id"], loss["lost"]) == (queue_name, ids[19], 3)
    assert dict(rows.dtypes) == {**dict(df.dtypes), "date": "date"}
    with pytest.raises(NotSupportedError, match="only an archive in Parquet is compacted"):
        compact(spark, lake)
    with pytest.raises(ChasquiError, match="there is no"):
        read_archive(spark, f"{lake}er")


def test_a_table_is_exported_and_enqueued(
    spark: Any, redis_86: Server, queue_name: str, tmp_path: Path, kind: str
):
    redis = Redis(redis_86.url, queue_name)
    redis.add_events(30)
    there = place(kind, tmp_path, "out" if kind == "delta" else "dead.out")
    words = ("--queue", queue_name, "--table", "events", "--to", there, "--json")
    ran = call("spark", "export", *words, url=redis_86.url)
    assert (ran.code, ran.json) == (0, {"rows": 30})
    _, path = split_location(there)
    with pytest.raises((ChasquiError, AnalysisException), match="already"):
        tables_of(spark, kind, path).create(path, spark.range(1))
    words = ("--from", there, "--queue", f"{queue_name}-in", "--name", "again", "--json")
    ran = call("spark", "enqueue", *words, url=redis_86.url)
    assert ran.json["rows"] == 30


def test_an_archive_in_iceberg_needs_a_checkpoint():
    from chasqui.spark import archive

    session = Session(spark__sql__catalog__prod="org.apache.iceberg.spark.SparkCatalog")
    with pytest.raises(ValueError, match="needs a checkpoint"):
        archive(session, "q", "iceberg:prod.orders")
