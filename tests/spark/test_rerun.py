"""Writes that are run again, at once, or broken off: what they add, what they say, what they leave.

Writers are driven directly, as by Spark, but for the last tests.
"""

import logging
import signal
import threading
from datetime import UTC, datetime
from typing import Any

import pytest

from chasqui.cli.spark_enqueue import how_to_go_on
from chasqui.errors import QueueFullError
from chasqui.spark.options import Options
from chasqui.spark.writing.records import read_record, read_stages
from chasqui.spark.writing.transaction import DiscardedError, Step, forget
from chasqui.spark.writing.writers import Enqueued, finish_earlier
from tests.cli.conftest import Terminal, call, end, running
from tests.proxy import Fault, Proxy
from tests.servers import Server
from tests.spark.direct import Redis, batches, struct, texts, writer
from tests.spark.test_txn import SCHEMA, numbers, rows

ROUTED = struct(queue="string", n="bigint")


def routed(queue: str, first: int, last: int) -> dict[str, list[Any]]:
    return {"queue": [queue] * (last - first), "n": list(range(first, last))}


def write(server: Server, queue: str, first: int, last: int, **given: Any) -> Enqueued:
    it = writer(server.url, SCHEMA, queue=queue, txnAppId="night", **given)
    middle = (first + last) // 2
    return it.commit([it.write(rows(first, middle)), it.write(rows(middle, last))])


def half_written(server: Server, queue: str, size: int, most: int, **given: Any) -> None:
    """A run that is broken off when `most` of its rows are published."""
    with pytest.raises(QueueFullError):
        write(server, queue, 0, size, maxBacklog=most, onBacklog="fail", **given)


def options(server: Server, queue: str, **given: Any) -> Options:
    return Options.parse(
        {"url": server.url, "queue": queue, "txnAppId": "night", **texts(given)}, "w"
    )


# ── Once more ───────────────────────────────────────────────────────────────────────────────────


def test_a_write_says_what_it_has_added_and_a_second_run_that_it_was_written(
    each_server: Server, queue_name: str
):
    redis = Redis(each_server.url, queue_name)
    done = write(each_server, queue_name, 0, 20)
    assert done == Enqueued(added=20, queues=(queue_name,), txn="night", version=0)
    before = redis("XLEN", redis.keys.stream), redis.spark_keys()

    it = writer(each_server.url, SCHEMA, queue=queue_name, txnAppId="night")
    messages = [it.write(rows(100, 150)), it.write(rows(150, 190))]
    assert redis.spark_keys() == before[1], "nothing is staged"
    again = it.commit(messages)
    assert (again.added, again.found, again.already, again.resumed) == (0, 20, True, False)
    assert again.written_at is not None
    assert abs((datetime.now(UTC) - again.written_at).total_seconds()) < 60
    assert finish_earlier(options(each_server, queue_name)) == again, "the driver knows it too"
    assert (redis("XLEN", redis.keys.stream), redis.spark_keys()) == before


def test_an_older_version_than_the_one_that_was_written_is_not_written(
    redis_86: Server, queue_name: str
):
    write(redis_86, queue_name, 0, 20, txnVersion=7)
    late = write(redis_86, queue_name, 20, 30, txnVersion=6)
    assert (late.added, late.found, late.already, late.later_version) == (0, 0, True, 7)
    assert write(redis_86, queue_name, 20, 30, txnVersion=8).added == 10


def test_of_several_queues_those_that_were_written_are_left_out(
    each_server: Server, queue_name: str
):
    a, b = f"{queue_name}-a", f"{queue_name}-b"
    first = writer(each_server.url, ROUTED, txnAppId="night")
    first.commit([first.write(batches(routed(a, 0, 30), ROUTED))])
    again = writer(each_server.url, ROUTED, txnAppId="night")
    message = again.write(
        iter([*batches(routed(a, 0, 30), ROUTED), *batches(routed(b, 0, 50), ROUTED)])
    )
    assert len(Redis(each_server.url, a).spark_keys()) == 1, "the record, and nothing staged"
    done = again.commit([message])
    assert (done.added, done.found, done.already, done.queues) == (50, 30, False, (a, b))
    assert numbers(Redis(each_server.url, a)) == list(range(30))
    assert numbers(Redis(each_server.url, b)) == list(range(50))


def test_a_run_that_finds_half_of_a_write_publishes_the_rest_and_counts_it(
    each_server: Server, queue_name: str
):
    redis = Redis(each_server.url, queue_name)
    half_written(each_server, queue_name, 1000, 300)
    staged = redis.spark_keys()
    it = writer(each_server.url, SCHEMA, queue=queue_name, txnAppId="night")
    messages = [it.write(rows(0, 1000))]
    assert redis.spark_keys() == staged, "what was recorded is what will be published"
    done = it.commit(messages)
    assert (done.added, done.found, done.resumed, done.already) == (700, 300, True, False)
    assert numbers(redis) == list(range(1000))


def test_the_driver_publishes_the_rest_without_reading_the_rows_again(
    redis_86: Server, queue_name: str
):
    assert finish_earlier(options(redis_86, queue_name)) is None
    half_written(redis_86, queue_name, 900, 200, txnVersion=3)
    assert finish_earlier(options(redis_86, queue_name, txnVersion=4)) is None
    steps: list[Step] = []
    done = finish_earlier(options(redis_86, queue_name, txnVersion=3), steps.append)
    assert done is not None
    assert (done.added, done.found, done.resumed) == (700, 200, True)
    assert numbers(Redis(redis_86.url, queue_name)) == list(range(900))


def test_a_version_that_an_earlier_run_left_is_published_first_and_counted(
    redis_86: Server, queue_name: str
):
    half_written(redis_86, queue_name, 500, 200, txnVersion=1)
    done = write(redis_86, queue_name, 500, 800, txnVersion=2)
    assert (done.added, done.earlier, done.found) == (300, 300, 0)
    assert numbers(Redis(redis_86.url, queue_name)) == list(range(800))


def test_jobs_whose_reply_was_lost_are_counted(each_server: Server, queue_name: str):
    for version, nth in enumerate(range(1, 5)):
        with Proxy(each_server.url) as proxy:
            proxy.fail(Fault.CUT_AFTER, "EVALSHA", nth=nth)
            it = writer(proxy.url, SCHEMA, queue=queue_name, txnAppId="night", txnVersion=version)
            assert it.commit([it.write(rows(0, 1000))]).added == 1000, nth


def test_of_runs_at_once_one_writes_and_the_others_say_so(each_server: Server, queue_name: str):
    runs = [writer(each_server.url, SCHEMA, queue=queue_name, txnAppId="night") for _ in range(4)]
    staged = [[one.write(rows(0, 1500)), one.write(rows(1500, 3000))] for one in runs]
    barrier = threading.Barrier(4)
    done: list[Enqueued] = []

    def commit(run: Any, messages: Any) -> None:
        barrier.wait()
        done.append(run.commit(messages))

    threads = [threading.Thread(target=commit, args=one) for one in zip(runs, staged, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    redis = Redis(each_server.url, queue_name)
    assert numbers(redis) == list(range(3000))
    assert sum(one.added for one in done) == 3000, "each job is counted by the run that moved it"
    assert {one.added + one.found for one in done} == {3000}
    assert sum(not one.already and not one.resumed for one in done) == 1
    assert len(redis.spark_keys()) == 1


def test_direct_writes_say_what_they_added_and_what_was_there(redis_86: Server, queue_name: str):
    schema = struct(job_id="string", n="bigint")
    columns = {"job_id": [f"id-{n}" for n in range(600)], "n": list(range(600))}

    def add(delivery: str) -> Enqueued:
        it = writer(redis_86.url, schema, queue=queue_name, delivery=delivery)
        return it.commit([it.write(batches(columns, schema)), None])

    made = {"queues": (queue_name,), "delivery": "dedup"}
    assert add("dedup") == Enqueued(added=600, **made)
    assert add("dedup") == Enqueued(added=0, found=600, **made)
    assert add("at_least_once").added == 600


# ── Discarded meanwhile ─────────────────────────────────────────────────────────────────────────


def test_a_write_that_is_discarded_between_two_of_its_tasks_is_not_written_in_part(
    redis_86: Server, queue_name: str
):
    redis = Redis(redis_86.url, queue_name)
    half_written(redis_86, queue_name, 100, 10)
    it = writer(redis_86.url, SCHEMA, queue=queue_name, txnAppId="night")
    messages = [it.write(rows(0, 50))]  # leaves its rows out: they are recorded
    redis.connection.call(forget(redis.keys, "night"))
    messages.append(it.write(rows(50, 100)))
    with pytest.raises(DiscardedError, match="was discarded meanwhile"):
        it.commit(messages)
    assert redis("XLEN", redis.keys.stream) == 10


def test_a_write_that_is_discarded_while_it_waits_does_not_say_it_is_done(
    redis_86: Server, queue_name: str
):
    redis = Redis(redis_86.url, queue_name)
    waits = threading.Event()
    failures: list[BaseException] = []

    def publish() -> None:
        it = writer(redis_86.url, SCHEMA, queue=queue_name, txnAppId="night", maxBacklog=10)
        try:
            it.commit([it.write(rows(0, 100))], lambda step: waits.set())
        except DiscardedError as error:
            failures.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    assert waits.wait(20)
    redis.connection.call(forget(redis.keys, "night"))
    thread.join(20)
    assert len(failures) == 1


# ── Orphans ─────────────────────────────────────────────────────────────────────────────────────


def test_what_a_killed_run_has_staged_is_listed_and_goes_when_its_version_is_written(
    each_server: Server, queue_name: str
):
    redis = Redis(each_server.url, queue_name)
    killed = writer(each_server.url, SCHEMA, queue=queue_name, txnAppId="night", txnVersion=3)
    killed.write(rows(0, 1200))  # nobody commits it
    later = writer(each_server.url, SCHEMA, queue=queue_name, txnAppId="night", txnVersion=4)
    messages = [later.write(rows(2000, 2100))]
    stages = redis.connection.run(read_stages(redis.keys, "night"))
    assert sorted((one.epoch, one.jobs) for one in stages) == [(3, 1200), (4, 100)]
    assert all(one.size and one.quiet_s < 60 and one.expires_s > 86_000 for one in stages)

    write(each_server, queue_name, 0, 1200, txnVersion=3)
    (left,) = redis.connection.run(read_stages(redis.keys, "night"))
    assert left.epoch == 4, "a later version may still run: its rows stay"
    assert later.commit(messages).added == 100
    assert len(redis.spark_keys()) == 1


def test_a_run_that_is_given_up_drops_what_its_tasks_have_staged_and_nothing_else(
    redis_86: Server, queue_name: str
):
    redis = Redis(redis_86.url, queue_name)
    one, two = (writer(redis_86.url, SCHEMA, queue=queue_name, txnAppId="night") for _ in range(2))
    one.write(rows(0, 100))
    messages = [two.write(rows(0, 80))]
    one.abandon()
    (left,) = redis.connection.run(read_stages(redis.keys, "night"))
    assert left.jobs == 80
    assert two.commit(messages).added == 80


# ── A queue that is full ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_a_write_that_waits_says_so_and_goes_on_by_itself(
    redis_86: Server, queue_name: str, delivery: str, caplog: pytest.LogCaptureFixture
):
    redis = Redis(redis_86.url, queue_name)
    redis("XADD", redis.keys.stream, "*", "d", "x")
    steps: list[Step] = []
    waits = threading.Event()

    def publish() -> None:
        it = writer(redis_86.url, SCHEMA, queue=queue_name, delivery=delivery, maxBacklog=400)
        messages = [it.write(rows(0, 400))]
        it.commit(messages, steps.append)

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            waits.set()

    listener = Listener()
    logging.getLogger("chasqui.spark.backlog").addHandler(listener)
    thread = threading.Thread(target=publish)
    with caplog.at_level(logging.INFO, "chasqui.spark.backlog"):
        thread.start()
        assert waits.wait(20)
        depth = redis("XLEN", redis.keys.stream)
        redis("XTRIM", redis.keys.stream, "MAXLEN", 0)
        thread.join(20)
    logging.getLogger("chasqui.spark.backlog").removeHandler(listener)
    assert not thread.is_alive()
    assert caplog.messages == [f"queue {queue_name}: waiting for workers: {depth:,} wait"]
    if delivery == "exactly_once":
        assert Step(399, 400, 400) in steps
    assert redis("XLEN", redis.keys.stream) == (1 if delivery == "exactly_once" else 400)


def test_resume_keeps_to_the_limit_shows_that_it_waits_and_goes_on(
    redis_86: Server, queue_name: str
):
    redis = Redis(redis_86.url, queue_name)
    half_written(redis_86, queue_name, 300, 100)
    words = ("spark", "txn", "resume", "--queue", queue_name, "night", "--max-backlog", "100")
    ran = call(*words, "--on-backlog", "fail", url=redis_86.url)
    assert ran.code == 1
    assert ran.err == (
        f"chasqui: queue '{queue_name}' is full: 100 jobs wait, max_backlog is 100; run the same "
        "command again to go on\n"
    )
    with Terminal(*words, url=redis_86.url) as terminal:
        terminal.wait_for("100 of 300 published; waiting for workers: 100 wait")
        redis("XTRIM", redis.keys.stream, "MAXLEN", 0)
        terminal.wait_for("200 of 300 published; waiting for workers: 100 wait")
        redis("XTRIM", redis.keys.stream, "MAXLEN", 0)
        terminal.wait_for("published 200 jobs; 100 of 300 were published before")
        assert terminal.wait() == 0
    assert redis("XLEN", redis.keys.stream) == 100


# ── The commands, where they need no Spark ──────────────────────────────────────────────────────


def test_enqueue_of_a_write_that_is_done_adds_nothing_and_says_when_it_was(
    redis_86: Server, queue_name: str
):
    write(redis_86, queue_name, 0, 20, txnVersion=2)
    enqueue = ("spark", "enqueue", "--from", "parquet:/nowhere", "--queue", queue_name)
    named = (*enqueue, "--txn", "night", "--txn-version")
    ran = call(*named, "2", url=redis_86.url)
    assert ran.code == 0
    record = Redis(redis_86.url, queue_name).connection.run(
        read_record(Redis(redis_86.url, queue_name).keys, "night")
    )
    assert record is not None
    assert record.done_s is not None
    when = datetime.fromtimestamp(record.done_s, UTC)
    assert ran.out == f"already written on {when:%Y-%m-%d %H:%M} UTC (20 rows): added 0\n"
    ran = call(*named, "1", "--fail-if-written", url=redis_86.url)
    assert ran.code == 3
    assert ran.out == f"version 2 was already written on {when:%Y-%m-%d %H:%M} UTC: added 0\n"
    told = call(*named, "2", "--json", url=redis_86.url).json
    assert (told["added"], told["already"], told["found"]) == (0, True, 20)
    assert (told["txn"], told["version"], told["queues"]) == ("night", 2, [queue_name])
    assert told["written_at"].startswith(f"{when:%Y-%m-%dT%H:%M}")


def test_enqueue_finishes_what_an_earlier_run_left(redis_86: Server, queue_name: str):
    half_written(redis_86, queue_name, 200, 120)
    words = ("--from", "json:/nowhere", "--queue", queue_name, "--txn", "night")
    ran = call("spark", "enqueue", *words, url=redis_86.url)
    assert ran.code == 0
    start = "resumed: 120 of 200 were published by another run; added 80 rows in "
    assert ran.out.startswith(start)


def test_an_interrupted_enqueue_says_how_to_go_on(redis_86: Server, queue_name: str):
    half_written(redis_86, queue_name, 200, 120)
    words = ("--from", "json:/nowhere", "--queue", queue_name, "--txn", "night")
    enqueue = ("spark", "enqueue", *words, "--max-backlog", "120")
    told = (
        "120 of 200 rows are in the queue; run the same command again, or: chasqui spark txn "
        f"resume --queue {queue_name} night"
    )
    with Proxy(redis_86.url) as proxy, running(*enqueue, url=proxy.url) as process:
        proxy.wait_for(lambda: proxy.count("EVALSHA") >= 3)
        ran = end(process, signal.SIGINT)
    assert ran.code == 130
    assert ran.out == ""
    assert ran.err == f"chasqui: interrupted: {told}\n"
    ran = call(*enqueue, "--on-backlog", "fail", url=redis_86.url)
    assert ran.code == 1
    assert ran.err == (
        f"chasqui: queue '{queue_name}' is full: 120 jobs wait, max_backlog is 120; {told}\n"
    )


def test_an_interrupted_write_without_a_name_leaves_nothing_staged(
    redis_86: Server, queue_name: str
):
    """Its tasks may go on until Spark has ended, which is before the command says how to go on."""
    redis = Redis(redis_86.url, queue_name)
    drawn = options(redis_86, queue_name, txnAppId="drawn")
    writer(redis_86.url, SCHEMA, queue=queue_name, txnAppId="drawn").write(rows(0, 100))
    assert len(redis.spark_keys()) == 2
    told = how_to_go_on(drawn, "drawn", redis_86.url)
    assert told == "nothing was added; run the same command again"
    assert len(redis.spark_keys()) == 2, "another run may have a name that was given"
    assert how_to_go_on(drawn, None, redis_86.url) == told
    assert redis.spark_keys() == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--delivery", "twice"), "option delivery: must be one of"),
        (("--on-backlog", "hope"), "option onBacklog: must be one of wait, fail"),
        (("--queue", "a,b"), "name one queue to write to"),
        (("--txn", "two\nlines"), "option txnAppId: must be at most 200 characters, without"),
        (("--txn", ""), "option txnAppId: must not be empty"),
        (("--txn-version", "3"), "--txn-version needs --txn"),
    ],
)
def test_a_mistake_is_told_before_spark_starts(words: tuple[str, ...], sentence: str):
    ran = call("spark", "enqueue", "--from", "parquet:x", "--queue", "q", *words)
    assert ran.code == 2
    assert ran.err.startswith(f"chasqui: {sentence}")
    assert ran.err.count("\n") == 1


def test_staged_rows_of_no_record_are_listed_and_discarded(redis_86: Server, queue_name: str):
    redis = Redis(redis_86.url, queue_name)
    it = writer(redis_86.url, SCHEMA, queue=queue_name, txnAppId="night", txnVersion=5)
    it.write(rows(0, 700))
    it.write(rows(0, 100))
    txn = ("spark", "txn")
    for words in (("--queue", queue_name), ()):
        listed = call(*txn, "list", *words, "--json", url=redis_86.url).json
        (row,) = (one for one in listed if one["queue"] == queue_name)
        assert (row["txn"], row["version"], row["state"]) == ("night", 5, "staged")
        assert (row["jobs"], row["left"], row["recorded"]) == (800, 800, None)
        assert row["bytes"] > 800
        assert row["quiet_s"] < 60
    discard = (*txn, "discard", "--queue", queue_name, "night", "--yes")
    ran = call(*discard, url=redis_86.url)
    assert ran.code == 1
    assert "so it still runs: wait until it ends, or add --force" in ran.err
    ran = call(*txn, "resume", "--queue", queue_name, "night", url=redis_86.url)
    assert ran.out.startswith("nothing of it was recorded: run it again")
    for stage in redis.connection.run(read_stages(redis.keys, "night")):
        redis("EXPIRE", stage.key, stage.expires_s - 100)  # as if the last rows came long ago
    assert call(*discard, url=redis_86.url).out == "dropped 800 jobs\n"
    assert redis.spark_keys() == []


def test_a_write_that_is_done_can_be_forgotten(redis_86: Server, queue_name: str):
    write(redis_86, queue_name, 0, 20)
    discard = ("spark", "txn", "discard", "--queue", queue_name, "night")
    ran = call(*discard, url=redis_86.url)
    assert ran.out == "would forget that it was written; add --yes to do it\n"
    ran = call(*discard, "--yes", url=redis_86.url)
    assert ran.out == "forgot that it was written\n"
    assert write(redis_86, queue_name, 0, 20).added == 20


@pytest.mark.parametrize("command", ["resume", "discard"])
def test_a_mistyped_name_is_told_with_those_that_are_near(
    redis_86: Server, queue_name: str, command: str
):
    write(redis_86, queue_name, 0, 2)
    words = ("spark", "txn", command, "--queue", queue_name, "nigth")
    ran = call(*words, url=redis_86.url)
    assert ran.code == 1
    assert ran.err == f"chasqui: queue {queue_name} has no write nigth: is it night?\n"
    ran = call(*words, "--json", url=redis_86.url)
    assert ran.code == 1
    facts = {"queue": queue_name, "txn": "nigth", "found": False, "near": ["night"]}
    assert ran.json == facts


def test_a_mistyped_queue_is_told_with_those_that_are_near(redis_86: Server, queue_name: str):
    typo = queue_name[:-1]
    writer(redis_86.url, SCHEMA, queue=queue_name, txnAppId="night").write(rows(0, 2))
    txn = ("spark", "txn")
    for words in (("list",), ("resume", "night"), ("discard", "night")):
        ran = call(*txn, *words, "--queue", typo, url=redis_86.url)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith(f"chasqui: there is no queue {typo}: is it {queue_name}")
    ran = call(*txn, "list", "--queue", typo, "--json", url=redis_86.url)
    assert (ran.code, ran.json["found"]) == (1, False)
    listed = call(*txn, "list", "--queue", queue_name, "--json", url=redis_86.url).json
    assert [row["state"] for row in listed] == ["staged"], "staged rows are enough of a queue"
    assert call("add", typo, "mail", "{}", url=redis_86.url).code == 0
    assert call(*txn, "list", "--queue", typo, url=redis_86.url).out == "no writes\n"


# ── With Spark ──────────────────────────────────────────────────────────────────────────────────


def test_enqueue_tells_what_it_did(spark: Any, redis_86: Server, queue_name: str):
    from chasqui.spark import enqueue

    given = {"url": redis_86.url, "txnAppId": "night"}
    df = spark.range(1000).withColumnRenamed("id", "n")
    steps: list[Step] = []
    done = enqueue(df, queue_name, on_progress=steps.append, **given)
    assert (done.added, done.found, done.already, done.txn) == (1000, 0, False, "night")
    assert {step.jobs for step in steps} <= {1000}
    again = enqueue(df.limit(3), queue_name, **given)
    assert (again.added, again.found, again.already) == (0, 1000, True)
    other = f"{queue_name}-b"
    both = df.selectExpr("n", f"if(n < 600, '{queue_name}', '{other}') as queue")
    third = enqueue(both, **given)
    assert (third.added, third.found, third.queues) == (400, 1000, (queue_name, other))
    direct = enqueue(df, queue_name, url=redis_86.url, delivery="at_least_once")
    assert (direct.added, direct.txn) == (1000, None)
    assert numbers(Redis(redis_86.url, other)) == list(range(600, 1000))


def test_an_enqueue_whose_task_fails_leaves_nothing(spark: Any, redis_86: Server, queue_name: str):
    from pyspark.errors import PySparkException

    from chasqui.spark import enqueue

    text = spark.range(0, 2000, 1, 2).selectExpr("if(id = 1999, '{', '1') as payload")
    with pytest.raises(PySparkException, match="a payload is no JSON"):
        enqueue(text, queue_name, url=redis_86.url, payloadFormat="json", txnAppId="night")
    redis = Redis(redis_86.url, queue_name)
    assert redis.jobs() == []
    assert redis.spark_keys() == []
