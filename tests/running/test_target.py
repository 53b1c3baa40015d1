"""What `chasqui worker` is told to run: found, made, or named with what is near."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from chasqui import Job, Worker, WorkerGroup
from chasqui.running.target import MakesGroup, Target, TargetError, load
from chasqui.worker_group import UnknownQueueError, choose
from tests.running.conftest import Program

SOURCE = """
from chasqui import Worker, WorkerGroup
from chasqui.worker_group import choose

async def handler(job): ...

class App:
    def worker_group(self, queues, burst):
        chosen = choose(queues, ["urgent", "default"], what="app shop")
        workers = [Worker(name, handler) for name in chosen]
        return WorkerGroup(workers, name="shop", burst=burst)

app = App()
make_app = lambda: App()
worker = Worker("emails", handler)
group = WorkerGroup([worker], name="shop")
number = 1
ran = []

from chasqui import App as RealApp

shop = RealApp("shop")

@shop.task
def wipe() -> None:
    ran.append("wipe")

class Callable:
    def __call__(self, scope, receive, send):
        ran.append("web")

web = Callable()

def takes_one(n):
    ran.append(n)

async def coroutine():
    ran.append("coroutine")
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the current folder, under a name that no other test imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "target_shop.py").write_text(SOURCE)
    (tmp_path / "target_parts").mkdir()
    (tmp_path / "target_parts" / "jobs.py").write_text(SOURCE)
    return tmp_path


def test_what_can_be_run() -> None:
    worker = load("target_shop:worker")
    assert isinstance(worker, Worker)
    group = load("target_shop:group")
    assert isinstance(group, WorkerGroup)
    for name in ("app", "make_app"):
        made = load(f"target_shop:{name}")
        assert isinstance(made, WorkerGroup)
        assert made.queues == ("urgent", "default")
        assert not made.burst
    assert load("target_parts.jobs:worker").name == "emails"


def test_queues_are_chosen_in_the_order_of_the_app() -> None:
    made = load(Target("target_shop:app", ("default", "urgent"), burst=True))
    assert isinstance(made, WorkerGroup)
    assert made.queues == ("urgent", "default")
    assert made.burst
    only = load(Target("target_shop:app", ("default",)))
    assert isinstance(only, WorkerGroup)
    assert only.queues == ("default",)


def test_a_worker_runs_in_a_burst_too() -> None:
    made = load(Target("target_shop:worker", burst=True))
    assert isinstance(made, WorkerGroup)
    assert made.burst
    assert made.label == "queue emails"
    group = load(Target("target_shop:group", burst=True))
    assert isinstance(group, WorkerGroup)
    assert group.burst


@pytest.mark.parametrize(
    ("path", "queues", "told"),
    [
        ("target_shpo:app", None, "there is no module 'target_shpo' in .*: is it 'target_shop'?"),
        ("target_parts.jbos:app", None, r"'target_parts.jbos' .*: is it 'target_parts.jobs'\?"),
        ("target_shop:ap", None, r"'target_shop' has no 'ap': is it 'app'\?"),
        ("target_shop:xyz", None, r"has no 'xyz': is it 'app' or 'worker' or 'group'\?"),
        ("target_shop:number", None, "is an int, not a Worker, an app or a function"),
        ("target_shop:App", None, "is a type, not a Worker, an app or a function"),
        ("target_shop:worker", ["a"], "is a Worker, whose queues are fixed: leave out --queue"),
        ("target_shop:app", ["urgnt"], r"app shop has no queue 'urgnt': is it 'urgent'\?"),
        ("target_shop", None, "write it as module:attribute"),
        ("target_shop:wipe", None, "is a task, which is not called here: name its app"),
        ("target_shop:web", None, "is a Callable, not a Worker, an app or a function"),
        ("target_shop:takes_one", None, "is a function, not a Worker, an app or a function"),
        ("target_shop:coroutine", None, "is a function, not a Worker, an app or a function"),
    ],
)
def test_a_mistake_names_what_is_near(path: str, queues: list[str] | None, told: str) -> None:
    with pytest.raises(TargetError, match=told):
        load(Target(path, None if queues is None else tuple(queues)))
    if (module := sys.modules.get("target_shop")) is not None:
        assert module.ran == []  # nothing of the program was called


def test_what_the_module_raises_is_let_through(module: Path) -> None:
    (module / "target_broken.py").write_text("import target_shpo")
    with pytest.raises(ModuleNotFoundError, match="target_shpo"):
        load("target_broken:app")


def test_an_app_is_known_by_its_method() -> None:
    class App:
        def worker_group(self, queues: Sequence[str] | None, burst: bool) -> WorkerGroup:
            raise NotImplementedError

    assert isinstance(App(), MakesGroup)
    assert not isinstance(Worker("q", _handle), MakesGroup)


async def _handle(job: Job) -> None: ...


def test_an_unknown_queue_is_an_error_of_its_own() -> None:
    with pytest.raises(UnknownQueueError, match="app shop has no queue 'x': is it 'a' or 'b'"):
        choose(["x"], ["a", "b"], what="app shop")
    assert choose(None, ["a", "b"], what="app shop") == ["a", "b"]


def test_the_command_says_it_in_one_sentence(program: Program) -> None:
    program.write(SOURCE)
    assert program.run("shop:app", "--queue", "urgnt") == 2
    (line,) = program.log.splitlines()
    assert line.endswith("app shop has no queue 'urgnt': is it 'urgent'?")
