"""`chasqui inspect`: one queue at a glance."""

from chasqui.cli.facts import look
from chasqui.cli.known import must_exist
from chasqui.cli.options import AsJson, Group, QueueName, RedisUrl
from chasqui.cli.output import as_names, show
from chasqui.cli.run import on_server
from chasqui.keys import DEFAULT_GROUP, Keys


def inspect(
    queue: QueueName,
    redis_url: RedisUrl = None,
    group: Group = DEFAULT_GROUP,
    as_json: AsJson = False,
) -> None:
    """Show how much a queue holds.

    Depth counts waiting and pending jobs; pending ones were handed to a worker and are not done, or
    were handed back and wait for the next. Live workers were seen in the last minute.

    Example: chasqui inspect emails
    """
    must_exist(queue, redis_url, as_json=as_json)
    keys = Keys(queue)
    facts = on_server(redis_url, lambda connection: look(connection, keys, group), queue=queue)
    rows = facts.rows()
    if as_json:
        rows = as_names(rows)
    elif not facts.has_group:
        rows["pending"] = "0 (group not created)"
    show(rows, as_json=as_json)
