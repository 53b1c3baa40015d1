"""`chasqui inspect`: one queue at a glance. The first six rows are chasquimq's, in its words."""

from typing import Any

from chasqui.cli.options import AsJson, Group, QueueName, RedisUrl
from chasqui.cli.output import show
from chasqui.cli.run import on_server
from chasqui.connection import Connection
from chasqui.keys import DEFAULT_GROUP, Keys
from chasqui.plans import Plans
from chasqui.queue import Counts
from chasqui.repeatables import scored
from chasqui.request import Effect, commands


def inspect(
    queue: QueueName,
    redis_url: RedisUrl = None,
    group: Group = DEFAULT_GROUP,
    as_json: AsJson = False,
) -> None:
    """Show how much a queue holds.

    Depth counts waiting and pending jobs; pending ones were handed to a worker and are not done.

    Example: chasqui inspect emails
    """
    keys = Keys(queue)
    facts = on_server(redis_url, lambda connection: _facts(connection, keys, group), queue=queue)
    has_group = facts.pop("has group")
    if as_json:
        bare = str.maketrans(" ", "_", "()")
        facts = {name.lower().translate(bare): value for name, value in facts.items()}
    elif not has_group:
        facts["pending"] = "0 (group not created)"
    show(facts, as_json=as_json)


async def _facts(connection: Connection, keys: Keys, group: str) -> dict[str, Any]:
    counts = Counts.of(await connection.run(Plans(keys).counts(group)))
    request = commands(
        ("XINFO", "GROUPS", keys.stream),
        ("ZRANGE", keys.delayed, 0, 0, "WITHSCORES"),
        ("TIME",),
        effect=Effect.READ,
        raises=False,
    )
    groups, oldest, (seconds, micros) = await connection.submit(request)
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    return {
        "stream depth": counts.waiting + counts.pending,
        "pending": counts.pending,
        "DLQ depth": counts.dlq,
        "delayed depth": counts.delayed,
        "oldest delayed lag (ms)": next((max(0, now_ms - due) for _, due in scored(oldest)), None),
        "repeatable count": counts.repeatables,
        "oldest job in stream (ms)": counts.oldest_ms,
        "paused": counts.is_paused,
        "has group": _has(groups, group),
    }


def _has(groups: Any, name: str) -> bool:
    """Whether XINFO GROUPS lists a group; an error reply says that there is no stream."""
    if not isinstance(groups, list):
        return False
    facts = (one if isinstance(one, dict) else dict(zip(one[::2], one[1::2])) for one in groups)  # noqa: B905
    return any(fact.get(b"name") == name.encode() for fact in facts)
