"""Real servers for every test, one process of each kind per run; nothing is ever flushed."""

import gc
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.hoarding import hoard
from tests.servers import KINDS, MissingServerError, RemoteServer, Server, remote_servers

pytest_plugins = ["pytester", "tests.faults.plugin", "tests.fixtures", "tests.passed_again"]

# How long an example takes is the machine's affair: several tests share its cores.
settings.register_profile("unhurried", settings(), deadline=None)
settings.load_profile("unhurried")

_REMOTE = {server.name: server for server in remote_servers()}
_HERE = Path(__file__).parent
#: Folders of which nothing belongs to the everyday part: processes, faults, another environment.
_SLOW = frozenset({_HERE / "crash", _HERE / "faults", _HERE / "interop"})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent in _SLOW:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Thousands of tests are not to be looked through each time that one collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def hoarding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers keep what they read ahead, however slow their handlers are."""
    hoard(monkeypatch.setattr)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Callable[[str], Server]]:
    """Gives the run's server of a kind, started when first asked for."""
    running: dict[str, Server] = {}

    def give(name: str) -> Server:
        if name not in running:
            running[name] = _start(name)
        return running[name]

    yield give
    for server in running.values():
        server.close()


@pytest.fixture(scope="session", params=[*KINDS, *_REMOTE])
def server(
    request: pytest.FixtureRequest, shared_server: Callable[[str], Server]
) -> Server | RemoteServer:
    """Each kind of server in turn. Shared by the run: use `queue_name`, stop nothing."""
    return _REMOTE.get(request.param) or shared_server(request.param)


@pytest.fixture(scope="session")
def valkey_9(shared_server: Callable[[str], Server]) -> Server:
    """The run's Valkey 9."""
    return shared_server("valkey-9")


@pytest.fixture(scope="session")
def redis_62(shared_server: Callable[[str], Server]) -> Server:
    """The run's Redis 6.2."""
    return shared_server("redis-6.2")


@pytest.fixture(scope="session")
def redis_86(shared_server: Callable[[str], Server]) -> Server:
    """The run's Redis 8.6."""
    return shared_server("redis-8.6")


@pytest.fixture
def private_server(request: pytest.FixtureRequest) -> Iterator[Callable[..., Server]]:
    """Starts servers that are the test's own to stop, kill and restart: `private_server(kind)`."""
    started: list[Server] = []

    def give(name: str = "redis-8.6", **settings: str) -> Server:
        request.node.user_properties.append(("server", name))
        started.append(_start(name, **settings))
        return started[-1]

    yield give
    for server in started:
        server.close()


@pytest.fixture
def queue_name() -> str:
    """A queue that no other test has used."""
    return f"test-{uuid.uuid4().hex}"


def _start(name: str, **settings: str) -> Server:
    try:
        return Server(name, **settings)
    except MissingServerError as error:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
