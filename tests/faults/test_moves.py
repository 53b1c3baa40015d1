"""Destinations that cannot be written: a worker that lets go before the copy is made loses jobs.

What the product does is shown where its moves are tested; these are the controls.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import redis as redis_py

from chasqui.keys import ENVELOPE, Keys
from tests.crash.broken import BrokenWorker
from tests.integration.consuming.conftest import envelope
from tests.ledger import Census, audit
from tests.servers import KINDS, Server

USER = "worker"


def no_memory(client: redis_py.Redis, keys: Keys) -> None:
    client.set("ballast", b"x" * 4_000_000)
    client.config_set("maxmemory", "3mb")


def wrong_type(client: redis_py.Redis, keys: Keys) -> None:
    client.set(keys.dlq, "no stream")


def no_rights(client: redis_py.Redis, keys: Keys) -> None:
    client.execute_command("ACL", "SETUSER", USER, "resetkeys", b"~" + keys.stream)


def relief(client: redis_py.Redis, keys: Keys) -> None:
    """So that the census can be taken."""
    client.config_set("maxmemory", "0")
    if client.type(keys.dlq) == b"string":
        client.delete(keys.dlq)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "refuse",
    [
        pytest.param(no_memory, marks=pytest.mark.fault(21, control=True)),
        pytest.param(wrong_type, marks=pytest.mark.fault(28, control=True)),
        pytest.param(no_rights, marks=pytest.mark.fault(29, control=True)),
    ],
)
def test_an_ack_before_the_copy_loses_the_job(
    kind: str,
    refuse: Callable[[redis_py.Redis, Keys], None],
    private_server: Callable[..., Server],
    queue_name: str,
    tmp_path: Path,
) -> None:
    server, keys = private_server(kind), Keys(queue_name)
    with redis_py.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", USER, "on", ">pw", "+@all", "~*")
        client.xadd(keys.stream, {ENVELOPE: envelope({"n": 0})})
        url = server.url.replace("://", f"://{USER}:pw@")
        broken = BrokenWorker(url, queue_name, tmp_path, "broken")
        ((entry_id, found),) = broken.take()
        refuse(client, keys)
        with pytest.raises(redis_py.ResponseError, match=r"maxmemory|wrong kind|permission"):
            broken.bury(entry_id, found)
        relief(client, keys)
        assert audit([0], [], Census.take(server.url, queue_name)).faults == {"lost": {0}}
