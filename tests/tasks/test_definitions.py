"""What can be a task, what cannot, and what is said then."""

import functools
import importlib
import inspect
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from chasqui import App
from chasqui.tasks.task import AsyncTask, SyncTask
from tests.tasks.conftest import MakeApp


@pytest.fixture
def app() -> App[None]:
    return App("shop", redis_url="redis://127.0.0.1:1")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Writes the module `written` and imports it, or reloads it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # by its time a file might seem unchanged

    def write(source: str) -> ModuleType:
        (tmp_path / "written.py").write_text(inspect.cleandoc(source))
        importlib.invalidate_caches()
        if "written" in sys.modules:
            return importlib.reload(sys.modules["written"])
        return importlib.import_module("written")

    yield write
    sys.modules.pop("written", None)


class Shop:
    label: int = 0

    async def mail(self, to: str, day: date) -> str:
        return f"{to} {day}"

    def __call__(self, day: date) -> date:
        return day


class AsyncShop:
    async def __call__(self, day: date) -> date:
        return day


# ── What can be one ─────────────────────────────────────────────────────────────────────────────


def test_coroutine_functions_run_on_the_loop_and_others_in_threads(app: App[None]) -> None:
    async def on_loop() -> None: ...
    def in_thread() -> None: ...

    assert type(app.task(on_loop)) is AsyncTask
    assert type(app.task(in_thread)) is SyncTask
    assert type(app.task(name="call")(AsyncShop())) is AsyncTask
    assert type(app.task(name="part")(functools.partial(Shop().mail, "a"))) is AsyncTask


def test_partials_methods_and_objects_are_converted_by_their_annotations(app: App[None]) -> None:
    day = date(2026, 1, 2)
    part = app.task(name="part")(functools.partial(Shop().mail, "ada"))
    assert part.bind(day).data == {"day": "2026-01-02"}
    keyword = app.task(name="keyword")(functools.partial(Shop().mail, day=day))
    assert keyword.bind("ada").data == {"to": "ada"}
    method = app.task(Shop().mail)
    assert method.name == "mail"
    assert method.bind("ada", day).data == {"to": "ada", "day": "2026-01-02"}
    for one in (Shop(), AsyncShop()):
        called = app.task(name=type(one).__name__)(one)
        assert called.bind(day).data == {"day": "2026-01-02"}
        assert called.signature.returns.encode(day, "result") == "2026-01-02"


def test_wrapped_functions_keep_their_parameters(app: App[None]) -> None:
    @app.task
    @functools.cache
    def cached(day: date) -> date:
        return day

    assert cached.bind(date(2026, 1, 2)).data == {"day": "2026-01-02"}


def test_static_methods_and_tasks_of_other_apps_are_functions(app: App[None]) -> None:
    class Of:
        @app.task
        @staticmethod
        async def inner(n: int) -> int:
            return n

        @staticmethod
        @app.task
        def outer(n: int) -> int:
            return n

    assert type(Of.inner) is AsyncTask
    assert Of.outer.bind(1).data == {"n": 1}
    other = App("other")
    again = other.task(Of.inner)
    assert type(again) is AsyncTask
    assert again.app is other


def test_a_name_for_what_has_none(app: App[None]) -> None:
    assert app.task(name="named")(lambda x: x).bind(1).data == {"x": 1}
    for nameless in (lambda x: x, functools.partial(int, "5"), Shop()):
        with pytest.raises(TypeError, match="pass name= to the task"):
            app.task(nameless)
    with pytest.raises(ValueError, match="name"):
        app.task(name="a" * 300)(lambda x: x)


def test_annotations_may_be_text(
    app: App[None], write: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write(
        """
        from __future__ import annotations
        from datetime import date

        def ship(day: date, n: int | None = None) -> date: ...
        def lost(day: Date) -> None: ...
        def gone(day: date.nothing) -> None: ...
        def torn(day: "list[") -> None: ...
        """
    )
    assert app.task(module.ship).bind(date(2026, 1, 2)).data == {"day": "2026-01-02"}
    told = "annotation of task 'lost' cannot be resolved: name 'Date' is not defined; import the"
    with pytest.raises(TypeError, match=told):
        app.task(module.lost)
    for name in ("gone", "torn"):
        with pytest.raises(TypeError, match=f"annotation of task '{name}' cannot be resolved"):
            app.task(getattr(module, name))


# ── What cannot ─────────────────────────────────────────────────────────────────────────────────


def variadic(*names: str) -> None: ...
def keyworded(**names: str) -> None: ...
def two(a: int, b: int, /) -> None: ...
def mixed(a: int, /, b: int) -> None: ...
def unknown(a: object, b: Callable[[], None]) -> None: ...
def returns(a: int) -> Iterator[int]: ...  # type: ignore[empty-body]
def generates() -> Iterator[int]:
    yield 1


async def generates_too() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (variadic, r"task 'variadic' cannot have the variadic positional parameter \*names"),
        (keyworded, r"cannot have the variadic keyword parameter \*\*names.*take a dict: `names"),
        (two, "task 'two' cannot have the positional-only parameter a: int: data is a map"),
        (mixed, "task 'mixed' cannot have the positional-only parameter a"),
        (unknown, "parameter 'b' of task 'unknown': "),
        (returns, "the result of task 'returns': "),
        (generates, "task 'generates' is a generator, which would never run"),
        (generates_too, "task 'generates_too' is a generator"),
        (Shop, "a task is a function, got the class Shop"),
        (Shop.mail, "task 'mail' is a method of a class, and a job has no instance"),
        (5, "a task is a function, got int"),
        (classmethod(Shop), "a task is a function, got classmethod"),
    ],
)
def test_what_no_job_can_call_is_refused(app: App[None], function: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        app.task(function)
    assert app.tasks == []


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"aliases": "old"}, TypeError, "aliases must be a list of names, got str"),
        ({"attempts": 0}, ValueError, "attempts"),
        ({"attempts": "3"}, TypeError, "attempts"),
        ({"timeout": "3"}, TypeError, "timeout must be a timedelta or a number of seconds"),
        ({"timeout": 0}, ValueError, "timeout must be from 0.001 s"),
        ({"backoff": "fast"}, TypeError, "backoff"),
        ({"queue": "a b\n"}, ValueError, "queue"),
        ({"unique_for": 0.5}, ValueError, "unique_for must be from 1 s to"),
        ({"unique_by": "to"}, ValueError, "unique_by needs unique_for"),
        (
            {"unique_for": 5, "unique_by": "too"},
            ValueError,
            "names 'too', which is no parameter.*'to'",
        ),
        ({"unique_for": 5, "unique_by": ["to", "x"]}, ValueError, "names 'x', which is no"),
        (
            {"unique_for": 5, "unique_by": lambda x: "x"},
            TypeError,
            r"must take its arguments \(to\)",
        ),
        ({"every": 5, "cron": "* * * * *"}, ValueError, "every or cron, not both"),
        ({"every": 5, "tz": "UTC"}, ValueError, "tz is for cron"),
        ({"every": 0}, ValueError, "every must be from"),
        ({"cron": "61 * * * *"}, ValueError, "61"),
        ({"cron": "* * * * *", "tz": "Mars/Olympus"}, ValueError, "Mars/Olympus"),
        ({"every": 5}, TypeError, "task 'one' repeats, so its parameters need defaults: to has"),
        ({"processes": 0}, ValueError, "processes"),
        ({"procesess": 2}, TypeError, "procesess"),
    ],
)
def test_wrong_options_are_named(
    app: App[None], options: dict[str, Any], error: type[Exception], told: str
) -> None:
    def one(to: str) -> None: ...

    with pytest.raises(error, match=told):
        app.task(**options)(one)
    assert app.tasks == []


def test_options_that_do_not_fit_the_function(app: App[None]) -> None:
    async def on_loop() -> None: ...
    def whole(data: object = None, /) -> None: ...

    with pytest.raises(TypeError, match="coroutine function: processes run plain ones"):
        app.task(processes=2)(on_loop)
    with pytest.raises(TypeError, match="cannot take the whole data"):
        app.task(every=5)(whole)


# ── Names ───────────────────────────────────────────────────────────────────────────────────────


def test_two_tasks_of_one_name_are_refused(app: App[None]) -> None:
    def first() -> None: ...
    def second() -> None: ...

    app.task(aliases=["older"])(first)
    app.task(aliases=["old"])(first)  # the same one
    for options in ({"name": "first"}, {"name": "old"}, {"aliases": ["first"]}):
        with pytest.raises(ValueError, match=r"two tasks of the name '(first|old)': .*first and"):
            app.task(**options)(second)
    assert [task.name for task in app.tasks] == ["first"]
    assert list(app.tasks_of("shop")) == ["first", "old"], "an alias went with its definition"
    assert app.task(name="first", queue="other")(second).queue == "other"
    app.task(name="part")(functools.partial(two, 1))
    with pytest.raises(ValueError, match=r"two tasks of the name 'part': .*\.two and .*\.two;"):
        app.task(name="part")(functools.partial(two, 2))


TWICE = """
    from chasqui import App
    app = App("shop")

    @app.task
    def mail(to: str) -> None: ...

    @app.task
    def mail(to: int) -> None: ...
"""


def test_a_function_that_is_defined_twice_in_a_module_is_refused(
    write: Callable[[str], ModuleType],
) -> None:
    with pytest.raises(ValueError, match=r"two tasks of the name 'mail': written\.mail and"):
        write(TWICE)


def test_a_script_that_defines_a_function_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(inspect.cleandoc(TWICE))
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=50
    )
    assert "two tasks of the name 'mail': __main__.mail and __main__.mail" in done.stderr


def test_a_reloaded_module_replaces_its_tasks(
    app: App[None], write: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(App, "of_test", app, raising=False)
    source = """
        from chasqui import App

        @App.of_test.task
        def mail(to: str) -> None: ...
        """
    old = write(source).mail
    new = write(source.replace("to: str", "to: int")).mail
    assert new is not old
    assert app.tasks == [new]
    assert app.tasks_of("shop") == {"mail": new}


def test_a_function_that_defines_tasks_may_be_called_again(app: App[None]) -> None:
    def define() -> Any:
        @app.task
        def mail(to: str) -> None: ...

        return mail

    define()
    again = define()
    assert app.tasks == [again]


def test_an_unknown_option_names_the_nearest() -> None:
    app = App("shop")
    with pytest.raises(TypeError, match="a task has no option 'evry': is it every"):
        app.task(evry=3)  # type: ignore[call-overload]


def test_a_module_of_include_that_is_missing_is_named(make_app: MakeApp) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        make_app(include=["no_such_module_of_a_shop"]).worker_group()
    assert caught.value.__notes__ == [
        "while the app imported 'no_such_module_of_a_shop', which its include= names"
    ]
