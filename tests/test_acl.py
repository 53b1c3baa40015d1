"""The users of docs/operations.md: each can do its work, and no more than that."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
from prometheus_client import CollectorRegistry, generate_latest

from chasqui import ChasquiError, JobFailedError, Queue, QueueEvents, Worker, sync
from chasqui.cli.rights import ROLES, needed, sample
from chasqui.exporter import Exporter
from chasqui.model.keys import Keys
from tests.roles import RULES, refusals, set_users
from tests.servers import KINDS, Server

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent
#: The rooms whose tests talk to a server as producers, workers and operators do.
ROOMS = ("consuming", "events", "integrations", "managing", "metrics", "producing", "timed")
ROOMS += ("transport",)
#: Their modules that say nothing about these users, and why.
LEFT_OUT = {
    "consuming/test_memory.py": "slow as a whole, and about memory",
    "timed/test_interop.py": "slow as a whole; another implementation takes part",
    "transport/test_addresses.py": "plain connections",
    "transport/test_blocking.py": "plain connections",
    "transport/test_connection.py": "plain connections, that have no part to play",
    "transport/test_core_commands.py": "plain connections",
    "transport/test_interrupted.py": "plain connections, in programs of their own",
    "transport/test_lost_links.py": "plain connections",
    "transport/test_pushes.py": "asks for CLIENT TRACKING, which none of these users needs",
    "transport/test_server_answers.py": "plain connections",
    "transport/test_tls.py": "plain connections",
    "transport/test_topology.py": "slow as a whole; clusters and sentinels that it starts",
    "consuming/test_appetite.py": "no server",
    "consuming/test_fate.py": "no server",
    "consuming/test_flow_model.py": "plain connections, that play the part of a worker",
    "consuming/test_handler_checks.py": "no server",
    "consuming/test_runs.py": "no server",
    "consuming/test_shared_slots.py": "no server",
    "consuming/test_sharing.py": "several queues, and these users have one",
    "consuming/test_simulation.py": "no server",
    "consuming/test_standing.py": "no server",
    "consuming/test_takeover_pause.py": "no server",
    "integrations/test_asgi.py": "web applications, whose tests count what they have added",
    "integrations/test_integrations.py": "no server",
    "metrics/test_metrics.py": "no server",
    "producing/test_job_options.py": "no server",
    "timed/test_cron.py": "no server",
    "timed/test_spec.py": "no server",
    "transport/test_embedded.py": "a server of its own",
    "transport/test_flow.py": "no server",
    "transport/test_recovery.py": "no server",
    "transport/test_server.py": "no server",
}
#: All others: what a new module holds is run under these users without being named here.
MODULES = [
    path.relative_to(HERE).as_posix()
    for room in ROOMS
    for path in sorted((HERE / room).glob("test_*.py"))
]
SUITE = [module for module in MODULES if module not in LEFT_OUT]


@pytest.fixture(params=["redis-8.6", "valkey-9", "redis-6.2"])
def admin(
    request: pytest.FixtureRequest, private_server: Callable[..., Server], queue_name: str
) -> Iterator[redis_py.Redis]:
    """A server with the four users, for the test's queue."""
    server = private_server(request.param)
    with redis_py.Redis.from_url(server.url, decode_responses=True) as client:
        client.url = server.url
        client.kind = request.param
        set_users(client, queue_name)
        yield client


def url_of(admin: redis_py.Redis, user: str) -> str:
    return str(admin.url).replace("redis://", f"redis://{user}:change-me@")


def may(admin: redis_py.Redis, user: str, *command: Any) -> bool:
    """Whether a user may use a command: the server is asked, or it is tried."""
    if admin.kind != "redis-6.2":
        return admin.execute_command("ACL", "DRYRUN", user, *command) in ("OK", True)
    try:
        with redis_py.Redis.from_url(url_of(admin, user)) as client:
            client.execute_command(*command)
    except redis_py.exceptions.NoPermissionError:
        return False
    except redis_py.ResponseError:
        pass  # allowed, and it did not make sense
    return True


def under_users(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of pytest under the users."""
    words = [f"tests/{one}" if one.endswith(".py") else one for one in arguments]
    command = [sys.executable, "-m", "pytest", "-p", "tests.roles", "-q", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


async def handler(job: Any) -> Any:
    if job.name == "bad":
        raise ValueError("no")
    if job.name == "once" and job.attempt == 0:
        raise ValueError("not yet")
    return {"got": job.data}


def test_the_four_roles_are_there() -> None:
    assert list(RULES) == ["producer", "worker", "inspector", "operator"]


@pytest.mark.slow
async def test_each_role_can_do_its_work(admin: redis_py.Redis, queue_name: str) -> None:
    producer, worker, inspector, operator = (url_of(admin, user) for user in RULES)
    running = Worker(queue_name, handler, redis_url=worker, store_results=True)
    task = asyncio.create_task(running.run())
    async with Queue(queue_name, redis_url=producer) as queue:
        jobs = [
            await queue.add("mail", 1),
            await queue.add("late", 2, delay_ms=5),
            await queue.add_unique("mail", 3, job_id="mine"),
            *await queue.add_bulk([{"name": "once", "data": 4, "backoff": 1}]),
        ]
        assert [await job.result() for job in jobs] == [{"got": i} for i in (1, 2, 3, 4)]
        later = await queue.add("late", 5, delay_ms=60_000)
        assert await queue.reschedule(later.id, delay_ms=70_000)
        assert await queue.cancel_delayed(later.id)
        spec = await queue.upsert_repeatable_job(
            "tick", 6, repeat={"kind": "every", "interval_ms": 50}
        )
        assert [one.key for one in await queue.get_repeatable_jobs()] == [spec.id]
        async with QueueEvents(
            queue_name, redis_url=inspector, names=["tick"], events=["completed"]
        ) as events:
            assert (await anext(events)).job_name == "tick"
        assert await queue.remove_repeatable_by_key(spec.id)
        bad = await queue.add("bad", 7, attempts=1)
        with pytest.raises(JobFailedError, match="ValueError: no"):
            await bad.result()
    with sync.Queue(queue_name, redis_url=producer) as plain:
        plain.add("mail", 8)
    async with Queue(queue_name, redis_url=inspector) as queue:
        assert (await queue.counts()).dlq == 1
        assert len(await queue.peek_dlq()) == 1
        assert not await queue.is_paused()
        registry = CollectorRegistry()
        with Exporter([queue_name], redis_url=inspector, registry=registry):
            text = (await asyncio.to_thread(generate_latest, registry)).decode()
        assert "chasqui_up 1.0" in text
    await running.close()
    await task
    async with Queue(queue_name, redis_url=operator) as queue:
        await queue.pause()
        await queue.resume()
        assert await queue.replay_dlq() == 1
        assert (await queue.counts()).waiting == 1
        assert await queue.delete_dlq() == 0
        assert await queue.obliterate(force=True) > 0
    assert refusals(admin) == []


async def test_no_role_can_do_more(admin: redis_py.Redis, queue_name: str) -> None:
    keys = Keys(queue_name)
    other = Keys("other-queue")
    everybody, rest = tuple(RULES), ("worker", "operator")
    is_old = admin.kind == "redis-6.2"
    for command, allowed in (
        (("FLUSHALL",), ()),
        (("CONFIG", "SET", "maxmemory", "1"), ()),
        (("KEYS", "*"), ()),
        (("SCRIPT", "FLUSH"), ()),
        (("XGROUP", "DESTROY", keys.stream, "default"), ()),
        (("XADD", other.stream, "*", "d", "x"), ()),
        (("XLEN", other.stream), ()),
        (("GET", "somebody's"), ()),
        # Before 7.0 a pattern is for writing, too.
        (("XADD", keys.dlq, "*", "d", "x"), ("producer", *rest) if is_old else rest),
        (("XADD", keys.stream, "*", "d", "x"), ("producer", "worker", "operator")),
        (("XREADGROUP", "GROUP", "g", "c", "STREAMS", keys.stream, ">"), ("worker",)),
        (("SET", keys.paused, "1"), ("worker", "operator")),
        (("SET", keys.result("1"), "x"), ("producer", *rest)),
        (("XLEN", keys.dlq), everybody),
    ):
        assert tuple(user for user in RULES if may(admin, user, *command)) == allowed, command


def test_each_role_has_what_doctor_asks_for(admin: redis_py.Redis, queue_name: str) -> None:
    """What the scripts and the code send, and not only what a test happened to."""
    lacks = () if admin.kind == "redis-8.6" else ("xackdel",)
    for role in ROLES:
        for name in set(needed(role)) - set(lacks):
            assert may(admin, role, *sample(name, Keys(queue_name))), (role, name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_the_suite_runs_under_these_users(kind: str) -> None:
    """tests/roles.py gives each connection its user and looks at the ACL logs; rights do not depend
    on the event loop."""
    run = under_users("--roles-on", kind, "-m", "not slow and not long", "-k", "not uvloop", *SUITE)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "refused: " not in run.stdout
    if kind == "redis-8.6":  # the one that can do all there is
        assert "under no user: " not in run.stdout


def test_what_is_left_out_is_there() -> None:
    assert [part for part in LEFT_OUT if not (HERE / part).is_file()] == []
    assert len(SUITE) + len(LEFT_OUT) == len(MODULES)


@pytest.mark.slow
def test_a_module_without_any_of_these_users_is_told() -> None:
    run = under_users(
        "--roles-on", "redis-8.6", "-k", "not uvloop", "transport/test_core_commands.py"
    )
    assert run.returncode == 0
    assert "under no user: test_core_commands" in run.stdout


@pytest.mark.slow
def test_a_run_that_is_refused_something_fails() -> None:
    program = (
        "import sys, pytest, tests.roles as roles\n"
        "roles.RULES['producer'] = roles.RULES['producer'].replace('+setbit ', '')\n"
        "sys.exit(pytest.main(sys.argv[1:], plugins=[roles]))"
    )
    part = "tests/producing/test_adding.py"
    arguments = ["-q", "-x", "-k", "valkey-9-async", part]
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "refused: valkey-9: producer: command setbit" in run.stdout


async def test_a_script_gives_an_inspector_no_more(admin: redis_py.Redis, queue_name: str) -> None:
    keys = Keys(queue_name)
    with redis_py.Redis.from_url(url_of(admin, "inspector")) as redis:
        for call in ("'XADD', KEYS[1], '*', 'd', 'x'", "'DEL', KEYS[1]"):
            with pytest.raises(redis_py.ResponseError):
                redis.eval(f"return redis.call({call})", 1, keys.stream)
    async with Queue(queue_name, redis_url=url_of(admin, "inspector")) as queue:
        with pytest.raises(ChasquiError, match=r"permission|can't run this command"):
            await queue.add("mail", 1)
        with pytest.raises(ChasquiError, match="permission"):
            await queue.pause()
