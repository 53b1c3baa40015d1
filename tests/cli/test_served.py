"""What `chasqui worker` shows of a group when it starts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import run, run_in_terminal
from tests.servers import Server

PROGRAM = """
from chasqui import SharedSlots, Worker, WorkerGroup
from chasqui.worker_group import Table

async def handler(job): ...

tasks = Table(
    "Tasks",
    ("task", "queue", "attempts", "timeout", "backoff", "kind"),
    (
        ("resize", NAMES[0], 5, "10 s", "1 s, doubled up to 1 m", "async"),
        ("report\\x1b[2J" + "y" * 70, NAMES[1], 25, None, "1 s", "in a thread"),
    ),
)
workers = [Worker(name, handler) for name in NAMES]
slots = SharedSlots(50, dict(zip(NAMES, (3, 1))), mode=MODE)
group = WorkerGroup(workers, name="shop", slots=slots, facts=[tasks])
alone = WorkerGroup([Worker(NAMES[0], handler, concurrency=7)], name="alone")
"""


@pytest.fixture
def names(queue_name: str) -> tuple[str, str]:
    return f"{queue_name[:12]}-a", f"{queue_name[:12]}-b"


@pytest.fixture
def write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> Callable[[str], None]:
    monkeypatch.chdir(tmp_path)

    def give(mode: str) -> None:
        source = PROGRAM.replace("NAMES", repr(names)).replace("MODE", repr(mode))
        (tmp_path / "served.py").write_text(source)

    return give


@pytest.mark.parametrize("arguments", [[], ["--processes", "2"]], ids=["alone", "supervised"])
@pytest.mark.parametrize(("mode", "turn"), [("weight", "weight 3"), ("strict", "turn 1")])
def test_a_terminal_shows_tables(
    write: Callable[[str], None],
    names: tuple[str, str],
    valkey_9: Server,
    mode: str,
    turn: str,
    arguments: list[str],
) -> None:
    write(mode)
    ran = run_in_terminal("worker", "served:group", "--burst", *arguments, url=valkey_9.url)
    assert ran.code == 0
    assert ran.out.count("shop at 127.0.0.1:") == 1, "one process says it for all"
    shown = ran.out.partition("shop at 127.0.0.1:")[2]
    assert f"{names[0]}  50 of 50 shared, {turn}\n" in shown
    assert "Tasks\n" in shown
    tasks = shown.partition("Tasks\n")[2].partition("\n\n")[0].splitlines()
    assert tasks[0].split() == ["task", "queue", "attempts", "timeout", "backoff", "kind"]
    assert any("resize" in line and "10 s" in line for line in tasks)
    assert all(len(line) <= 80 for line in tasks)
    assert "\\x1b[2J" in "".join(line.split(" ")[0] for line in tasks)


def test_a_pipe_gets_a_line_for_each_fact(
    write: Callable[[str], None], names: tuple[str, str], valkey_9: Server
) -> None:
    write("strict")
    ran = run("worker", "served:group", "--burst", url=valkey_9.url)
    assert ran.code == 0
    assert f"queue {names[1]}, slots 50 of 50 shared, turn 2\n" in ran.err
    assert f"Tasks: task resize, queue {names[0]}, attempts 5, timeout 10 s" in ran.err
    assert "timeout -" in ran.err


def test_json_has_the_facts_as_fields(
    write: Callable[[str], None], names: tuple[str, str], valkey_9: Server
) -> None:
    write("strict")
    ran = run_in_terminal("worker", "served:alone", "--burst", "--json", url=valkey_9.url)
    assert ran.code == 0
    lines = [json.loads(line) for line in ran.out.splitlines()]
    (fact,) = [line["facts"] for line in lines if "facts" in line]
    assert fact == {"queue": names[0], "slots": "7"}


def test_a_row_that_does_not_fit_is_refused() -> None:
    from chasqui.worker_group import Table

    with pytest.raises(ValueError, match="a row of table 'Tasks' does not fit its columns"):
        Table("Tasks", ("a", "b"), (("x",),))
