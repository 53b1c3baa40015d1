"""The Spark pipeline against plain clients, in one run: `python -m bench.spark --help`.

Everything is measured in rounds, each of which does all of it, and the median is told; the ratios
mean more than the rates. Prints a table in Markdown; `--publish` puts it into bench/README.md, and
what it was made of beside the page of the other benchmarks.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import hiredis
import redis

from bench.spark_live import live
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.spark import enqueue, follow, read, session
from chasqui.spark.options import Options
from chasqui.spark.reading.decoding import EventDecoder
from chasqui.spark.reading.pages import BATCH_ROWS
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect, Request, commands
from tests.servers import Server
from tests.spark.direct import schema_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "bench" / "README.md"
RAW = ROOT / "docs" / "performance"
GROWTH = RAW / "spark-scale.json"
PAYLOAD_BYTES = 35
TASKS = 2


class Bench:
    """One server, one session, and what was measured on them."""

    def __init__(self, server: Server, spark: Any, rows: int) -> None:
        self.server = server
        self.spark = spark
        self.rows = rows
        self.rates: dict[str, list[float]] = {}
        #: Seconds of processors that Spark's processes took for a row, in millionths.
        self.costs: dict[str, list[float]] = {}
        self._number = 0

    def fresh(self) -> Keys:
        """The keys of a queue that nobody has used."""
        self._number += 1
        return Keys(f"bench-{self._number}")

    @contextlib.contextmanager
    def timed(self, what: str, rows: int | None = None) -> Iterator[None]:
        started_s, used_s = time.perf_counter(), used_by_spark_s()
        yield
        seconds = time.perf_counter() - started_s
        self.rates.setdefault(what, []).append((rows or self.rows) / seconds)
        cost = 1e6 * (used_by_spark_s() - used_s) / (rows or self.rows)
        self.costs.setdefault(what, []).append(cost)

    def median(self, what: str) -> float:
        return statistics.median(self.rates[what])

    def cost(self, what: str) -> float:
        return statistics.median(self.costs[what])

    def forget(self, keys: Keys) -> None:
        with redis.Redis.from_url(self.server.url) as client:
            client.unlink(keys.stream, keys.events)

    # ── Plain clients ───────────────────────────────────────────────────────────────────────────

    def raw_xadd(self) -> None:
        """Packed by hiredis, sent over a bare socket, a thousand at a time."""
        keys, envelope = self.fresh(), b"x" * (PAYLOAD_BYTES + 50)
        with (
            socket.create_connection(Endpoint.parse(self.server.url).hosts[0]) as sock,
            self.timed("raw XADD"),
        ):
            reader = hiredis.Reader()
            for _ in range(self.rows // 1000):
                sock.sendall(thousand_xadds(keys, envelope))
                left = 1000
                while left:
                    reader.feed(sock.recv(1 << 18))
                    while reader.gets() is not False:
                        left -= 1
        self.forget(keys)

    def raw_xadd_overlapped(self) -> None:
        """The same over our connection, which sends the next thousand before these are answered."""
        keys, envelope = self.fresh(), b"x" * (PAYLOAD_BYTES + 50)
        connection = BlockingConnection(Endpoint.parse(self.server.url), key=keys.stream)

        def plan() -> Any:
            yield (
                Request(thousand_xadds(keys, envelope), Effect.ONCE, count=1000)
                for _ in range(self.rows // 1000)
            )

        with self.timed("raw XADD, overlapped"):
            connection.run(plan())
        connection.close()
        self.forget(keys)

    def redis_py_xadd(self) -> None:
        keys, envelope = self.fresh(), b"x" * (PAYLOAD_BYTES + 50)
        with redis.Redis.from_url(self.server.url) as client, self.timed("redis-py XADD"):
            for _ in range(self.rows // 1000):
                pipe = client.pipeline(transaction=False)
                for _ in range(1000):
                    pipe.xadd(keys.stream, {b"d": envelope, b"n": b"mail"})
                pipe.execute()
        self.forget(keys)

    def redis_py_xrange(self, keys: Keys) -> None:
        with redis.Redis.from_url(self.server.url) as client, self.timed("redis-py XRANGE"):
            after: Any = "-"
            while page := client.xrange(keys.stream, after, "+", 5000):
                after = b"(" + page[-1][0]

    def events_decoded(self, keys: Keys) -> None:
        options = Options.parse({"queue": keys.queue, "table": "events"}, "r")
        decoder = EventDecoder(schema_of(options))
        connection = BlockingConnection(Endpoint.parse(self.server.url), key=keys.stream)

        def page(after: str, builder: Any) -> Any:
            words = ("XRANGE", keys.events, f"({after}", "+", "COUNT", 1000)
            return connection.call(commands(words, effect=Effect.READ, builder=builder))

        with self.timed("raw events"):
            after = "0-0"
            while found := page(after, None):
                after = found[-1][0].decode()
        builder, rows = decoder.builder(), 0
        with self.timed("decoded events"):
            after, count = "0-0", 1
            while count:
                count, newest = page(after, builder)
                if builder.rows >= BATCH_ROWS or not count:
                    rows += decoder.batch("q", builder.take()).num_rows
                after = newest.decode() if count else after
        assert rows == self.rows
        connection.close()

    # ── Spark ───────────────────────────────────────────────────────────────────────────────────

    def data(self, rows: int, tasks: int) -> Any:
        text = "x" * (PAYLOAD_BYTES - 10)
        df = self.spark.range(0, rows, 1, tasks)
        return df.selectExpr("id as n", f"'{text}' as t", "'mail' as name")

    def orders(self, rows: int, tasks: int) -> Any:
        """Rows with structs, arrays and maps in them, moments and decimals."""
        return self.spark.range(0, rows, 1, tasks).selectExpr(
            "id as n",
            "timestamp_seconds(id) as at",
            "named_struct('id', id, 'name', 'ada', 'tags', array('a', 'b', 'c')) as customer",
            "transform(sequence(0, 2), i -> named_struct('sku', concat('sku-', i), 'qty', i, "
            "'price', cast(i * 1.5 as decimal(10, 2)))) as items",
            "map('k1', 'v1', 'k2', 'v2') as labels",
            "'mail' as name",
        )

    def write(
        self,
        what: str,
        delivery: str,
        rows: int | None = None,
        tasks: int = TASKS,
        *,
        is_nested: bool = False,
    ) -> Keys:
        keys, rows = self.fresh(), rows or self.rows
        df = (self.orders if is_nested else self.data)(rows, tasks)
        with self.timed(what, rows):
            enqueue(df, keys.queue, url=self.server.url, delivery=delivery, maxBacklog=10**8)
        return keys

    def json_xadd(self, what: str, *, is_nested: bool = False) -> None:
        """What one writes without us: Spark makes JSON, tasks add it through redis-py."""
        keys, url = self.fresh(), self.server.url
        df = (self.orders if is_nested else self.data)(self.rows, TASKS)
        stream = keys.stream

        def send(rows: Any) -> None:
            with redis.Redis.from_url(url) as client:
                for thousand in iter(lambda: list(islice(rows, 1000)), []):
                    pipe = client.pipeline(transaction=False)
                    for row in thousand:
                        pipe.xadd(stream, {b"d": row.d, b"n": b"mail"})
                    pipe.execute()

        with self.timed(what):
            df.selectExpr("to_json(struct(*)) as d").foreachPartition(send)
        self.forget(keys)

    def read(
        self, what: str, keys: Keys, rows: int | None = None, tasks: int = TASKS, **more: Any
    ) -> None:
        rows = rows or self.rows
        given = {"url": self.server.url, "minPartitions": tasks, "maxRecordsPerPartition": rows}
        df = read(self.spark, "jobs", keys.queue, **{**given, **more})
        with self.timed(what, rows):
            df.write.format("noop").mode("append").save()

    def add_events(self, rows: int) -> Keys:
        keys = self.fresh()
        connection = BlockingConnection(Endpoint.parse(self.server.url), key=keys.stream)

        head = ("XADD", keys.events, "*", "e", "completed", "id", "01ARZ3NDEKTSV4RRFFQ69G5FAV")
        tail = ("ts", 1_794_797_194_831, "n", "mail", "attempt", 1, "duration_us")
        thousand = [(*head, *tail, i) for i in range(1000)]

        def plan() -> Any:
            yield (commands(*thousand, effect=Effect.ONCE) for _ in range(rows // 1000))

        connection.run(plan())
        connection.close()
        return keys

    def micro_batches(self, keys: Keys, size: int) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            events = follow(
                self.spark,
                "events",
                keys.queue,
                url=self.server.url,
                startingOffsets="earliest",
                maxOffsetsPerTrigger=size,
            )
            query = (
                events.writeStream.format("noop")
                .option("checkpointLocation", folder)
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
            return list(query.recentProgress)[2:]


def used_by_spark_s() -> float:
    """The processor time of this process and all below it: the JVM and its Python workers."""
    total, ticks, found = 0, os.sysconf("SC_CLK_TCK"), [os.getpid()]
    while found:
        pid = found.pop()
        with contextlib.suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and Path(f"/proc/{pid}/comm").read_text() != "redis-server\n":
                total += sum(map(int, fields[11:15]))  # its own, and of children that have ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return total / ticks


def thousand_xadds(keys: Keys, envelope: bytes) -> bytes:
    pack = hiredis.pack_command
    return b"".join(
        pack(("XADD", keys.stream, "*", "d", envelope, "n", "mail")) for _ in range(1000)
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.spark", description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--live", action="store_true", help="only what live workers feel")
    parser.add_argument("--scale", default="", help="only the growth table, with these rows")
    parser.add_argument("--publish", action="store_true", help="keep the tables and the raw rows")
    asked = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))
    )
    spark = session(
        "local[2]", conf={"spark.log.level": "OFF", "spark.sql.shuffle.partitions": "2"}
    )
    with Server("redis-8.6") as server:
        bench = Bench(server, spark, asked.rows)
        if asked.scale:
            sizes = [int(one) for one in asked.scale.split(",")]
            name, (text, raw) = "scale", scale(bench, sizes)
        elif asked.live:
            name, (text, raw) = "live", live(bench, asked.rounds)
        else:
            name, (text, raw) = "ratios", measure(bench, asked.rounds)
    spark.stop()
    print(text)
    if asked.publish:
        publish(name, text, {"rows": asked.rows, "rounds": asked.rounds, **raw})
    return 0


def publish(name: str, text: str, raw: dict[str, Any]) -> None:
    """Put a table into the page, and what it was made of beside it."""
    about = {"at": time.strftime("%Y-%m-%d %H:%M"), "cores": os.cpu_count(), **raw}
    (RAW / f"spark-{name}.json").write_text(json.dumps(about, indent=1) + "\n")
    begin, end = (f"<!-- {word} bench.spark {name} -->" for word in ("begin", "end"))
    before, _, rest = PAGE.read_text().partition(begin)
    PAGE.write_text(f"{before}{begin}\n{text}{end}{rest.partition(end)[2]}")


def measure(bench: Bench, rounds: int) -> tuple[str, dict[str, Any]]:
    for delivery in ("at_least_once", "exactly_once") * 2:  # classes loaded, code compiled
        keys = bench.write("warm", delivery)
        bench.read("warm", keys, serverShare=1)
        bench.forget(keys)
    for is_nested in (False, True):
        bench.json_xadd("warm", is_nested=is_nested)
        bench.forget(bench.write("warm", "exactly_once", is_nested=is_nested))
    del bench.rates["warm"], bench.costs["warm"]
    events = bench.add_events(bench.rows)
    for i in range(rounds):
        print(f"round {i + 1} of {rounds}", file=sys.stderr, flush=True)
        bench.raw_xadd()
        bench.raw_xadd_overlapped()
        bench.forget(bench.write("direct write", "at_least_once"))
        bench.redis_py_xadd()
        bench.json_xadd("to_json and redis-py")
        bench.forget(bench.write("direct write, nested", "at_least_once", is_nested=True))
        bench.json_xadd("to_json and redis-py, nested", is_nested=True)
        bench.forget(bench.write("exactly-once write, nested", "exactly_once", is_nested=True))
        keys = bench.write("exactly-once write", "exactly_once")
        bench.redis_py_xrange(keys)
        bench.read("Spark read", keys)
        bench.read("Spark read, full speed", keys, serverShare=1)
        bench.forget(keys)
        bench.events_decoded(events)
    many = bench.add_events(350_000)
    batches = bench.micro_batches(many, 50_000)
    bench.forget(many)
    planning = statistics.median(
        sum(one.durationMs.get(part, 0) for part in ("latestOffset", "queryPlanning", "getBatch"))
        / one.durationMs["triggerExecution"]
        for one in batches
    )
    small = bench.add_events(10_000)
    fixed_s = statistics.median(
        one.durationMs["triggerExecution"] / 1000 for one in bench.micro_batches(small, 1000)
    )
    r = bench.median
    by_hand, nested_by_hand = "to_json and redis-py", "to_json and redis-py, nested"
    rows = [
        ("direct write, 2 tasks / raw XADD", r("direct write") / r("raw XADD"), "at least 1.0"),
        ("... / raw XADD, overlapped", r("direct write") / r("raw XADD, overlapped"), ""),
        (
            "exactly-once / direct write",
            r("exactly-once write") / r("direct write"),
            "at least 0.8",
        ),
        (
            "any write / redis-py pipeline",
            min(r("exactly-once write"), r("direct write")) / r("redis-py XADD"),
            "at least 2",
        ),
        ("direct write / to_json and redis-py", r("direct write") / r(by_hand), "at least 1.0"),
        (
            "... of nested rows",
            r("direct write, nested") / r(nested_by_hand),
            "at least 1.0",
        ),
        (
            "exactly-once write of nested rows / to_json and redis-py",
            r("exactly-once write, nested") / r(nested_by_hand),
            "at least 1.0",
        ),
        (
            "... processor time of Spark",
            bench.cost("exactly-once write, nested") / bench.cost(nested_by_hand),
            "at most 1.0",
        ),
        (
            "read, 2 tasks / redis-py XRANGE",
            r("Spark read") / r("redis-py XRANGE"),
            "at least 0.7",
        ),
        ("... at full speed", r("Spark read, full speed") / r("redis-py XRANGE"), ""),
        (
            "events decoded / raw XRANGE, 1 process",
            r("decoded events") / r("raw events"),
            "at least 0.7",
        ),
        ("planning share of a micro-batch", planning, "at most 0.10"),
        ("fixed cost of a micro-batch, s", fixed_s, "at most 0.5"),
    ]
    lines = ["| measure | found | target |", "| --- | ---: | --- |"]
    lines += [f"| {what} | {value:.2f} | {target} |" for what, value, target in rows]
    lines += ["", "| rows a second | median | all rounds |", "| --- | ---: | --- |"]
    for what, rates in bench.rates.items():
        shown = ", ".join(f"{rate:,.0f}" for rate in rates[:6])
        lines.append(f"| {what} | {statistics.median(rates):,.0f} | {shown} |")
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    lines += [
        "",
        f"{bench.rows:,} rows, {rounds} rounds, load {load} on {os.cpu_count()} cores.",
        "",
    ]
    told = {what: value for what, value, _ in rows}
    return "\n".join(lines), {"ratios": told, "rates": bench.rates, "costs": bench.costs}


def scale(bench: Bench, sizes: list[int]) -> tuple[str, dict[str, Any]]:
    """What a row costs. Sizes that were measured before and are not now are kept."""
    kept = json.loads(GROWTH.read_text())["found"] if GROWTH.exists() else []
    found = [one for one in kept if one["rows"] not in sizes]
    lines = ["| rows | tasks | write us/row | read us/row | raw XADD, overlapped us/row |"]
    lines.append("| ---: | ---: | ---: | ---: | ---: |")
    for tasks in (1, 2, 4):  # classes loaded, code compiled, processes started
        keys = bench.write("warm", "exactly_once", 100_000, tasks)
        bench.read("warm", keys, 100_000, tasks)
        bench.forget(keys)
    for size in sizes:
        for tasks in (1, 2, 4):
            keys = bench.write("scale write", "exactly_once", size, tasks)
            bench.read("scale read", keys, size, tasks, serverShare=1)
            write, back = bench.rates["scale write"][-1], bench.rates["scale read"][-1]
            bench.forget(keys)
            bench.raw_xadd_overlapped()  # which tells how fast the machine was just then
            raw_s = size / bench.rates["raw XADD, overlapped"][-1]
            found.append({"rows": size, "tasks": tasks, "write_s": size / write})
            found[-1] |= {"read_s": size / back, "raw_s": raw_s}
            print(found[-1], file=sys.stderr, flush=True)
    for one in sorted(found, key=lambda one: (one["rows"], one["tasks"])):
        costs = [one.get(side) for side in ("write_s", "read_s", "raw_s")]
        shown = " | ".join("" if s is None else f"{1e6 * s / one['rows']:.1f}" for s in costs)
        lines.append(f"| {one['rows']:,} | {one['tasks']} | {shown} |")
    return "\n".join([*lines, ""]), {"found": found}


if __name__ == "__main__":
    sys.exit(main())
