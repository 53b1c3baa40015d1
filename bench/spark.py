"""The Spark pipeline against plain clients, in one run: `python -m bench.spark --help`.

Everything is measured in rounds, each of which does all of it, and the median is told; the ratios
mean more than the rates. Prints a table in Markdown, and writes it to bench/out/spark.md.
"""

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hiredis
import redis

from chasqui.blocking import BlockingConnection
from chasqui.config import Endpoint
from chasqui.keys import Keys
from chasqui.request import Effect, Request, commands
from chasqui.spark import enqueue, follow, read, session
from chasqui.spark.options import Options
from chasqui.spark.pages import BATCH_ROWS
from chasqui.spark.wire import EventDecoder
from tests.servers import Server
from tests.spark.direct import schema_of

OUT = Path(__file__).parent / "out"
PAYLOAD_BYTES = 35
TASKS = 2
#: How long each look at the live workers is.
LIVE_S = 4

#: Adds 200 jobs a second and tells how long each took to its handler; ends with its input.
LIVE = """
import asyncio, sys, time
from chasqui import Queue, Worker

async def main():
    took = []
    async def handle(job):
        took.append(time.time() - job.data["at"])
    worker = Worker("live", handle, redis_url=sys.argv[1], events_enabled=False)
    running = asyncio.ensure_future(worker.run())
    async with Queue("live", redis_url=sys.argv[1]) as queue:
        for _ in range(int(200 * float(sys.argv[2]))):
            await queue.add("live", {"at": time.time()})
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.2)
    await worker.close()
    await running
    took = sorted(took[20:])
    print(took[len(took) // 2] * 1000, took[int(len(took) * 0.99)] * 1000)

asyncio.run(main())
"""


class Bench:
    """One server, one session, and what was measured on them."""

    def __init__(self, server: Server, spark: Any, rows: int) -> None:
        self.server = server
        self.spark = spark
        self.rows = rows
        self.rates: dict[str, list[float]] = {}
        #: Where live workers may run; None is anywhere.
        self.live_cores: set[int] | None = None
        self._number = 0

    def fresh(self) -> Keys:
        """The keys of a queue that nobody has used."""
        self._number += 1
        return Keys(f"bench-{self._number}")

    @contextlib.contextmanager
    def timed(self, what: str, rows: int | None = None) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        seconds = time.perf_counter() - started_s
        self.rates.setdefault(what, []).append((rows or self.rows) / seconds)

    def median(self, what: str) -> float:
        return statistics.median(self.rates[what])

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

    def write(self, what: str, delivery: str, rows: int | None = None, tasks: int = TASKS) -> Keys:
        keys, rows = self.fresh(), rows or self.rows
        df = self.data(rows, tasks)
        with self.timed(what, rows):
            enqueue(df, keys.queue, url=self.server.url, delivery=delivery, maxBacklog=10**8)
        return keys

    def read(
        self, what: str, keys: Keys, rows: int | None = None, tasks: int = TASKS, **more: Any
    ) -> None:
        rows = rows or self.rows
        given = {"minPartitions": tasks, "maxRecordsPerPartition": rows, **more}
        df = read(self.spark, "jobs", keys.queue, url=self.server.url, **given)
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

    def live_p99(self, seconds: float, meanwhile: Callable[[], None] | None = None) -> float:
        command = [sys.executable, "-c", LIVE, self.server.url, str(seconds)]
        live = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if self.live_cores is not None:
            os.sched_setaffinity(live.pid, self.live_cores)
        while meanwhile is not None and live.poll() is None:
            meanwhile()
        told, _ = live.communicate()
        return float(told.split()[1])


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
    asked = parser.parse_args()
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (root, os.environ.get("PYTHONPATH", "")))
    )
    spark = session(
        "local[2]", conf={"spark.log.level": "OFF", "spark.sql.shuffle.partitions": "2"}
    )
    with Server("redis-8.6") as server:
        bench = Bench(server, spark, asked.rows)
        if asked.scale:
            name, text = "spark-scale", scale(bench, [int(one) for one in asked.scale.split(",")])
        elif asked.live:
            name, text = "spark-live", live(bench, asked.rounds)
        else:
            name, text = "spark", measure(bench, asked.rounds)
    spark.stop()
    OUT.mkdir(exist_ok=True)
    (OUT / f"{name}.md").write_text(text)
    print(text)
    return 0


def set_apart(bench: Bench) -> None:
    """Give Spark one core, and another one to the server and the live workers: as if it were on
    machines of its own, where it takes nothing from them but turns at Redis."""
    first, *_, last = sorted(os.sched_getaffinity(0))
    bench.live_cores = {first}
    _pin(bench.server.pid, {first})
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    for pid in parents:
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid() and pid != bench.server.pid:
            _pin(pid, {last})


def _pin(pid: int, cores: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), cores)


def measure(bench: Bench, rounds: int) -> str:
    bench.forget(bench.write("warm", "exactly_once", 10_000))
    events = bench.add_events(bench.rows)
    for i in range(rounds):
        print(f"round {i + 1} of {rounds}", file=sys.stderr, flush=True)
        bench.raw_xadd()
        bench.raw_xadd_overlapped()
        bench.forget(bench.write("direct write", "at_least_once"))
        bench.redis_py_xadd()
        keys = bench.write("exactly-once write", "exactly_once")
        bench.redis_py_xrange(keys)
        bench.read("Spark read", keys)
        bench.read("Spark read, not held back", keys, maxReadRowsPerSecond=0)
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
        ("read, 2 tasks / redis-py XRANGE", r("Spark read") / r("redis-py XRANGE"), "at least 0.7"),
        ("... not held back", r("Spark read, not held back") / r("redis-py XRANGE"), ""),
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
    return "\n".join(lines)


def live(bench: Bench, rounds: int) -> str:
    """How many times longer jobs of live workers take at the 99th percentile while a whole queue is
    read: on cores of its own, on the same cores, and beside processes that only spin there."""
    keys = bench.write("filled", "exactly_once")
    reading = lambda: bench.read("meanwhile", keys)  # noqa: E731
    reading()
    lines = ["| live p99 | alone, ms | beside it, ms | ratio | target |"]
    lines.append("| --- | ---: | ---: | ---: | --- |")

    def look(what: str, target: str, meanwhile: Callable[[], None] | None) -> None:
        alone, beside = list[float](), list[float]()
        for _ in range(rounds):
            alone.append(bench.live_p99(LIVE_S))
            spinners = []
            if meanwhile is None:
                spinning = [sys.executable, "-c", "while True: pass"]
                spinners = [subprocess.Popen(spinning) for _ in range(TASKS)]
            try:
                beside.append(bench.live_p99(LIVE_S, meanwhile))
            finally:
                for spinner in spinners:
                    spinner.kill()
                    spinner.wait()
        one, other = statistics.median(alone), statistics.median(beside)
        lines.append(f"| {what} | {one:.2f} | {other:.2f} | {other / one:.2f} | {target} |")
        print(lines[-1], file=sys.stderr, flush=True)

    look("a full read on the same cores", "", reading)
    look(f"{TASKS} processes that only spin on them", "", None)
    set_apart(bench)
    look("a full read on cores of its own", "at most 1.5", reading)
    return "\n".join([*lines, "", f"{bench.rows:,} rows, {rounds} rounds of {LIVE_S} s.", ""])


def scale(bench: Bench, sizes: list[int]) -> str:
    lines = ["", "| rows | tasks | write us/row | read us/row |", "| ---: | ---: | ---: | ---: |"]
    for tasks in (1, 2, 4):  # classes loaded, code compiled, processes started
        keys = bench.write("warm", "exactly_once", 100_000, tasks)
        bench.read("warm", keys, 100_000, tasks)
        bench.forget(keys)
    for size in sizes:
        for tasks in (1, 2, 4):
            keys = bench.write("scale write", "exactly_once", size, tasks)
            bench.read("scale read", keys, size, tasks, maxReadRowsPerSecond=0)
            write, back = bench.rates["scale write"][-1], bench.rates["scale read"][-1]
            lines.append(f"| {size:,} | {tasks} | {1e6 / write:.1f} | {1e6 / back:.1f} |")
            bench.forget(keys)
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
