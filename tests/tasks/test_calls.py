"""A call of a task is checked like a call of its function, before anything is sent."""

import inspect
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from typing import Any, TypedDict

import pytest

from chasqui import App, ConversionError


@pytest.fixture
def app() -> App[None]:
    """Nothing listens there: these tests send nothing."""
    return App("calls", redis_url="redis://127.0.0.1:1")


def plain(to: str, n: int = 1, *, loud: bool = False) -> None: ...
def typed(to: str, day: date | None = None, *, price: Decimal = Decimal(1)) -> None: ...
def unannotated(to, n=1, *, loud=False): ...  # type: ignore[no-untyped-def]
def nothing() -> None: ...


CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], dict[str, Any]]] = [
    (plain, ("a",), {}, {"to": "a"}),
    (plain, ("a", 1), {}, {"to": "a", "n": 1}),
    (plain, (), {"loud": True, "to": "a"}, {"to": "a", "loud": True}),
    (plain, ("a",), {"n": True}, {"to": "a", "n": True}),
    (typed, ("a",), {"price": Decimal("2.50")}, {"to": "a", "price": "2.50"}),
    (typed, ("a", None), {}, {"to": "a", "day": None}),
    (typed, ("a", date(2026, 1, 2)), {}, {"to": "a", "day": "2026-01-02"}),
    (unannotated, ([1], b"x"), {}, {"to": [1], "n": b"x"}),
    (nothing, (), {}, {}),
]


@pytest.mark.parametrize(("function", "args", "kwargs", "data"), CALLS)
def test_data_is_what_was_passed(
    app: App[None],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    data: dict[str, Any],
) -> None:
    call = app.task(function).bind(*args, **kwargs)
    assert call.data == data
    assert list(call.data) == list(data), "in the order of the parameters"


WRONG: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    (("a", 1, True), {}),
    (("a",), {"to": "b"}),
    (("a",), {"lout": True}),
    ((), {"n": 1}),
]


@pytest.mark.parametrize("function", [plain, typed, unannotated])
@pytest.mark.parametrize(("args", "kwargs"), WRONG)
def test_a_call_that_python_refuses_is_refused(
    app: App[None], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(TypeError) as judge:
        inspect.signature(function).bind(*args, **kwargs)
    task = app.task(function)
    with pytest.raises(TypeError) as found:
        task.bind(*args, **kwargs)
    assert str(found.value) == f"{task.name}{inspect.signature(function)}: {judge.value}"


class Line(TypedDict):
    item: str
    price: Decimal


@pytest.mark.parametrize(
    ("annotation", "value", "told"),
    [
        (int, "5", "x must be an int, got str"),
        (str, None, "x must be a str, got None"),
        (list[int], [1, "2"], r"x\[1\] must be an int, got str"),
        (date, "2026-01-02", "x must be a date, got str"),
        (list[Line], [{"item": "a", "price": 1.5}], r"x\[0\]\.?.*price.* must be a Decimal"),
        (dict[str, Decimal], {"a": Decimal(1), "b": 1}, r"x\['b'\] must be a Decimal, got int"),
    ],
)
async def test_a_value_of_another_type_names_parameter_and_path(
    app: App[None], annotation: Any, value: object, told: str
) -> None:
    def function(x: Any) -> None: ...

    function.__annotations__["x"] = annotation
    task = app.task(function)
    with pytest.raises(ConversionError, match=told):
        task.bind(value)
    with pytest.raises(ConversionError, match=told):
        await task.enqueue(value)  # nothing is sent: there is no server
    with pytest.raises(ConversionError, match=told):
        task.enqueue_sync(x=value)


def test_a_single_positional_only_parameter_is_the_whole_data(app: App[None]) -> None:
    def whole(day: date, /) -> None: ...

    task = app.task(whole)
    assert task.bind(date(2026, 1, 2)).data == "2026-01-02"
    with pytest.raises(ConversionError, match="day must be a date, got str"):
        task.bind("2026-01-02")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"whole\(day: datetime\.date, /\)"):
        task.bind()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"whole"):
        task.bind(day=date(2026, 1, 2))  # type: ignore[call-arg]


def test_the_whole_data_may_have_a_default(app: App[None]) -> None:
    def whole(day: date = date(2026, 1, 2), /) -> None: ...

    assert app.task(whole).bind().data == "2026-01-02"


async def test_calling_a_task_runs_the_function(app: App[None]) -> None:
    @app.task
    async def on_loop(n: int) -> int:
        return n + 1

    @app.task
    def in_thread(n: int) -> int:
        """Says more."""
        return n + 1

    assert await on_loop(1) == 2
    assert in_thread(n=1) == 2
    assert in_thread.__doc__ == "Says more."
    assert in_thread.__name__ == "in_thread"  # type: ignore[attr-defined]
    assert inspect.signature(in_thread) == inspect.signature(in_thread.function)
    assert repr(in_thread) == "<task in_thread(n: int) -> int of queue calls>"
    assert repr(in_thread.bind(1)) == "<call of task in_thread>"
