"""`retention`, and what `inspect`, `doctor` and the exporter say about readers of events."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from chasqui import sync
from chasqui.exporter import Exporter
from chasqui.managing import retention
from chasqui.managing.retention import EVENTS_KEPT, Log
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect
from tests.cli.conftest import Ran, call
from tests.servers import Server

Ask = Callable[..., Ran]

READER = "archive /lake, ü"


@pytest.fixture
def ask(server: Server) -> Ask:
    """Runs a command on each server in turn."""
    return partial(call, url=server.url)


@pytest.fixture
def events(server: Server, queue_name: str) -> Iterator[BlockingConnection]:
    """Ten events, of which a reader has read four."""
    keys = Keys(queue_name)
    connection = BlockingConnection(Endpoint.parse(server.url), key=keys.stream)
    for ms in range(1000, 11_000, 1000):
        connection.execute("XADD", keys.events, f"{ms}-0", "e", "active", effect=Effect.ONCE)
    plan = retention.reading(Log.events(keys), READER, "4000-0", 4, lease_ms=600_000, hold=1000)
    connection.run(plan)
    yield connection
    connection.close()


def test_it_is_shown_set_and_set_back(ask: Ask, server: Server, queue_name: str) -> None:
    assert ask("retention", queue_name).code == 1, "there is no such queue"
    ran = ask("retention", queue_name, "--keep", "500", "--json")
    assert (ran.code, ran.json["max_len"], ran.json["length"]) == (0, 500, 0)
    with sync.Queue(queue_name, redis_url=server.url) as queue:
        assert queue.get_events_retention().max_len == 500
    assert "events kept\t500" in ask("retention", queue_name).out
    assert (
        ask("retention", queue_name, "--keep", "default", "--json").json["max_len"] == EVENTS_KEPT
    )


def test_retention_of_finished_jobs_is_set_apart(ask: Ask, server: Server, queue_name: str) -> None:
    ran = ask("retention", queue_name, "--history", "--keep", "7", "--json")
    assert (ran.code, ran.json["max_len"]) == (0, 7)
    assert ask("retention", queue_name, "--json").json["max_len"] == EVENTS_KEPT
    assert "finished jobs kept\t7" in ask("retention", queue_name, "--history").out
    with sync.Queue(queue_name, redis_url=server.url) as queue:
        keys = Keys(queue_name)
        plan = retention.reading(Log.history(keys), READER, "0-0", 0, lease_ms=600_000, hold=1000)
        queue._run(plan)
        assert [one.name for one in queue.get_history_retention().readers] == [READER]
    assert ask("retention", queue_name, "--history", "--forget", READER).code == 0


@pytest.mark.parametrize("number", ["0", "-1", "many", "1.5", "1" * 20, "²"])
def test_a_number_that_makes_no_sense_is_refused(redis_86: Server, number: str) -> None:
    ran = call("retention", "q", f"--keep={number}", url=redis_86.url)
    assert (ran.code, ran.out) == (2, "")
    assert "--keep" in ran.err or "events_max_len" in ran.err


def test_readers_are_listed_and_forgotten(
    events: BlockingConnection, ask: Ask, server: Server, queue_name: str
) -> None:
    behind = None if server.name == "redis-6.2" else 6
    (reader,) = ask("retention", queue_name, "--json").json["readers"]
    assert (reader["name"], reader["lag"], reader["lag_ms"]) == (READER, behind, 6000)
    assert READER in ask("retention", queue_name).out
    ran = ask("retention", queue_name, "--forget", READER, "--forget", "nobody", "--json")
    assert (ran.code, ran.json["readers"]) == (1, [])
    assert ran.err.strip() == f"chasqui: queue {queue_name} has no reader nobody"


def test_inspect_and_doctor_tell_how_far_behind_readers_are(
    events: BlockingConnection, ask: Ask, server: Server, queue_name: str
) -> None:
    counts = server.name != "redis-6.2"
    told = f"{READER}, {'6 entries' if counts else '6.0 s'} behind"
    assert f"event readers\t{told}\n" in ask("inspect", queue_name).out
    found = ask("inspect", queue_name, "--json").json
    assert (found["events"], found["events_kept"]) == (10, EVENTS_KEPT)
    assert [one["name"] for one in found["event_readers"]] == [READER]

    def finding() -> tuple[str, str]:
        rows = ask("doctor", "--queue", queue_name, "--json").json
        (row,) = [row for row in rows if row["what"] == "events reader"]
        return row["verdict"], row["found"]

    assert finding() == ("ok", told)
    if counts:
        events.execute("XTRIM", Keys(queue_name).events, "MAXLEN", 3, effect=Effect.ONCE)
        assert finding() == ("RISK", f"{told}, 3 of them lost")


def test_the_exporter_has_the_lag_of_readers(
    events: BlockingConnection, server: Server, queue_name: str
) -> None:
    registry = CollectorRegistry()
    with Exporter([queue_name], redis_url=server.url, registry=registry):
        scraped = generate_latest(registry).decode()
    of_reader = f'{{queue="{queue_name}",reader="{READER}"}}'
    assert f'chasqui_queue_events{{queue="{queue_name}"}} 10.0' in scraped
    assert f'chasqui_queue_events_max_len{{queue="{queue_name}"}} 100000.0' in scraped
    assert f"chasqui_events_reader_lag_seconds{of_reader} 6.0" in scraped
    assert f"chasqui_events_reader_alive{of_reader} 1.0" in scraped
    has_count = f"chasqui_events_reader_lag{of_reader} 6.0" in scraped
    assert has_count == (server.name != "redis-6.2")
