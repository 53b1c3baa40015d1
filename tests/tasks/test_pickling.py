"""A pickled task is its name: whoever unpickles it imports it."""

import copy
import functools
import pickle
from datetime import date, timedelta
from typing import Any

import pytest

from chasqui import App
from tests.tasks import programs


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_task_and_a_call_come_back(protocol: int) -> None:
    def again(value: Any) -> Any:
        return pickle.loads(pickle.dumps(value, protocol))

    assert again(programs.plain) is programs.plain
    call = programs.plain.bind(date(2026, 1, 2))
    found = again(call)
    assert type(found) is type(call)
    assert found.task is programs.plain
    assert found.data == {"day": "2026-01-02"}
    late = programs.plain.with_options(delay=5).with_options(attempts=3)
    found = again(late.bind(date(2026, 1, 2)))
    assert found.task.call_options == late.call_options
    assert found.task.call_options.delay == timedelta(seconds=5)
    assert found.task.function is programs.plain.function


def test_copies_are_the_task_itself() -> None:
    assert copy.copy(programs.plain) is programs.plain
    assert copy.deepcopy(programs.plain) is programs.plain


def test_what_no_module_has_cannot_be_pickled() -> None:
    app = App("shop")

    @app.task
    def local() -> None: ...

    with pytest.raises((pickle.PicklingError, AttributeError), match="local"):
        pickle.dumps(local)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(programs.nameless)
    part = app.task(name="part")(functools.partial(programs.plain, n=1))
    with pytest.raises(pickle.PicklingError, match="task 'part' is no name of a module"):
        pickle.dumps(part)
    app.task(processes=1)(local.function)
    with pytest.raises(TypeError, match=r"the handler of 'local'.*must be a function of a module"):
        app.worker_group()
