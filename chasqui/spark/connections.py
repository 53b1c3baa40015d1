"""Connections of Spark's processes: opened where they are used, never pickled; and which queues."""

import contextlib
import re
from collections.abc import Iterator
from typing import Final

from chasqui.errors import NotSupportedError
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.spark.options import OptionError, Options
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect, Plan, commands

#: Jobs in one script call: about a millisecond of the server's time.
CHUNK: Final = 250


@contextlib.contextmanager
def connected(options: Options, queue: str = "spark") -> Iterator[BlockingConnection]:
    """A connection to the server of a queue, for one block."""
    connection = open_connection(options, queue)
    try:
        yield connection
    finally:
        connection.close()


def open_connection(options: Options, queue: str = "spark") -> BlockingConnection:
    """A connection to the server of a queue, or to a replica of it if the options say so."""
    endpoint = options.endpoint()
    if options.read_from == "replica":
        endpoint = _replica(endpoint, queue)
    return _open(endpoint, queue)


def _open(endpoint: Endpoint, queue: str) -> BlockingConnection:
    return BlockingConnection(endpoint, key=Keys(queue).stream, client_name="chasqui-spark")


def _replica(endpoint: Endpoint, queue: str) -> Endpoint:
    primary = _open(endpoint, queue)
    try:
        info = primary.execute("INFO", "replication", effect=Effect.READ).decode()
    finally:
        primary.close()
    if "role:slave" in info:
        return endpoint
    found = re.search(r"slave\d+:ip=([^,]+),port=(\d+),state=online", info)
    if found is None:
        raise NotSupportedError(f"readFrom=replica: {endpoint} has no replica that is in step")
    return endpoint.at(found[1], int(found[2]))


# ── Which queues ────────────────────────────────────────────────────────────────────────────────

_KEY = re.compile(rb"\{chasqui:([^}]+)\}:(?:stream|events|dlq|delayed|history)")


def queues_of(options: Options) -> tuple[str, ...]:
    """The queues that the options name; those of a pattern are looked up now."""
    if options.queue:
        return options.queue
    if options.endpoint().kind == "cluster":
        raise OptionError("a cluster has no one list of its keys: name the queues with queue")
    with connected(options) as connection:
        found = connection.run(_find_queues())
    if options.subscribe_pattern is None:
        return tuple(sorted(found))
    wanted = re.compile(options.subscribe_pattern)
    matching = tuple(sorted(name for name in found if wanted.fullmatch(name)))
    if not matching:
        raise OptionError(f"no queue matches subscribePattern {options.subscribe_pattern!r}")
    return matching


def _find_queues() -> Plan[set[str]]:
    cursor, names = b"0", set[str]()
    while True:
        scan = ("SCAN", cursor, "MATCH", b"{chasqui:*}:*", "COUNT", 1000)
        cursor, found = yield commands(scan, effect=Effect.READ)
        names.update(one[1].decode() for key in found if (one := _KEY.fullmatch(key)))
        if cursor == b"0":
            return names


def check_queues(options: Options, queues: tuple[str, ...]) -> None:
    """Refuse a queue that has no keys: a misspelt name would read as an empty table."""
    for queue in queues:
        keys = Keys(queue)
        with connected(options, queue) as connection:
            there = connection.execute(
                "EXISTS",
                keys.stream,
                keys.events,
                keys.dlq,
                keys.delayed,
                keys.repeat,
                keys.history,
                effect=Effect.READ,
            )
        if not there:
            raise OptionError(
                f"queue {queue!r} is not on {options.endpoint()}: nothing was ever added to it"
            )


def check_history(options: Options, queues: tuple[str, ...] = ()) -> None:
    """Refuse a history that no worker writes: it would read as an empty table."""
    if options.table != "history":
        return
    for queue in queues or queues_of(options):
        with connected(options, queue) as connection:
            there = connection.execute("EXISTS", Keys(queue).history, effect=Effect.READ)
        if not there:
            raise OptionError(
                f"no worker of queue {queue!r} writes history: start workers with history=True"
            )
