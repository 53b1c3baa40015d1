"""The users of docs/operations.md: each can do its work, and no more than that."""

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
from prometheus_client import CollectorRegistry, generate_latest

from chasqui import ChasquiError, JobFailedError, Queue, QueueEvents, Worker, sync
from chasqui.exporter import Exporter
from chasqui.keys import Keys
from tests.servers import Server

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
RULES = dict(re.findall(r"^```acl\nuser (\w+) (.+)\n```$", OPERATIONS.read_text(), re.MULTILINE))


@pytest.fixture(params=["redis-8.6", "valkey-9"])
def admin(
    request: pytest.FixtureRequest, private_server: Callable[..., Server], queue_name: str
) -> Iterator[redis_py.Redis]:
    """A server with the four users, for the test's queue."""
    server = private_server(request.param)
    with redis_py.Redis.from_url(server.url, decode_responses=True) as client:
        client.url = server.url
        known = set(client.command_list())
        for user, rules in RULES.items():
            words = rules.replace("{chasqui:Q}", f"{{chasqui:{queue_name}}}").split()
            taken = [
                word
                for word in words
                if not word.startswith("+") or word[1:].partition("|")[0] in known
            ]
            client.execute_command("ACL", "SETUSER", user, *taken)
        yield client


def url_of(admin: redis_py.Redis, user: str) -> str:
    return str(admin.url).replace("redis://", f"redis://{user}:change-me@")


def refusals(admin: redis_py.Redis) -> list[tuple[str, str, str]]:
    """What was refused: to whom, why, and what it was."""
    return [
        (entry["username"], entry["reason"], entry["object"])
        for entry in admin.execute_command("ACL", "LOG", 100)
    ]


async def handler(job: Any) -> Any:
    if job.name == "bad":
        raise ValueError("no")
    if job.name == "once" and job.attempt == 0:
        raise ValueError("not yet")
    return {"got": job.data}


def test_the_four_roles_are_there() -> None:
    assert list(RULES) == ["producer", "worker", "inspector", "operator"]


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
    everybody = tuple(RULES)
    for command, allowed in (
        (("FLUSHALL",), ()),
        (("CONFIG", "SET", "maxmemory", "1"), ()),
        (("KEYS", "*"), ()),
        (("SCRIPT", "FLUSH"), ()),
        (("XGROUP", "DESTROY", keys.stream, "default"), ()),
        (("XADD", other.stream, "*", "d", "x"), ()),
        (("XLEN", other.stream), ()),
        (("GET", "somebody's"), ()),
        (("XADD", keys.dlq, "*", "d", "x"), ("worker", "operator")),
        (("XADD", keys.stream, "*", "d", "x"), ("producer", "worker", "operator")),
        (("XREADGROUP", "GROUP", "g", "c", "STREAMS", keys.stream, ">"), ("worker",)),
        (("SET", keys.paused, "1"), ("worker", "operator")),
        (("SET", keys.result("1"), "x"), ("worker", "operator")),
        (("XLEN", keys.dlq), everybody),
    ):
        can = []
        for user in RULES:
            answer = admin.execute_command("ACL", "DRYRUN", user, *command)
            if answer == "OK" or answer is True:
                can.append(user)
        assert tuple(can) == allowed, command


async def test_a_script_gives_an_inspector_no_more(admin: redis_py.Redis, queue_name: str) -> None:
    keys = Keys(queue_name)
    with redis_py.Redis.from_url(url_of(admin, "inspector")) as redis:
        for call in ("'XADD', KEYS[1], '*', 'd', 'x'", "'DEL', KEYS[1]"):
            with pytest.raises(redis_py.ResponseError):
                redis.eval(f"return redis.call({call})", 1, keys.stream)
    async with Queue(queue_name, redis_url=url_of(admin, "inspector")) as queue:
        with pytest.raises(ChasquiError, match="permission"):
            await queue.add("mail", 1)
        with pytest.raises(ChasquiError, match="permission"):
            await queue.pause()
