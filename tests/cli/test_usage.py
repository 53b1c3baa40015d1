"""Help, mistakes, and secrets: what every command has in common."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.main import get_command

from chasqui.cli import COMMANDS as MODULES
from chasqui.cli import app
from chasqui.cli.output import escaped
from chasqui.model.keys import Keys
from tests.cli.conftest import Chasqui, call, run, run_in_terminal
from tests.servers import Server

COMMANDS = [
    "demo", "server", "worker", "promoter", "scheduler", "exporter", "add", "inspect", "queues",
    "watch", "top", "events", "tail", "retention", "job", "pause", "resume", "purge", "obliterate",
    "doctor",
    "dlq peek", "dlq show", "dlq replay", "dlq delete", "delayed list", "delayed cancel", "free",
    "repeatable list", "repeatable add", "repeatable remove", "repeatable next",
]  # fmt: skip

#: A command line for each command that talks to a server and then ends.
CALLS = [
    "inspect q", "queues", "add q name {}", "add q --from -", "watch q --times 2 --interval-ms 10",
    "events q --no-follow", "retention q", "retention q --keep 500", "job q id", "pause q",
    "resume q", "purge q --delayed --yes", "obliterate q --force --yes", "doctor", "dlq peek q",
    "dlq show q", "dlq show q 1-1", "dlq replay q", "dlq delete q", "delayed list q",
    "delayed cancel q id", "free q id", "repeatable list q", "repeatable add q name --every 1s",
    "repeatable remove q key", "repeatable next q",
]  # fmt: skip

#: Commands that run until a signal.
LASTING = ["promoter q", "scheduler q", "watch q", "events q", "tail q id", "events q --from 0"]

#: Commands that other modules test as processes, with a text to find there.
ELSEWHERE = {
    "demo": ("test_servers.py", '"demo"'),
    "server": ("test_servers.py", '"server"'),
    "worker": ("test_timed.py", '"worker"'),
    "exporter": ("../metrics/test_prometheus.py", '"exporter"'),
    "top": ("test_watching.py", '"top"'),
}

CANARY = "canary-3f9a"


def some_quick(cases: list[str]) -> list[Any]:
    """All cases; `make test-fast` runs only the first few."""
    return [*cases[:3], *(pytest.param(case, marks=pytest.mark.slow) for case in cases[3:])]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_fits_the_screen(command: str) -> None:
    ran = call(*command.split(), "--help")
    assert ran.code == 0
    assert f"Example: chasqui {command}" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "--redis-url URL" in ran.out
    assert "--json" in ran.out
    assert "env var" not in ran.out  # the default says it
    if command in ("worker", "promoter", "scheduler", "exporter", "server"):
        assert "--log-format" in ran.out
        assert "--log-level" in ran.out


@pytest.mark.parametrize("line", ["", "dlq", "repeatable", "delayed", "spark"])
def test_group_alone_shows_its_help(line: str) -> None:
    alone, asked = call(*line.split()), call(*line.split(), "--help")
    assert (alone.code, alone.out, alone.err) == (2, "", asked.out)
    assert "\n\nCommands:\n" in asked.out


@pytest.mark.parametrize("line", ["", "dlq", "inspect", "repeatable add"])
def test_help_has_a_short_name(line: str) -> None:
    assert call(*line.split(), "-h") == call(*line.split(), "--help")


def commands_of(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command of the program, with the words that call it."""
    names = command.list_commands(None) if hasattr(command, "list_commands") else []
    for one in names:
        yield from commands_of(command.get_command(None, one), f"{name} {one}".strip())
    if not names:
        yield name, command


def test_every_command_has_a_server_json_and_an_example() -> None:
    """Spark's commands too, whether it is installed or not."""
    found = dict(commands_of(get_command(app)))
    assert {"spark demo", "spark txn list"} < found.keys()
    for name, command in found.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert {"--redis-url", "--json"} <= options, name
        assert re.search(rf"Example: chasqui {name}\b", command.help), name
        shown = call(*name.split(), "--help").out
        assert not re.search(r"--\S+ <(str|int|float|list)", shown), f"a type of Python: {name}"
        assert all(
            parameter.help for parameter in command.params if parameter.opts[0].startswith("--")
        ), name


def test_every_command_is_tested_here_or_where_spark_is() -> None:
    found = [name for name, _ in commands_of(get_command(app)) if name.split()[0] != "spark"]
    assert sorted(found) == sorted(COMMANDS)
    lines = (*CALLS, *LASTING)
    for name in set(found) - ELSEWHERE.keys():
        assert any(f"{line} ".startswith(f"{name} ") for line in lines), name
    for name, (module, text) in ELSEWHERE.items():
        assert text in (Path(__file__).parent / module).read_text(), name


def test_help_lists_every_command_and_no_other() -> None:
    shown = run("--help").out.partition("Commands:\n")[2]
    assert re.findall(r"^  (\w+) ", shown, re.MULTILINE) == list(MODULES)
    groups = {command.split()[0] for command in COMMANDS if " " in command}
    single = {command for command in COMMANDS if " " not in command}
    assert groups | single | {"spark"} == set(MODULES)  # that one is in tests/spark
    for group in groups:
        shown = call(group, "--help").out.partition("Commands:\n")[2]
        listed = [f"{group} {name}" for name in re.findall(r"^  (\w+) ", shown, re.MULTILINE)]
        assert listed == [command for command in COMMANDS if command.split()[0] == group]


def test_documentation_lists_every_command_and_no_other() -> None:
    text = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    listed = re.findall(r"^\| `chasqui ([a-z ]+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("line", some_quick(CALLS))
def test_runs_piped_and_in_a_terminal_of_80_columns(
    server: Server, queue_name: str, line: str
) -> None:
    queue = queue_name[5:15]  # short, so that no sentence is longer than a line
    words = [queue if word == "q" else word for word in line.split()]
    stdin = "" if "--from" not in words else '{"name": "n", "data": 1}\n'
    call("add", queue, "n", "1", url=server.url)
    piped = run(*words, url=server.url, stdin=stdin)
    assert piped.code in (0, 1)
    assert piped.out + piped.err or "events" in words  # there are none
    in_json = call(*words, "--json", url=server.url, stdin=stdin)
    assert in_json.code in (0, 1)
    assert all(json.loads(one) is not None for one in in_json.out.splitlines())
    assert "\x1b" not in piped.out
    assert "Traceback" not in piped.out + piped.err
    if not stdin:
        shown = run_in_terminal(*words, url=server.url)
        assert shown.code in (0, 1)
        # Queues that other tests left behind broken are told of, with the words of the server.
        lines = [one for one in shown.out.splitlines() if "cannot be counted" not in one]
        assert max(map(len, lines), default=0) <= 80
        assert "Traceback" not in shown.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["fly"], "No such command 'fly'"),
        (["inspect"], "Missing argument 'QUEUE'"),
        (["inspect", "q", "--fast"], "No such option"),
        (["inspect", "no{braces}"], "queue name must be 1 to 200 characters"),
        (["inspect", "q", "--redis-url", "http://x"], "redis_url must start with one of"),
        (["add", "q"], "say what to add"),
        (["add", "q", '{"to": "ada"}'], "the name is missing: write NAME before JSON"),
        (["add", "q", "name", "{"], "the job's data is not JSON"),
        (["add", "q", "name", "1", "--delay", "5"], "'5' is no time"),
        (["add", "q", "name", "1", "--delay", "9" * 400 + "d"], "longer than a thousand years"),
        (["add", "q", "name", "[" * 100_000], "nested too deeply"),
        (["add", "q", "name", "1", "--attempts", "0"], "'--attempts'"),
        (["add", "q", "name", "1", "--id", "a}b"], "job_id must hold no braces"),
        (["add", "q", "name", "1" + "0" * 30], "64"),
        (["add", "q", "n" * 257, "1"], "256 bytes"),
        (["add", "q", "name", "--from", "x.jsonl", "--id", "a"], "each line has its own"),
        (["dlq", "peek", "q", "--since", "yesterday"], "'yesterday' is no moment"),
        (["dlq", "peek", "q", "--since", "9999999d"], "'9999999d' is no moment"),
        (["repeatable", "add", "q", "name"], "either --cron or --every"),
        (["repeatable", "add", "q", "name", "--cron", "x"], "cron expression 'x'"),
        (["repeatable", "add", "q", "name", "--every", "1s", "--tz", "UTC"], "--tz is for --cron"),
        (["repeatable", "add", "q", "n", "--every", "1s", "--missed", "fire-all"], "fire-all:10"),
        (["repeatable", "next", "q", "0"], "Invalid value for"),
        (["watch", "q", "--interval-ms", "0"], "'--interval-ms'"),
        (["events", "q", "--from", "yesterday"], "last_event_id must be"),
        (["events", "q", "--from", "x", "--no-follow"], "last_event_id must be"),
        (["promoter"], "Missing argument 'QUEUE'"),
        (["scheduler", "good", "not good"], ". _ - : /: got 'not good'"),
        (["promoter", "q", "--log-format", "xml"], "'--log-format'"),
        (["top"], "needs a terminal"),
        (["top", "a b"], "queue name must be"),
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


@pytest.mark.parametrize("command", COMMANDS)
def test_mistake_is_json_where_that_was_asked_for(chasqui: Chasqui, command: str) -> None:
    ran = chasqui(*command.split(), "--json", "--no-such-option")
    assert (ran.code, ran.out) == (2, "")
    error = json.loads(ran.err)
    assert (error["level"], error["exit_code"]) == ("error", 2)
    assert "No such option: --no-such-option" in error["message"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["fly", "--json"], "No such command 'fly'"),
        (["inspect", "--json"], "Missing argument 'QUEUE'"),
        (["add", "--json", "q", "name", "1", "--attempts", "0"], "'--attempts'"),
        (["inspect", "no{braces}", "--json"], "queue name must be"),
        (["worker", "nowhere:worker", "--log-format", "json"], "there is no module 'nowhere'"),
        (["worker", "nowhere:worker", "--log-format=json"], "there is no module 'nowhere'"),
    ],
)
def test_every_kind_of_mistake_is_json(chasqui: Chasqui, arguments: list[str], told: str) -> None:
    ran = chasqui(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert told in json.loads(ran.err)["message"]


def test_what_looks_like_json_and_is_an_argument_is_none(chasqui: Chasqui) -> None:
    ran = chasqui("inspect", "--", "--json", "q")
    assert ran.code == 2
    assert ran.err.startswith("chasqui: ")


@pytest.mark.slow
def test_mistake_of_a_process_is_one_sentence_and_exit_code_2() -> None:
    ran = run("inspect", "no{braces}")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("module", ["chasqui.__main__", "chasqui.worker", "typer", "chasqui.cli"])
def test_interrupt_while_it_loads_is_quiet(module: str) -> None:
    program = (
        "import builtins, sys, _chasqui_command\n"
        "load = builtins.__import__\n"
        "def interrupt(name, *rest):\n"
        f"    if name == {module!r}: raise KeyboardInterrupt\n"
        "    return load(name, *rest)\n"
        "builtins.__import__ = interrupt\n"
        "sys.argv[1:] = ['inspect', 'q']\n"
        "_chasqui_command.main()"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


def test_missing_file_is_one_sentence() -> None:
    ran = call("add", "q", "--from", "/no/such/file.jsonl", url="redis://127.0.0.1:1")
    assert ran.code == 1
    assert ran.err == "chasqui: [Errno 2] No such file or directory: '/no/such/file.jsonl'\n"


@pytest.mark.parametrize("line", [*CALLS, *LASTING])
def test_unreachable_server_is_one_sentence_without_the_password(line: str) -> None:
    ran = call(
        *line.split(),
        "--redis-url",
        f"redis://user:{CANARY}@127.0.0.1:1/0",
        stdin='{"name": "n", "data": 1}\n',
    )
    assert ran.code == 1
    assert CANARY not in ran.out + ran.err
    *_, last = ran.err.splitlines()
    assert last.startswith("chasqui: no connection to 127.0.0.1:1")
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("line", [*CALLS, *LASTING])
def test_refused_password_is_not_shown(valkey_9: Server, line: str) -> None:
    url = valkey_9.url.replace("://", f"://nobody:{CANARY}@")
    ran = call(*line.split(), url=url, stdin='{"name": "n", "data": 1}\n')
    assert ran.code == 1
    assert "WRONGPASS" in ran.out + ran.err
    assert CANARY not in ran.out + ran.err


def test_right_password_is_not_shown(private_server: Callable[..., Server]) -> None:
    """Neither in the output of a command that succeeds, nor in its log."""
    server = private_server("redis-8.6", requirepass=CANARY)
    url = server.url.replace("://", f"://:{CANARY}@")
    for line in CALLS:
        for more in ([], ["--json"]):
            ran = call(*line.split(), *more, url=url, stdin='{"name": "n", "data": 1}\n')
            assert ran.code in (0, 1), line
            assert "WRONGPASS" not in ran.err, line
            assert "NOAUTH" not in ran.err, line
            assert CANARY not in ran.out + ran.err, line
    ran = call("top", "--json", url=url)
    assert ran.code == 0
    assert CANARY not in ran.out + ran.err
    demo = call("demo", "--jobs", "1000", "--redis-url", url)
    assert (demo.code, demo.err) == (0, "")
    assert "queue demo-" in demo.out
    assert CANARY not in demo.out
    assert "demo" not in call("queues", url=url).out
    with redis.Redis.from_url(url) as client:
        client.config_set("requirepass", "another")
    for line in ("promoter q", "scheduler q"):
        ran = call(*line.split(), "--log-level", "debug", "--json", url=url)
        assert CANARY not in ran.out + ran.err, line


def test_missing_password_is_asked_for(private_server: Callable[..., Server]) -> None:
    server = private_server("valkey-9", requirepass=CANARY)
    ran = call("inspect", "q", url=server.url)
    assert ran.code == 1
    assert ran.err.startswith("chasqui: NOAUTH the server wants a password, and none was given: ")


@pytest.mark.parametrize("line", ["inspect q", "top", "watch q"])
def test_refused_password_is_not_shown_on_a_terminal(valkey_9: Server, line: str) -> None:
    url = valkey_9.url.replace("://", f"://nobody:{CANARY}@")
    shown = run_in_terminal(*line.split(), url=url)
    assert shown.code == 1
    assert "WRONGPASS" in shown.out
    assert CANARY not in shown.out


def test_bad_url_does_not_show_its_password() -> None:
    ran = call("inspect", "q", "--redis-url", f"redis://u:{CANARY}@host:port/x/y?z=1")
    assert ran.code == 2
    assert CANARY not in ran.err


def test_url_may_stand_before_the_command(valkey_9: Server, queue_name: str) -> None:
    call("add", queue_name, "mail", "1", url=valkey_9.url)
    ran = call("--redis-url", valkey_9.url, "inspect", queue_name, url="redis://127.0.0.1:1")
    assert ran.code == 0


def test_what_a_terminal_obeys_is_escaped_and_emoji_are_not() -> None:
    assert escaped("\x1b[2J\u202e") == "\\x1b[2J\\u202e"
    assert escaped("łódź \U0001f469\u200d\U0001f467\n") == "łódź \U0001f469\u200d\U0001f467\\n"


#: Commands that need an existing queue.
LOOKING = [
    line
    for line in (*CALLS, "dlq replay q --yes", "obliterate q --yes", "top q")
    if " q" in line
    and line.split()[0] not in ("add", "pause", "watch")
    and not {"add", "--keep"} & set(line.split())
]


@pytest.mark.parametrize("line", LOOKING)
def test_a_queue_that_is_not_there_is_told_with_those_that_are_near(
    chasqui: Chasqui, queue_name: str, line: str
) -> None:
    chasqui("add", queue_name, "mail", "1")
    typo = queue_name[:-1]
    words = [typo if word == "q" else word for word in line.split()]
    if "top" not in words:
        ran = chasqui(*words)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith(f"chasqui: there is no queue {typo}: is it ")
        assert queue_name in ran.err
    ran = chasqui(*words, "--json")
    assert ran.code == 1
    assert (ran.json["queue"], ran.json["found"]) == (typo, False)
    assert queue_name in ran.json["near"]
    chasqui("obliterate", queue_name, "--force", "--yes")


@pytest.mark.parametrize("line", ["pause q", "retention q --keep 500", "watch q --times 1"])
def test_a_queue_that_is_yet_to_come_is_told_and_no_error(
    chasqui: Chasqui, queue_name: str, line: str
) -> None:
    words = [queue_name if word == "q" else word for word in line.split()]
    ran = chasqui(*words)
    assert ran.code == 0
    assert ran.err.startswith(f"chasqui: there is no queue {queue_name} yet")
    chasqui("add", queue_name, "mail", "1")
    assert chasqui(*words).err == ""


def test_a_queue_that_is_all_done_is_there(
    chasqui: Chasqui, valkey_9: Server, queue_name: str
) -> None:
    with redis.Redis.from_url(valkey_9.url) as client:
        client.set(Keys(queue_name).result("done"), b"\x01")
    assert chasqui("job", queue_name, "done", "--json").json["state"] == "completed"


def test_who_may_not_list_keys_is_told_too(private_server: Callable[..., Server]) -> None:
    server = private_server("valkey-9")
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "u", "on", ">x", "~*", "+@all", "-scan")
    ran = call("inspect", "q", url=server.url.replace("://", "://u:x@"))
    assert (ran.code, ran.err) == (1, "chasqui: there is no queue q\n")


def test_version() -> None:
    ran = run("--version")
    assert ran.code == 0
    assert ran.out.startswith("chasqui ")
