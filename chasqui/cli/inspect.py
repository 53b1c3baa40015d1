"""`chasqui inspect`: what one queue holds."""

from dataclasses import asdict

from chasqui.cli.facts import Facts, look
from chasqui.cli.known import must_exist
from chasqui.cli.options import AsJson, Group, QueueName, RedisUrl
from chasqui.cli.output import as_names, show
from chasqui.cli.run import on_server
from chasqui.managing import retention
from chasqui.managing.retention import Log, Retention
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.transport.connection import Connection


def inspect(
    queue: QueueName,
    redis_url: RedisUrl = None,
    group: Group = DEFAULT_GROUP,
    as_json: AsJson = False,
) -> None:
    """Show how much a queue holds.

    Stream depth counts waiting and pending jobs. A pending job was delivered to a worker and has
    not ended, or was given back and waits for another worker. Live workers were seen in the last
    minute. Each event reader has the number of events that it has not read.

    Example: chasqui inspect emails
    """
    must_exist(queue, redis_url, as_json=as_json)
    keys = Keys(queue)

    async def look_twice(connection: Connection) -> tuple[Facts, Retention]:
        kept = await connection.run(retention.look(Log.events(keys)))
        return await look(connection, keys, group), kept

    facts, kept = on_server(redis_url, look_twice, queue=queue)
    rows = facts.rows() | {"events": kept.length, "events kept": kept.max_len}
    if as_json:
        rows = as_names(rows) | {"event_readers": [asdict(one) for one in kept.readers]}
    else:
        rows |= {"event readers": "\n".join(map(str, kept.readers)) or None}
        if not facts.has_group:
            rows["pending"] = "0 (group not created)"
    show(rows, as_json=as_json)
