"""The parameters of a task: a call becomes the data of a job, and data become a call.

`data` is a map of parameter names to values and holds only what was passed, so that other programs
can read and write it. A single positional-only parameter takes the whole of `data` instead.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from chasqui._core.arguments import Arguments
from chasqui.converting import ConversionError, Converter, converter_for
from chasqui.errors import ResultError, TaskDataError, UnknownArgumentsError
from chasqui.model import payload
from chasqui.model.words import meant, near, some
from chasqui.tasks.functions import hints_of, signature_of

_BY_POSITION: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


class Signature:
    """How a task is called, compiled once when it is defined."""

    def __init__(self, function: Callable[..., Any], task: str) -> None:
        """Raises TypeError, naming the task and the parameter, for what no job can carry."""
        self._task = task
        self._signature = signature = signature_of(function, task)
        hints = hints_of(function, task)
        self._converters: dict[str, Converter] = {}
        #: Those that the core cannot check by the type of the value alone.
        self._others: list[tuple[str, Converter]] = []
        for name, parameter in signature.parameters.items():
            _check_kind(parameter, task, len(signature.parameters))
            hint = hints.get(name, Any)
            converter = converter_for(hint, f"parameter {name!r} of task {task!r}")
            if hint is not Any and converter.scalar is None:
                self._others.append((name, converter))
            self._converters[name] = converter
        self.returns = converter_for(hints.get("return", Any), f"the result of task {task!r}")
        parameters = list(signature.parameters.values())
        #: The parameter that takes the whole of `data`.
        self.whole: str | None = None
        if parameters and parameters[0].kind is inspect.Parameter.POSITIONAL_ONLY:
            self.whole = parameters[0].name
        self._required = tuple(one.default is one.empty for one in parameters)
        self._core = Arguments(
            tuple(self._converters),
            tuple(one.scalar for one in self._converters.values()),
            self._required,
            sum(one.kind in _BY_POSITION for one in parameters),
        )

    @property
    def plain(self) -> Arguments | None:
        """The quick way, if every parameter is of a plain type."""
        return None if self._others or self.whole is not None else self._core

    def __str__(self) -> str:
        return str(self._signature)

    @property
    def names(self) -> list[str]:
        """The parameters, in order."""
        return list(self._converters)

    def default(self, name: str) -> Any:
        """The default of a parameter; `inspect.Parameter.empty` if it has none."""
        return self._signature.parameters[name].default

    @property
    def required(self) -> list[str]:
        """Those without a default."""
        pairs = zip(self._converters, self._required, strict=True)
        return [name for name, is_required in pairs if is_required]

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: str = "") -> Any:
        """The data of a job for this call. Raises TypeError as the call itself would, and
        ConversionError, naming parameter and path, for a value of another type.

        `given` is a parameter that gets its value later: the call leaves it out.
        """
        data = None if given or self.whole is not None else self._core.bind(args, kwargs)
        if data is not None:
            for name, converter in self._others:
                if name in data:
                    data[name] = converter.encode(data[name], name)
            return data
        bound = self._bind(args, kwargs, given)
        data = {name: self._converters[name].encode(bound[name], name) for name in bound}
        if self.whole is None:
            return data
        if self.whole not in data:  # its default: no data at all would be None
            default = self._signature.parameters[self.whole].default
            return self._converters[self.whole].encode(default, self.whole)
        return data[self.whole]

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: str) -> dict[str, Any]:
        signature = self._signature
        if given:
            signature = signature.replace(
                parameters=[one for one in signature.parameters.values() if one.name != given]
            )
        try:
            return signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self._task}{signature}: {error}") from None

    def filled(self, data: dict[str, Any]) -> dict[str, Any]:
        """The data of a call with the defaults of what it leaves out, in the order of the
        parameters. A default that its own annotation refuses stays out."""
        return {
            name: data[name] if name in data else self._defaults[name]
            for name in self._converters
            if name in data or name in self._defaults
        }

    @functools.cached_property
    def _defaults(self) -> dict[str, Any]:
        encoded = {}
        for name, parameter in self._signature.parameters.items():
            if parameter.default is not parameter.empty:
                with contextlib.suppress(TypeError, ValueError):
                    value = self._converters[name].encode(parameter.default, name)
                    payload.encode(value)  # it checks
                    encoded[name] = value
        return encoded

    def check_taken_by(self, function: Callable[..., Any], what: str) -> None:
        """Raise TypeError unless the function can be called with the task's arguments."""
        try:
            taken = inspect.signature(function)
        except ValueError:
            return  # some built-in functions have none
        args, kwargs = (self.names, {}) if self.whole else ([], dict.fromkeys(self.names))
        try:
            taken.bind(*args, **kwargs)
        except TypeError as error:
            names = ", ".join(self.names)
            raise TypeError(f"{what} must take its arguments ({names}): {error}") from None

    def check_none(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse arguments where the only parameter gets its value later."""
        self._bind(args, kwargs, self.names[0])

    def call_with(self, function: Callable[..., Any], data: Any) -> Any:
        """Call another function with the arguments of a call with this data, defaults included: by
        name, or with the whole of data."""
        bound = self._signature.bind_partial()
        bound.arguments.update(self.decode(data))
        bound.apply_defaults()
        arguments = bound.arguments
        return function(**arguments) if self.whole is None else function(*arguments.values())

    def decode(self, data: Any) -> dict[str, Any]:
        """The arguments for data of a job, by name.

        Raises TaskDataError if no run can take them, UnknownArgumentsError for keys that only
        another version of the task knows.
        """
        try:
            if self.whole is None and self._core.fit(data):
                arguments = {**data}
                for name, converter in self._others:
                    if name in data:
                        arguments[name] = converter.decode(data[name], name)
                return arguments
            if self.whole is not None:
                return {self.whole: self._converters[self.whole].decode(data, self.whole)}
            if type(data) is not dict:
                kind = type(data).__name__
                text = f"task {self._task!r} takes a map of its arguments, and the data is a {kind}"
                raise TaskDataError(text)
            if not data.keys() <= self._converters.keys():
                raise self._unknown(data)
            arguments = {
                name: self._converters[name].decode(value, name) for name, value in data.items()
            }
        except ConversionError as error:
            raise TaskDataError(f"task {self._task!r}: {error}") from error
        missing = [name for name in self.required if name not in arguments]
        if missing:
            raise TaskDataError(f"task {self._task!r} lacks its argument {some(missing)}")
        return arguments

    def encode_result(self, result: Any) -> Any:
        """What is stored of a result. Raises ResultError if it is not what the annotation says."""
        try:
            return self.returns.encode(result, "result")
        except ConversionError as error:
            raise ResultError(*error.args) from error

    def _unknown(self, data: dict[str, Any]) -> UnknownArgumentsError:
        unknown = [name for name in data if name not in self._converters]
        hint = meant([repr(one) for one in near(str(unknown[0]), self._converters)])
        return UnknownArgumentsError(
            f"task {self._task!r} has no parameter {some([repr(one) for one in unknown])}{hint}"
        )


def _check_kind(parameter: inspect.Parameter, task: str, count: int) -> None:
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        instead = f"take a list: `{parameter.name}: list[…]`"
    elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
        instead = f"take a dict: `{parameter.name}: dict[str, …]`"
    elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY and count > 1:
        instead = "data is a map of parameter names, so only a task's single parameter may be it"
    else:
        return
    kind = parameter.kind.description
    raise TypeError(f"task {task!r} cannot have the {kind} parameter {parameter}: {instead}")
