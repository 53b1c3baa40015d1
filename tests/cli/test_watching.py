"""`watch`, `events`, `tail`, `job`, `top`: commands that show what happens to a queue."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable

import pytest
import redis

from chasqui import Job, Queue, QueueEvents, Retry, UnrecoverableError, Worker
from chasqui.cli.facts import History, sparkline
from chasqui.cli.screen import Table, Top
from chasqui.errors import ClosedError
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from tests.cli.conftest import Chasqui, Ran, Terminal, call, end, run, running
from tests.servers import KINDS, RemoteServer, Server


async def handle(job: Job) -> object:
    if job.name == "doomed":
        raise UnrecoverableError("no such address")
    if job.name == "flaky" and job.attempt == 0:
        raise Retry(delay_ms=1)
    return {"mailed": job.data}


async def work(queue_name: str, url: str, *names: str) -> None:
    """Add a job of each name, with the name as its id, and let a worker run it to its end."""
    worker = Worker(queue_name, handle, redis_url=url, store_results=True)
    async with Queue(queue_name, redis_url=url) as queue, asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        for job in [await queue.add(name, 1, job_id=name) for name in names]:
            await asyncio.gather(job.result(timeout=30), return_exceptions=True)
        await worker.close()


@pytest.fixture
def lived(valkey_9: Server, queue_name: str) -> str:
    """A queue in which one job was completed, one needed two attempts, and one died."""
    asyncio.run(work(queue_name, valkey_9.url, "mail", "flaky", "doomed"))
    return queue_name


# ── watch ───────────────────────────────────────────────────────────────────────────────────────


def test_watch_prints_a_line_for_each_look(chasqui: Chasqui, queue_name: str) -> None:
    chasqui("add", queue_name, "mail", "1")
    ran = chasqui("watch", queue_name, "--times", "3", "--interval-ms", "10")
    assert ran.code == 0
    header = ran.out.splitlines()[0].split("\t")
    assert header[:4] == ["time", "stream depth", "pending", "DLQ depth"]
    assert [row[1:4] for row in ran.rows] == [["1", "0", "0"]] * 3


@pytest.mark.slow
def test_watch_prints_json_lines_on_every_server(
    server: Server | RemoteServer, queue_name: str
) -> None:
    with running("watch", queue_name, "--json", "--interval-ms", "10", url=server.url) as process:
        assert process.stdout is not None
        for _ in range(2):
            look = json.loads(process.stdout.readline())
            assert look["stream_depth"] == 0
            assert look["entered"] in (0, None)
        assert end(process, signal.SIGINT).code == 0


def test_watch_shows_changes_on_a_screen(valkey_9: Server, queue_name: str) -> None:
    async def add(number: int) -> None:
        async with Queue(queue_name, redis_url=valkey_9.url) as queue:
            await queue.add_bulk([{"name": "mail", "data": 1}] * number)

    with Terminal("watch", queue_name, "--interval-ms", "50", url=valkey_9.url) as terminal:
        terminal.wait_for(rf"\Achasqui: there is no queue {queue_name} yet")
        terminal.wait_for(rf"^chasqui watch {queue_name}")
        terminal.wait_for(r"^stream depth +0 ")
        terminal.wait_for(r"^pending +0 .*\(group not created\)")
        asyncio.run(add(1234))
        terminal.wait_for(r"^stream depth +1,234 .*█")
        terminal.wait_for(r"^entered the stream .*█")
        terminal.wait_for(r"^left the stream ")
        assert terminal.interrupt() == 0


def test_sparkline_is_as_high_as_its_highest() -> None:
    assert sparkline([0, 7, 14], 10) == "▁▅█"
    assert sparkline([0, 0], 10) == "▁▁"
    assert sparkline(range(100), 3) == "███"
    assert sparkline([], 3) == ""
    assert History().rates("entered") == []


# ── events and tail ─────────────────────────────────────────────────────────────────────────────


def test_events_are_lines_in_the_form_of_chasquimq(chasqui: Chasqui, lived: str) -> None:
    ran = chasqui("events", lived, "--no-follow")
    assert ran.code == 0
    form = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \d+-\d+ [a-z-]+ id=\S+( [a-z_]+=.*)?"
    lines = ran.out.splitlines()
    assert [line for line in lines if not re.fullmatch(form, line)] == []
    (died,) = [line.split(" ", 2)[2] for line in lines if " dlq " in line]
    created = r"created=\d+"  # ours, since the id does not tell it
    assert re.fullmatch(f"dlq id=doomed attempt=1 {created} n=doomed reason=unrecoverable", died)


def test_event_of_no_job_and_odd_values_have_a_line(
    chasqui: Chasqui, valkey_9: Server, queue_name: str
) -> None:
    long, odd = "x" * 100, "\x1b[2Jgone"
    with redis.Redis.from_url(valkey_9.url) as client:
        key = Keys(queue_name).events
        first = client.xadd(key, {"e": "drained", "id": "", "ts": "1700000000000"}).decode()
        second = client.xadd(key, {"z": long, "id": odd, "ts": "soon", "a": "1"}).decode()
    assert chasqui("events", queue_name, "--no-follow").out.splitlines() == [
        f"2023-11-14T22:13:20.000Z {first} drained id=-",
        f"- {second} (unknown) id=\\x1b[2Jgone a=1 z={'x' * 80}...",
    ]


def test_events_are_chosen_by_name_and_kind(chasqui: Chasqui, lived: str) -> None:
    wanted = ["--name", "flaky", "--event", "completed", "--event", "failed", "--json"]
    ran = chasqui("events", lived, "--no-follow", *wanted)
    told = [json.loads(line) for line in ran.out.splitlines()]
    assert [(one["event"], one["attempt"]) for one in told] == [("failed", 1), ("completed", 2)]
    later = chasqui("events", lived, "--no-follow", "--from", told[0]["id"], *wanted)
    assert [json.loads(line) for line in later.out.splitlines()] == told[1:]


@pytest.mark.slow
def test_events_are_followed_from_the_start_until_told_to_end(lived: str, valkey_9: Server) -> None:
    url = valkey_9.url
    with running("events", lived, "--from", "0", "--event", "completed", url=url) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().split()[3] for _ in range(2)] == ["id=mail", "id=flaky"]
        asyncio.run(work(lived, url, "later"))
        assert process.stdout.readline().split()[3] == "id=later"
        ended = end(process)
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_tail_tells_one_life_and_ends_with_it(chasqui: Chasqui, lived: str) -> None:
    told = [line.split()[2] for line in chasqui("tail", lived, "flaky").out.splitlines()]
    assert [kind for kind in told if kind != "waiting"] == [
        "active", "failed", "retry-scheduled", "active", "completed",
    ]  # fmt: skip
    assert chasqui("tail", lived, "doomed").out.splitlines()[-1].split()[2] == "dlq"


def test_tail_waits_for_the_end(queue_name: str, valkey_9: Server) -> None:
    with running("tail", queue_name, "mail", url=valkey_9.url) as process:
        assert process.stderr is not None
        assert "there is no queue" in process.stderr.readline()
        assert "job mail has no events: waiting" in process.stderr.readline()
        asyncio.run(work(queue_name, valkey_9.url, "mail"))
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert [line.split()[2] for line in out.splitlines()] == ["active", "completed"]


# ── job ─────────────────────────────────────────────────────────────────────────────────────────


def test_job_is_found_wherever_it_is_on_every_server(
    server: Server | RemoteServer, queue_name: str
) -> None:
    def job(job_id: str) -> Ran:
        return call("job", queue_name, job_id, "--json", url=server.url)

    asyncio.run(work(queue_name, server.url, "mail", "doomed"))
    done, dead = job("mail").json, job("doomed").json
    assert (done["state"], done["result"], done["attempts"]) == ("completed", {"mailed": 1}, 1)
    assert [event["event"] for event in done["events"]] == ["active", "completed"]
    assert (dead["state"], dead["reason"], dead["data"]) == ("dlq", "unrecoverable", 1)
    assert dead["error"] == "UnrecoverableError: no such address"
    call("add", queue_name, "mail", '{"to": "ada"}', "--id", "next", url=server.url)
    waiting = job("next").json
    assert (waiting["state"], waiting["data"]) == ("waiting", {"to": "ada"})
    call("add", queue_name, "mail", "2", "--id", "late", "--delay", "1h", url=server.url)
    assert job("late").json["state"] == "delayed"
    unknown = job("nobody")
    assert (unknown.code, unknown.json["state"]) == (1, "unknown")


async def test_job_that_runs_tells_who_has_it(valkey_9: Server, queue_name: str) -> None:
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def handler(job: Job) -> None:
        has_begun.set()
        await may_end.wait()

    worker = Worker(queue_name, handler, redis_url=valkey_9.url, consumer_id="w1")
    async with Queue(queue_name, redis_url=valkey_9.url) as queue, asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        job = await queue.add("mail", 1)
        await has_begun.wait()
        ran = await asyncio.to_thread(_in_a_process, "job", queue_name, job.id, valkey_9.url)
        may_end.set()
        await worker.close()
    assert (ran.json["state"], ran.json["consumer"], ran.json["deliveries"]) == ("pending", "w1", 1)


async def test_job_that_was_handed_back_waits(valkey_9: Server, queue_name: str) -> None:
    """The server still assigns it to the worker that has ended."""
    has_begun = asyncio.Event()

    async def handler(job: Job) -> None:
        has_begun.set()
        await asyncio.Event().wait()

    url = valkey_9.url
    worker = Worker(queue_name, handler, redis_url=url, consumer_id="w1", shutdown_deadline_s=0)
    async with Queue(queue_name, redis_url=url) as queue, asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        job = await queue.add("mail", 1)
        await has_begun.wait()
        await worker.close()
    told = (await asyncio.to_thread(_in_a_process, "job", queue_name, job.id, url)).json
    assert (told["state"], told["handed_back_by"]) == ("waiting", "w1")
    assert "idle_ms" not in told
    shown = await asyncio.to_thread(run, "top", queue_name, "--json", url=url)
    assert shown.json[queue_name]["running"] == []


def test_attempts_of_a_replayed_job_count_anew(
    chasqui: Chasqui, valkey_9: Server, queue_name: str
) -> None:
    async def live() -> None:
        is_mended = False

        async def handler(job: Job) -> str:
            if not is_mended:
                raise Retry(delay_ms=1)
            return "done"

        worker = Worker(queue_name, handler, redis_url=valkey_9.url, max_attempts=3)
        async with Queue(queue_name, redis_url=valkey_9.url) as queue, asyncio.TaskGroup() as tasks:
            tasks.create_task(worker.run())
            job = await queue.add("mail", 1, job_id="mail")
            await asyncio.gather(job.result(timeout=30), return_exceptions=True)
            assert (await queue.counts()).dlq == 1
            is_mended = True
            await queue.replay_dlq()
            async with QueueEvents(
                queue_name, redis_url=valkey_9.url, last_event_id="0", events=["completed"]
            ) as events:
                await anext(aiter(events))
            await worker.close()

    asyncio.run(live())
    told = chasqui("job", queue_name, "mail", "--json").json
    assert (told["state"], told["attempts"]) == ("completed", 1)


def _in_a_process(command: str, queue_name: str, job_id: str, url: str) -> Ran:
    return run(command, queue_name, job_id, "--json", url=url)


# ── top ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_top_shows_queues_and_obeys_keys(
    chasqui: Chasqui, valkey_9: Server, queue_name: str, bury: Callable[..., str]
) -> None:
    other = queue_name[5:15]
    chasqui("add", other, "mail", "1")
    bury("mail", 1, "retries_exhausted", error="TimeoutError: no answer")
    with Terminal("top", queue_name, other, "--interval-ms", "50", url=valkey_9.url) as terminal:
        terminal.wait_for(rf"^ {queue_name} +0 +0 +0 +1 ")
        terminal.wait_for(r"^ queue +waiting +pending +delayed +dead")
        terminal.wait_for("p Pause/resume")
        terminal.press("i")
        terminal.wait_for("DLQ depth +1")
        terminal.wait_for("TimeoutError: no answer")
        terminal.press("\x1b")
        terminal.wait_for("DLQ depth", is_there=False)
        terminal.press("r")
        terminal.wait_for("Replay 1 dead job of queue")
        terminal.press("n")
        terminal.wait_for("Replay 1 dead job", is_there=False)
        terminal.press("r")
        terminal.wait_for("y/n")
        terminal.press("y")
        terminal.wait_for(rf"^ {queue_name} +1 +0 +0 +0 ")
        terminal.press("\x1b[B")  # down
        terminal.press("p")
        terminal.wait_for(rf"queue {other} paused")
        assert chasqui("inspect", other, "--json").json["paused"] is True
        assert chasqui("inspect", queue_name, "--json").json["paused"] is False
        terminal.press("q")
        assert terminal.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "dies"])
def test_top_says_that_the_server_is_gone_and_does_nothing_meanwhile(
    private_server: Callable[..., Server], queue_name: str, how: signal.Signals
) -> None:
    server = private_server("redis-8.6", appendonly="yes", appendfsync="always")
    queue = queue_name[5:15]
    call("add", queue, "mail", "1", url=server.url)
    with Terminal("top", queue, "--interval-ms", "50", url=server.url) as terminal:
        terminal.wait_for(rf"^ {queue} +1 ")
        os.kill(server.pid, how)
        terminal.wait_for(rf"^no connection to 127.0.0.1:{server.port} for [1-9]\d* s")
        terminal.press("p")
        terminal.wait_for("not done: there is no connection")
        if how == signal.SIGSTOP:
            os.kill(server.pid, signal.SIGCONT)
        else:
            server.kill()
            server.start()
        terminal.wait_for("^no connection to", is_there=False)
        assert call("inspect", queue, "--json", url=server.url).json["paused"] is False
        terminal.press("p")
        terminal.wait_for(f"queue {queue} paused")
        terminal.press("q")
        assert terminal.wait() == 0


def test_top_lists_the_workers_that_live_and_counts_the_others(
    chasqui: Chasqui, valkey_9: Server, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis.Redis.from_url(valkey_9.url) as client:
        client.xgroup_create(Keys(queue_name).stream, "default", mkstream=True)
        client.xgroup_createconsumer(Keys(queue_name).stream, "default", "w1")

    def told() -> tuple[list[str], int | None, int | None]:
        queue = chasqui("top", queue_name, "--json").json[queue_name]
        names = [one["name"] for one in queue["workers"]]
        return names, queue["live_workers"], queue["silent_workers"]

    monkeypatch.setattr("chasqui.cli.facts.uptime_s", lambda info: 60.0)
    assert told() == (["w1"], 1, 0)
    monkeypatch.setattr("chasqui.cli.facts.SILENT_MS", 0)  # it was not seen for so long
    assert told() == ([], 0, 1)
    chasqui("pause", queue_name)  # now nobody asks, and nobody can tell
    assert told() == (["w1"], None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_who_lives_cannot_be_told_of_a_server_that_has_just_loaded_its_data(
    kind: str, private_server: Callable[..., Server], queue_name: str
) -> None:
    server = private_server(kind, appendonly="yes", appendfsync="always")
    stream = Keys(queue_name).stream
    with redis.Redis.from_url(server.url) as client:
        client.xadd(stream, {"d": "1"})
        client.xgroup_create(stream, "default", "0")
        client.xreadgroup("default", "gone", {stream: ">"})
    server.restart()
    told = call("inspect", queue_name, "--json", url=server.url).json
    assert (told["pending"], told["live_workers"], told["silent_workers"]) == (1, None, None)


async def test_top_ends_in_the_middle_of_a_look(
    valkey_9: Server, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is closed during a look, and there is no screen left for a message."""
    app = Top(Endpoint.parse(valkey_9.url), [queue_name], group="default", interval_s=0.02)
    has_begun = asyncio.Event()

    async def look() -> None:
        has_begun.set()
        while app.screen_stack:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        raise ClosedError("the connection is closed")

    monkeypatch.setattr(app._board, "look", look)
    async with app.run_test(size=(80, 24)):
        await has_begun.wait()
    assert not app.screen_stack


async def test_top_shows_who_works_and_what_runs(valkey_9: Server, queue_name: str) -> None:
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def handler(job: Job) -> None:
        has_begun.set()
        await may_end.wait()

    worker = Worker(queue_name, handler, redis_url=valkey_9.url, consumer_id="w1")
    app = Top(Endpoint.parse(valkey_9.url), [queue_name], group="default", interval_s=0.02)
    async with Queue(queue_name, redis_url=valkey_9.url) as queue, asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        job = await queue.add("mail", 1)
        await has_begun.wait()
        async with app.run_test(size=(80, 24)) as pilot:
            running = app.query_one("#running", Table)
            while not running.row_count:
                await pilot.pause(0.02)
            assert [str(one) for one in running.get_row_at(0)][:3] == [job.id, "mail", "w1"]
            workers = app.query_one("#workers", Table)
            while not workers.row_count:
                await pilot.pause(0.02)
            assert [str(one) for one in workers.get_row_at(0)][:2] == ["w1", "1"]
        may_end.set()
        await worker.close()
