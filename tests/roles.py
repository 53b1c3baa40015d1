"""The suite under the users of docs/operations.md: `python -m pytest -p tests.roles tests/…`.

Each part of chasqui connects as the user that it is meant to have; the tests' own clients, and who
brings a password, stay what they are. The run fails if a server refused any of them anything, and
tells of which modules no test had any of them. `--roles-on KIND` leaves out what runs elsewhere.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from chasqui.model.config import Endpoint, Secret
from chasqui.transport.handshake import Handshake
from tests.servers import KINDS, Server

OPERATIONS = Path(__file__).parents[1] / "docs" / "operations.md"
RULES = dict(re.findall(r"^```acl\nuser (\w+) (.+)\n```$", OPERATIONS.read_text(), re.MULTILINE))
PASSWORD = "change-me"
#: Which user a connection is, by the start of its name.
USERS = {
    "chasqui-producer": "producer",
    "chasqui-worker": "worker",
    "chasqui-promoter": "worker",
    "chasqui-scheduler": "worker",
    "chasqui-events": "inspector",
    "chasqui-exporter": "inspector",
    "chasqui-cli": "operator",
}
#: Where queues look after jobs as well, or instead: who they are in these modules.
QUEUES = {
    "test_at_once": "producer_and_operator",
    "test_flows": "producer_and_operator",
    "test_blocking_threads": "producer_and_operator",
    "test_counts_agree": "producer_and_operator",
    "test_dead_jobs": "operator",
    "test_durable": "producer_and_operator",
    "test_ends_told": "producer_and_operator",
    "test_forked_links": "producer_and_operator",
    "test_history": "producer_and_operator",
    "test_job_results": "producer_and_operator",
    "test_looking_after": "producer_and_operator",
    "test_lost_replies": "producer_and_operator",
    "test_otel": "producer_and_operator",
    "test_places": "producer_and_operator",
    "test_producer": "producer_and_operator",
    "test_prometheus": "producer_and_operator",
    "test_reading": "producer_and_operator",
    "test_refused": "producer_and_operator",
    "test_results": "producer_and_operator",
    "test_retention": "producer_and_operator",
    "test_retries": "producer_and_operator",
    "test_scheduler": "producer_and_operator",
    "test_scheduler_behind": "producer_and_operator",
    "test_scheduler_running": "producer_and_operator",
    "test_shredded": "producer_and_operator",
    "test_shutdown": "producer_and_operator",
}


def set_users(client: redis_py.Redis, queue_name: str = "*") -> None:
    """Make the four users, for one queue or for all, in the words that this server knows."""
    known = {_text(one[0]) for one in _plain(client).execute_command("COMMAND")}
    has_read_patterns = int(client.info("server")["redis_version"].split(".")[0]) >= 7
    both = f"{RULES['producer']} {RULES['operator']}".replace("resetkeys -@all", "")
    for user, rules in {**RULES, "producer_and_operator": f"resetkeys -@all {both}"}.items():
        words = rules.replace("{chasqui:Q}", f"{{chasqui:{queue_name}}}")
        if not has_read_patterns:
            words = words.replace("%R~", "~")
        taken = [
            word
            for word in words.split()
            if not word.startswith("+") or word[1:].partition("|")[0] in known
        ]
        client.execute_command("ACL", "SETUSER", user, *taken)


def refusals(client: redis_py.Redis) -> list[str]:
    """What was refused to these users: to whom, why, and what it was."""
    log = client.execute_command("ACL", "LOG", 100)
    told = [{_text(name): _text(value) for name, value in _pairs(entry)} for entry in log]
    return [
        f"{entry['username']}: {entry['reason']} {entry['object']}"
        for entry in told
        if entry["username"] in (*RULES, "producer_and_operator")
    ]


# ── What the plugin does ────────────────────────────────────────────────────────────────────────

_module = ""
#: The modules of which a test ran, and those of which one connected as a user.
_ran: set[str] = set()
_had_users: set[str] = set()
_refused: list[str] = []
_start, _close, _real_talk = Server.start, Server.close, Handshake.talk


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--roles-on", choices=list(KINDS), help="only what runs on this server")


def pytest_configure() -> None:
    Handshake.talk = _talk  # type: ignore[method-assign]
    Server.start = _start_with_users  # type: ignore[method-assign]
    Server.close = _close_after_a_look  # type: ignore[method-assign]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kind = config.getoption("--roles-on")
    if kind is not None:
        items[:] = [item for item in items if kind in _kinds(item)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    global _module
    _module = item.path.stem
    _ran.add(_module)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _refused:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in sorted(set(_refused)):
        terminalreporter.write_line(f"refused: {line}", red=True)
    for module in sorted(_ran - _had_users):
        terminalreporter.write_line(f"under no user: {module}")


def _kinds(item: pytest.Item) -> set[str]:
    """The kinds of server that a test runs on, by its parameters and fixtures."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    fixtures = getattr(item, "fixturenames", ())
    named = {one for one in parameters if isinstance(one, str) and one in KINDS}
    named |= {kind for kind in KINDS if kind.replace("-", "_").replace(".", "") in fixtures}
    return named or ({"redis-8.6"} if "private_server" in fixtures else set())


def _start_with_users(server: Server) -> None:
    _start(server)
    if _has_users(server):
        with redis_py.Redis.from_url(server.url, protocol=2) as client:
            set_users(client)


def _close_after_a_look(server: Server) -> None:
    if server._process is not None and _has_users(server):
        with redis_py.Redis.from_url(server.url, protocol=2) as client:
            _refused.extend(f"{server.name}: {line}" for line in refusals(client))
    _close(server)


def _has_users(server: Server) -> bool:
    """Not if the test is about a password: who has none must be refused there."""
    return "requirepass" not in server.settings


def _talk(handshake: Handshake, endpoint: Endpoint) -> Any:
    name = handshake.client_name
    user = next((user for start, user in USERS.items() if name.startswith(start)), None)
    if user is not None and endpoint.username is None and endpoint.password is None:
        username = QUEUES.get(_module, user) if user == "producer" else user
        endpoint = dataclasses.replace(endpoint, username=username, password=Secret(PASSWORD))
        _had_users.add(_module)
    return _real_talk(handshake, endpoint)


def _plain(client: redis_py.Redis) -> redis_py.Redis:
    """The same without redis-py's own idea of what replies mean."""
    plain = redis_py.Redis(connection_pool=client.connection_pool)
    plain.response_callbacks.clear()
    return plain


def _pairs(entry: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(entry, dict):
        return iter(entry.items())
    return iter(zip(entry[::2], entry[1::2], strict=True))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
