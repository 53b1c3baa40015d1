"""Functions that become tasks: what cannot be one, where each is defined, and its annotations."""

import functools
import inspect
import sys
import typing
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

_FUNCTIONS: Final = (FunctionType, MethodType, BuiltinFunctionType)


def checked(function: Any, name: str | None) -> Callable[..., Any]:
    """The function that a task is to run. Raises TypeError for what cannot be one."""
    if isinstance(function, staticmethod):
        function = function.__func__
    if isinstance(function, type):
        raise TypeError(f"a task is a function, got the class {function.__qualname__}")
    if not callable(function):
        raise TypeError(f"a task is a function, got {type(function).__name__}")
    own_name = getattr(function, "__name__", None)
    if name is None and (own_name is None or not own_name.isidentifier()):
        raise TypeError("a lambda or a partial has no name of its own: pass name= to the task")
    told = own_name if name is None else name
    base = _inner(function)
    if inspect.isgeneratorfunction(base) or inspect.isasyncgenfunction(base):
        raise TypeError(f"task {told!r} is a generator, which would never run: return a value")
    if _is_method(function):
        raise TypeError(
            f"task {told!r} is a method of a class, and a job has no instance to call it on: make "
            "it a function of the module, or a staticmethod"
        )
    return function  # type: ignore[no-any-return]


def _inner(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function if isinstance(function, _FUNCTIONS) else type(function).__call__


def _is_method(function: object) -> bool:
    """Whether it stands in a class and waits for an instance."""
    if not isinstance(function, FunctionType):
        return False
    outer = function.__qualname__.rpartition(".")[0]
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return bool(outer) and not outer.endswith("<locals>") and names[:1] in (("self",), ("cls",))


def signature_of(function: Callable[..., Any], task: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # some built-in functions have none
        raise TypeError(f"task {task!r} has no signature: write a function around it") from None


def hints_of(function: Any, task: str) -> dict[str, Any]:
    """The annotations of its parameters and its result, resolved."""
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, _FUNCTIONS) and not hasattr(function, "__wrapped__"):
        function = type(function).__call__  # the object's own would be those of its attributes
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise TypeError(
            f"an annotation of task {task!r} cannot be resolved: {error}; import the name at "
            "runtime, not under TYPE_CHECKING, above the task"
        ) from error


# ── Where a function is defined ─────────────────────────────────────────────────────────────────


def place(function: Any) -> str:
    """Where it is defined: `shop.mail.welcome`."""
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__qualname__"):
        function = type(function)
    return f"{function.__module__}.{function.__qualname__}"


def execution(function: Any) -> object:
    """What stands for one run of the module that defines it: a reload gives the module another
    spec. None for scripts and notebooks, which have none."""
    while isinstance(function, functools.partial):
        function = function.func
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    return getattr(module, "__spec__", None)


def is_defined_again(old: Any, old_run: object, new: Any, new_run: object) -> bool:
    """Whether `new` is what became of `old`: its module was reloaded, the cell of a notebook run
    again, or the function that makes it was called again. Otherwise two functions share a name."""
    if old == new:
        return True
    if place(old) != place(new):
        return False
    if old_run is not new_run:
        return True
    codes = [getattr(one, "__code__", None) for one in (old, new)]
    if None in codes:
        return False
    if "<locals>" in place(new) and codes[0] == codes[1]:
        return True
    lines = [(one.co_filename, one.co_firstlineno) for one in codes if one is not None]
    return new_run is None and (lines[0] == lines[1] or lines[0][0] != lines[1][0])
