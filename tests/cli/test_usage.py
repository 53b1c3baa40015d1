"""Help, mistakes, and secrets: what every command has in common."""

from typing import Any

import pytest

from chasqui.cli import app
from tests.cli.conftest import Chasqui, run, run_in_terminal
from tests.servers import Server

COMMANDS = [
    "demo", "server", "worker", "add", "inspect", "queues", "pause", "resume", "obliterate",
    "doctor", "dlq peek", "dlq show", "dlq replay", "dlq delete", "delayed list", "delayed cancel",
    "repeatable list", "repeatable add", "repeatable remove",
]  # fmt: skip

#: A command line for each command that talks to a server.
CALLS = [
    "add q name {}", "add q --from -", "inspect q", "queues", "pause q", "resume q",
    "obliterate q --yes", "doctor", "dlq peek q", "dlq show q", "dlq show q 1-1", "dlq replay q",
    "dlq delete q", "delayed list q", "delayed cancel q id", "repeatable list q",
    "repeatable add q name --every 1s", "repeatable remove q key",
]  # fmt: skip

CANARY = "canary-3f9a"


def some_quick(cases: list[str]) -> list[Any]:
    """All cases, of which `make test-fast` runs the first few."""
    return [*cases[:3], *(pytest.param(case, marks=pytest.mark.slow) for case in cases[3:])]


@pytest.mark.parametrize("command", some_quick(COMMANDS))
def test_help_has_an_example_and_fits_the_screen(command: str) -> None:
    ran = run(*command.split(), "--help")
    assert ran.code == 0
    assert f"Example: chasqui {command}" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    if command not in ("demo", "server"):
        assert "--redis-url" in ran.out


def test_help_lists_every_command() -> None:
    shown = run("--help").out
    assert [
        name for name in {command.split()[0] for command in COMMANDS} if name not in shown
    ] == []


def test_commands_above_are_all_there_are() -> None:
    groups = {group.name: group.typer_instance for group in app.registered_groups}
    names = [str(command.name) for command in app.registered_commands]
    for group, inner in groups.items():
        names += [
            f"{group} {command.name or command.callback.__name__}"  # type: ignore[union-attr]
            for command in inner.registered_commands
        ]
    assert sorted(names) == sorted(COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["fly"], "No such command 'fly'"),
        (["inspect"], "Missing argument 'QUEUE'"),
        (["inspect", "q", "--fast"], "No such option"),
        (["inspect", "no{braces}"], "queue name must be 1 to 200 characters"),
        (["inspect", "q", "--redis-url", "http://x"], "redis_url must start with one of"),
        (["add", "q"], "say what to add"),
        (["add", "q", "name", "{"], "the job's data is not JSON"),
        (["add", "q", "name", "1", "--delay", "5"], "'5' is no time"),
        (["add", "q", "name", "1", "--attempts", "0"], "'--attempts'"),
        (["add", "q", "name", "1", "--id", "a}b"], "job_id must hold no braces"),
        (["add", "q", "name", "1" + "0" * 30], "64"),
        (["add", "q", "n" * 257, "1"], "256 bytes"),
        (["add", "q", "name", "--from", "x.jsonl", "--id", "a"], "each line says its own"),
        (["dlq", "peek", "q", "--since", "yesterday"], "'yesterday' is no moment"),
        (["repeatable", "add", "q", "name"], "either --cron or --every"),
        (["repeatable", "add", "q", "name", "--cron", "x"], "cron expression 'x'"),
        (["repeatable", "add", "q", "name", "--every", "1s", "--tz", "UTC"], "--tz is for --cron"),
        (["repeatable", "add", "q", "n", "--every", "1s", "--missed", "fire-all"], "fire-all:10"),
    ],
)
def test_mistake_is_one_sentence_and_exit_code_2(
    chasqui: Chasqui, arguments: list[str], told: str
) -> None:
    ran = chasqui(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("chasqui: ")
    assert ran.err.count("\n") == 1
    assert told in ran.err


def test_missing_file_is_one_sentence() -> None:
    ran = run("add", "q", "--from", "/no/such/file.jsonl", url="redis://127.0.0.1:1")
    assert ran.code == 1
    assert ran.err == "chasqui: [Errno 2] No such file or directory: '/no/such/file.jsonl'\n"


@pytest.mark.parametrize("call", some_quick(CALLS))
def test_unreachable_server_is_one_sentence_without_the_password(call: str) -> None:
    ran = run(
        *call.split(),
        "--redis-url",
        f"redis://user:{CANARY}@127.0.0.1:1/0",
        stdin='{"name": "n", "data": 1}\n',
    )
    assert ran.code == 1
    assert CANARY not in ran.out + ran.err
    *_, last = ran.err.splitlines()
    assert last.startswith("chasqui: no connection to 127.0.0.1:1")
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("call", ["inspect q", "doctor", "queues"])
def test_refused_password_is_not_shown(valkey_9: Server, call: str) -> None:
    url = valkey_9.url.replace("://", f"://nobody:{CANARY}@")
    for ran in (run(*call.split(), url=url), run_in_terminal(*call.split(), url=url)):
        assert ran.code == 1
        assert "WRONGPASS" in ran.out + ran.err
        assert CANARY not in ran.out + ran.err


def test_bad_url_does_not_show_its_password() -> None:
    ran = run("inspect", "q", "--redis-url", f"redis://u:{CANARY}@host:port/x/y?z=1")
    assert ran.code == 2
    assert CANARY not in ran.err


def test_url_may_stand_before_the_command(valkey_9: Server, queue_name: str) -> None:
    ran = run("--redis-url", valkey_9.url, "inspect", queue_name, url="redis://127.0.0.1:1")
    assert ran.code == 0


def test_version() -> None:
    ran = run("--version")
    assert ran.code == 0
    assert ran.out.startswith("chasqui ")
