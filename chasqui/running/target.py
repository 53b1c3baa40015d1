"""Finding what `chasqui worker` runs: `module:attribute`, and what to say if it is not there."""

import asyncio
import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType
from typing import Final, Protocol, runtime_checkable

from chasqui.consuming.runs import is_coroutine_function
from chasqui.model.words import meant, near
from chasqui.running.runnable import Runnable
from chasqui.worker import Worker
from chasqui.worker_group import UnknownQueueError, WorkerGroup

logger = logging.getLogger(__name__)

#: How the file names of code begin that only leads to the program's own.
_MACHINERY: Final = (
    str(Path(__file__).parent.parent) + os.sep,
    str(Path(asyncio.__file__).parent) + os.sep,
    contextlib.__file__,
    "<frozen importlib",
    "uvloop/",
)

#: What is called to make a worker. Other callables, such as a task, are not.
_FUNCTIONS: Final = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)


class TargetError(ValueError):
    """The target is no worker; the text says why."""


@runtime_checkable
class MakesGroup(Protocol):
    """Whatever can make the workers of its queues, such as an app."""

    def worker_group(self, queues: Sequence[str] | None, burst: bool) -> WorkerGroup:
        """The group of these queues, or of all if that is None. With `burst` it ends when nothing
        is left to run. An unknown queue raises UnknownQueueError."""


@runtime_checkable
class HasApp(Protocol):
    """A task of an app."""

    app: MakesGroup
    function: object


@dataclass(frozen=True, slots=True)
class Target:
    """What to run, as a command line says it."""

    path: str
    #: Only these of its queues; None for all.
    queues: tuple[str, ...] | None = None
    #: Whether to end when nothing is left to run.
    burst: bool = False

    def __str__(self) -> str:
        return self.path


def load(target: Target | str) -> Runnable:
    """The worker, or group of workers, that `module:attribute` names. The attribute may be what
    makes one: a function, or an object with a method `worker_group`.

    Raises TargetError if there is no such thing. Lets through what the module itself raises.
    """
    if isinstance(target, str):
        target = Target(target)
    found = find(target.path)
    kinds = (Worker, WorkerGroup, MakesGroup)
    if isinstance(found, HasApp):
        name = str(target).partition(":")[0]
        raise TargetError(f"{target} is a task, which is not called here: name its app, {name}:app")
    if isinstance(found, _FUNCTIONS) and _takes_nothing(found):
        found = found()
    if isinstance(found, type) or not isinstance(found, kinds):
        kind = _with_article(type(found).__name__)
        raise TargetError(f"{target} is {kind}, not a Worker, an app or a function that makes one")
    if isinstance(found, MakesGroup):
        try:
            return found.worker_group(target.queues, target.burst)
        except UnknownQueueError as error:
            raise TargetError(str(error)) from None
    if target.queues is not None:
        kind = _with_article(type(found).__name__)
        raise TargetError(f"{target} is {kind}, whose queues are fixed: leave out --queue")
    if not target.burst:
        return found
    if isinstance(found, Worker):
        return WorkerGroup([found], name=found.name, burst=True)
    found.burst = True
    return found


def load_or_log(target: Target | str, around: AbstractContextManager[None]) -> Runnable | None:
    """The worker; None if its module raised. The error is then in the log, without our frames."""
    try:
        with around:
            return load(target)
    except TargetError:
        raise
    except Exception as error:
        log_with_trace(error, "%s cannot be loaded", str(target), {"target": str(target)})
        return None


def log_with_trace(error: BaseException, text: str, what: str, fields: dict[str, str]) -> None:
    """Log an error of the program with its traceback, from where the program's own code begins."""
    trace = error.__traceback__
    while trace is not None and _is_machinery(trace.tb_frame):
        trace = trace.tb_next
    logger.error(text, what, exc_info=(type(error), error, trace), extra=fields)


def find(path: str) -> object:
    """What `module:attribute` names. Raises TargetError, with the nearest that exists, if there is
    no such thing."""
    module_name, separator, attribute = path.partition(":")
    if not module_name or not separator or not attribute:
        raise TargetError(f"{path!r} is no worker: write it as module:attribute")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, and the console script does not
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that this one imports
        names = [repr(name) for name in near(error.name, _modules_beside(error.name))]
        raise TargetError(
            f"there is no module {error.name!r} in {here} or on the path{meant(names)}"
        ) from None
    found: object = module
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            names = _runnable_names(module)
            names = [repr(one) for one in near(attribute, names) or names[:3]]
            raise TargetError(
                f"module {module_name!r} has no {attribute!r}{meant(names)}"
            ) from None
    return found


def _takes_nothing(function: Callable[..., object]) -> bool:
    """Whether it can be called without arguments, and is no coroutine function."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return not is_coroutine_function(function)


def _modules_beside(name: str) -> Iterator[str]:
    """The modules of the folder in which this one would be, with their whole names."""
    *parents, _ = name.split(".")
    folder = Path.cwd().joinpath(*parents)
    for path in folder.iterdir() if folder.is_dir() else ():
        is_package = path.is_dir() and any(path.glob("*.py"))
        if (is_package or path.suffix == ".py") and path.stem.isidentifier():
            yield ".".join([*parents, path.stem])


def _runnable_names(module: object) -> list[str]:
    """The attributes of a module that could be run."""
    kinds = (Worker, WorkerGroup, MakesGroup)
    values = vars(module).items()
    return [name for name, one in values if isinstance(one, kinds) and not isinstance(one, type)]


def _is_machinery(frame: FrameType) -> bool:
    """Whether code of ours, of asyncio or of the import system runs in a frame."""
    name = frame.f_code.co_filename
    return name.startswith(_MACHINERY) or "/importlib/" in name


def _with_article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
