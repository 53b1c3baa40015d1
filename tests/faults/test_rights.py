"""One command of a script is denied: the caller is told so, and nothing has changed.

Scripts do not roll back, so each of them uses every command once before its first change. A key
that is denied needs no such care: scripts are given all theirs, and the server asks about them.
"""

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgpack
import pytest
import redis as redis_py

from chasqui import RepeatPattern
from chasqui.errors import AuthenticationError
from chasqui.model.keys import DEFAULT_GROUP, ENVELOPE, Keys
from chasqui.scripts import adding, managing, settling, timing
from chasqui.sync import Queue
from chasqui.transport.request import Script
from tests.servers import Server

pytestmark = pytest.mark.fault(29)

#: What comes and goes with each call, and says nothing about a job.
BOOKS = re.compile(rb":(applied:.*|flags:.*|wake)$")
EVERY = RepeatPattern.every(60_000)
SPEC = "spec"
ENVELOPED = msgpack.packb(["id", b"\x01", 1, 0])
#: A moment that is long past.
PAST_MS = 1_000_000


class Case(NamedTuple):
    """Something that a script does."""

    script: Script
    #: Does it, by a queue of the user's or by a plain client.
    call: Callable[[Queue, redis_py.Redis, Keys], Any]
    #: The commands that it cannot do without.
    needs: str


def run(
    script: Script, keys: Callable[[Keys], list[bytes]], *arguments: object
) -> Callable[[Queue, redis_py.Redis, Keys], Any]:
    """Runs a worker's script on its own."""

    def call(queue: Queue, client: redis_py.Redis, names: Keys) -> Any:
        found = client.xrange(names.stream, count=1)[0][0]
        given = [found if one is ENTRY else one for one in arguments]
        return client.eval(script.source, len(keys(names)), *keys(names), *given)

    return call


def fire_keys(keys: Keys) -> list[bytes]:
    return [keys.stream, keys.delayed, keys.repeat, keys.wake, keys.repeat_spec("fires")]


#: Stands for the id of the entry that the worker has in hand.
ENTRY = object()
MEMBER = b"\x04\x00\x00\x00mail" + ENVELOPED
MIXED: list[dict[str, Any]] = [
    {"name": "mail", "data": 1, "delay_ms": 9_000},
    {"name": "mail", "data": 2, "job_id": "used"},
    {"name": "mail", "data": 3},
]
CASES = {
    "add": Case(adding.ADD, lambda queue, *_: queue.add("mail", 1), "getbit setbit expire xadd"),
    "add many": Case(
        adding.ADD,
        lambda queue, *_: queue.add_bulk([{"name": "mail", "data": n} for n in range(300)]),
        "getbit setbit expire xadd",
    ),
    "add later": Case(
        adding.ADD_MIXED,
        lambda queue, *_: queue.add("mail", 1, delay_ms=9_000),
        "get set del zadd zrange time xlen",
    ),
    "add under an id": Case(
        adding.ADD_MIXED,
        lambda queue, *_: queue.add("mail", 1, job_id="used"),
        "get set del xadd exists",
    ),
    "add of each kind": Case(
        adding.ADD_MIXED, lambda queue, *_: queue.add_bulk(MIXED), "set del zadd xadd"
    ),
    "cancel": Case(
        adding.CANCEL, lambda queue, *_: queue.cancel_delayed("delayed"), "get set del zrem"
    ),
    "reschedule": Case(
        adding.RESCHEDULE,
        lambda queue, *_: queue.reschedule("delayed", delay_ms=90_000_000),
        "set del expire ttl zadd zscore",
    ),
    "replay": Case(
        managing.REPLAY, lambda queue, *_: queue.replay_dlq(), "get set del xadd xdel xrange"
    ),
    "delete": Case(
        managing.DELETE_DEAD, lambda queue, *_: queue.delete_dlq(), "get del xdel xrange"
    ),
    "repeat": Case(
        timing.UPSERT_REPEAT,
        lambda queue, *_: queue.upsert_repeatable_job("mail", 2, repeat=EVERY, key=SPEC),
        "exists set del zadd hset hdel",
    ),
    "repeat no more": Case(
        timing.REMOVE_REPEAT,
        lambda queue, *_: queue.remove_repeatable_by_key(SPEC),
        "exists set del zrem",
    ),
    "bury": Case(
        settling.BURY,
        run(
            settling.BURY,
            lambda keys: [keys.stream, keys.dlq],
            *(DEFAULT_GROUP, "me", "", "", "", "", "", ENTRY, 2, "d", ENVELOPED),
        ),
        "xpending xadd xack xdel",
    ),
    "retry": Case(
        settling.RETRY,
        run(
            settling.RETRY,
            lambda keys: [keys.stream, keys.delayed, keys.wake, keys.traces, keys.didx("id")],
            *(DEFAULT_GROUP, "me", ENTRY, 9_000, MEMBER, ""),
        ),
        "xpending zadd xack xdel",
    ),
    "promote": Case(
        timing.PROMOTE,
        run(
            timing.PROMOTE,
            lambda keys: [keys.delayed, keys.stream, keys.dlq, keys.traces, keys.didx("")],
            *(100, ""),
        ),
        "zrangebyscore xadd zrem",
    ),
    "fire": Case(
        timing.FIRE,
        run(
            timing.FIRE,
            fire_keys,
            *("", "fires", PAST_MS, PAST_MS + 1, "mail", 1, PAST_MS, ENVELOPED),
        ),
        "zscore zadd xadd hincrby",
    ),
    "fire for the last time": Case(
        timing.FIRE,
        run(
            timing.FIRE,
            fire_keys,
            *("", "fires", PAST_MS, "", "mail", 1, 1 << 50, ENVELOPED),
        ),
        "zscore zadd zrem",
    ),
    "fire several": Case(
        timing.FIRE,
        run(
            timing.FIRE,
            lambda keys: [*fire_keys(keys), keys.repeat_spec(SPEC), keys.repeat_spec("gone")],
            *("", "fires", PAST_MS, "", "mail", 1, PAST_MS, ENVELOPED),
            *("gone", PAST_MS, PAST_MS + 1, "mail", 1, PAST_MS, ENVELOPED),
            *("fires", PAST_MS, PAST_MS + 1, "", 2, PAST_MS, ENVELOPED, 1 << 50, ENVELOPED),
        ),
        "zscore zadd xadd zrem hincrby",
    ),
}


def commands_of(script: Script) -> list[str]:
    """All that a script calls."""
    found = re.findall(rb"call\('([A-Z]+)'", script.source)
    return sorted({word.decode().lower() for word in found})


@contextmanager
def user_without(command: str, redis: redis_py.Redis, url: str) -> Iterator[str]:
    """The URL of a user who may do all but this."""
    name = f"without-{secrets.token_hex(4)}"
    redis.execute_command("ACL", "SETUSER", name, "on", ">pw", "~*", "+@all", f"-{command}")
    try:
        yield url.replace("://", f"://{name}:pw@")
    finally:
        redis.execute_command("ACL", "DELUSER", name)


def state(redis: redis_py.Redis, keys: Keys) -> dict[bytes, bytes | None]:
    """All that the queue is."""
    return {
        name: redis.dump(name)
        for name in redis.scan_iter(keys.pattern, count=1000)
        if not BOOKS.search(name)
    }


@pytest.mark.parametrize(
    ("what", "command"),
    [(what, command) for what, case in CASES.items() for command in commands_of(case.script)],
)
def test_what_is_denied_changes_nothing(
    what: str, command: str, server: Server, queue_name: str
) -> None:
    case, keys = CASES[what], Keys(queue_name)
    with (
        redis_py.Redis.from_url(server.url) as redis,
        Queue(queue_name, redis_url=server.url) as queue,
        user_without(command, redis, server.url) as url,
        redis_py.Redis.from_url(url) as client,
        Queue(queue_name, redis_url=url) as theirs,
    ):
        queue.add("mail", 1)
        redis.xgroup_create(keys.stream, DEFAULT_GROUP, 0)
        redis.xreadgroup(DEFAULT_GROUP, "me", {keys.stream: ">"})
        queue.add("mail", 1, delay_ms=3_600_000, job_id="delayed")
        redis.zadd(keys.delayed, {MEMBER: PAST_MS})
        queue.upsert_repeatable_job("mail", 1, repeat=EVERY, key=SPEC, attempts=3)
        redis.zadd(keys.repeat, {"fires": PAST_MS})
        redis.hset(keys.repeat_spec("fires"), "fired", 1)
        redis.set(keys.result("used"), b"\x01")
        redis.xadd(keys.dlq, {ENVELOPE: ENVELOPED, "source_id": "1-0", "reason": "panic"})
        before = state(redis, keys)
        refusal: Exception | None = None
        try:
            case.call(theirs, client, keys)
        except (AuthenticationError, redis_py.ResponseError) as error:
            refusal = error
        if refusal is not None:
            assert re.search("NOPERM|ACL failure|can't run|permission", str(refusal)), refusal
            assert state(redis, keys) == before
        else:
            assert command not in case.needs.split()
            assert state(redis, keys) != before
        redis.delete(*redis.scan_iter(keys.pattern, count=1000))
