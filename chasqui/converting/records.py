"""Classes with named fields: dataclasses, attrs classes, TypedDicts, NamedTuples.

They travel as maps of field to value, a NamedTuple as a list. A key that is no field is an error in
both directions: nothing is dropped unseen.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from chasqui.converting.containers import row
from chasqui.converting.converter import (
    Convert,
    Converter,
    Unsupported,
    article,
    failed,
    key_step,
    mismatch,
)
from chasqui.errors import ConversionError

Compile = Callable[[Any], Converter]

#: Words around a TypedDict's field, of `typing` and of `typing_extensions`.
_QUALIFIERS: Final = ("Required", "NotRequired", "ReadOnly")


class Field(NamedTuple):
    """A field of a dataclass or attrs class."""

    name: str
    #: Its name in `__init__`, or None if it is not there.
    argument: str | None
    is_required: bool
    converter: Converter


# Which fields a class has


def is_typed_dict(kind: type) -> bool:
    """Also of `typing_extensions`, which `typing.is_typeddict` does not know."""
    return issubclass(kind, dict) and hasattr(kind, "__required_keys__")


def is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def hints_of(kind: type, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The annotations of a class, names resolved and its type variables replaced."""
    try:
        try:
            hints = get_type_hints(kind, include_extras=True)
        except NameError:
            # A class inside a function that names itself.
            own = {**vars(sys.modules[kind.__module__]), kind.__name__: kind}
            hints = get_type_hints(kind, own, vars(kind), include_extras=True)
    except NameError as error:
        raise Unsupported(
            kind,
            f"has an annotation with the name {error.name!r}, which is not in {kind.__module__}; "
            "define it at the top of that module, outside of TYPE_CHECKING",
        ) from None
    bound = _bound(kind, arguments)
    return {name: substituted(hint, bound) for name, hint in hints.items()}


def alias_value(alias: Any) -> Any:
    """What an alias stands for, names resolved: before Python 3.12, a recursive one is text."""
    holder = type(alias.__name__, (), {"__annotations__": {"value": alias.__value__}})
    holder.__module__ = alias.__module__
    return hints_of(holder, ())["value"]


def _bound(kind: type, arguments: tuple[Any, ...]) -> dict[Any, Any]:
    """What stands for each type variable of a generic class and of its bases."""
    bound = dict(zip(getattr(kind, "__parameters__", ()), arguments, strict=False))
    for base in getattr(kind, "__orig_bases__", ()):
        origin = get_origin(base)
        if origin is not None and origin is not Generic and isinstance(origin, type):
            inner = tuple(substituted(argument, bound) for argument in get_args(base))
            bound = {**_bound(origin, inner), **bound}
    for base in kind.__bases__:
        bound = {**_bound(base, ()), **bound} if base is not object else bound
    return bound


def substituted(hint: Any, bound: Mapping[Any, Any]) -> Any:
    if isinstance(hint, TypeVar):
        return bound.get(hint, hint)
    parameters = getattr(hint, "__parameters__", ())
    if isinstance(hint, type) or not parameters or not any(each in bound for each in parameters):
        return hint
    return hint[tuple(bound.get(parameter, parameter) for parameter in parameters)]


def dataclass_fields(kind: Any, arguments: tuple[Any, ...], compile_: Compile) -> list[Field]:
    hints = hints_of(kind, arguments)
    for field in kind.__dataclass_fields__.values():
        is_init_only = field._field_type is dataclasses._FIELD_INITVAR  # type: ignore[attr-defined]
        if is_init_only and _has_no_default(field):
            raise Unsupported(
                kind, f"has the InitVar {field.name}, which is not kept; give it a default"
            )
    return [
        Field(
            field.name,
            field.name if field.init else None,
            field.init and _has_no_default(field),
            _field(compile_, kind, field.name, hints[field.name]),
        )
        for field in dataclasses.fields(kind)
    ]


def _has_no_default(field: "dataclasses.Field[Any]") -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def attrs_fields(kind: Any, arguments: tuple[Any, ...], compile_: Compile) -> list[Field]:
    hints = hints_of(kind, arguments)
    nothing = sys.modules["attr"].NOTHING
    return [
        Field(
            field.name,
            field.alias if field.init else None,
            field.init and field.default is nothing,
            _field(compile_, kind, field.name, hints.get(field.name, field.type or Any)),
        )
        for field in kind.__attrs_attrs__
    ]


def _field(compile_: Compile, kind: type, name: str, hint: Any) -> Converter:
    """The converter of a field; if there is none, the error names the field too."""
    try:
        return compile_(hint)
    except Unsupported as error:
        fields = (f"{kind.__name__}.{name}", *error.fields)
        raise Unsupported(error.annotation, error.why, fields) from None


# Dataclasses and attrs classes


def record_encoder(kind: type, fields: list[Field]) -> Convert:
    """What encodes the instances of a class with such fields.

    An instance of a subclass is encoded by the fields of the annotated class: the receiver is
    annotated to use no others.
    """
    expected = article(kind.__name__)
    steps = [(field.name, _unchecked(field, int), field.converter.encoder) for field in fields]

    def encode(value: Any) -> Any:
        if type(value) is not kind and not isinstance(value, kind):
            mismatch(expected, value)
        out = {}
        key = ""
        try:
            for key, scalar, convert in steps:
                item = getattr(value, key)
                out[key] = item if type(item) is scalar else convert(item)
        except ConversionError as error:
            error.within(f".{key}")
            raise
        except AttributeError:
            raise ConversionError(f".{key}", "set", "nothing") from None
        return out

    return encode


def record_decoder(kind: type, fields: list[Field]) -> Convert:
    """What makes instances of a class with such fields."""
    name = kind.__name__
    known = {field.name for field in fields}
    steps = [
        (field.name, field.argument, field.is_required, _unchecked(field), field.converter.decoder)
        for field in fields
        if field.argument is not None
    ]
    late = [(field.name, field.converter.decoder) for field in fields if field.argument is None]

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            mismatch(f"a dict of the fields of {name}", value)
        arguments = {}
        set_later = {}
        key = ""
        try:
            for key, argument, is_required, scalar, convert in steps:
                if key in value:
                    item = value[key]
                    arguments[argument] = item if type(item) is scalar else convert(item)
                elif is_required:
                    raise ConversionError("", "given", "nothing")
            if late:
                for key, convert in late:
                    if key in value:
                        set_later[key] = convert(value[key])
        except ConversionError as error:
            error.within(f".{key}")
            raise
        if len(arguments) + len(set_later) != len(value):
            raise _unknown(name, known, value)
        try:
            made = kind(**arguments)
        except Exception as error:
            raise failed(f"what {name}() takes", error) from error
        for key in set_later:
            object.__setattr__(made, key, set_later[key])  # it may be frozen
        return made

    return decode


def _unchecked(field: Field, *but: type) -> type | None:
    """The type whose values need no call to be converted, which are most; an int has its range."""
    scalar = field.converter.scalar
    return None if scalar in but else scalar


def _unknown(name: str, known: set[str], value: dict[Any, Any]) -> ConversionError:
    key = next(key for key in value if key not in known)
    return ConversionError(key_step(key), f"left out, since {name} has no such field", "a value")


# TypedDicts


def typed_dict_functions(
    kind: Any, arguments: tuple[Any, ...], compile_: Compile
) -> tuple[Convert, Convert, bool]:
    """What encodes, what decodes, and whether both only check."""
    required: set[str] = set()
    converters: dict[str, Converter] = {}
    for key, hint in hints_of(kind, arguments).items():
        inner, is_required = _unqualified(hint, key in kind.__required_keys__)
        converters[key] = _field(compile_, kind, key, inner)
        if is_required:
            required.add(key)
    is_native = all(converter.is_native for converter in converters.values())
    name = kind.__name__

    def converting(functions: dict[str, Convert]) -> Convert:
        def convert(value: Any) -> Any:
            if not isinstance(value, dict):
                mismatch(f"a dict as {name} has it", value)
            out = {}
            found = 0
            key = None
            try:
                for key, item in value.items():
                    function = functions.get(key)
                    if function is None:
                        break
                    out[key] = function(item)
                    found += key in required
            except ConversionError as error:
                error.within(key_step(key))
                raise
            if len(out) != len(value):
                raise _unknown(name, set(functions), value)
            if found != len(required):
                missing = next(key for key in functions if key in required and key not in value)
                raise ConversionError(key_step(missing), "given", "nothing")
            return value if is_native else out

        return convert

    return (
        converting({key: each.encoder for key, each in converters.items()}),
        converting({key: each.decoder for key, each in converters.items()}),
        is_native,
    )


def _unqualified(hint: Any, is_required: bool) -> tuple[Any, bool]:
    """The annotation inside Required, NotRequired and ReadOnly, and whether the key is required.

    Under `from __future__ import annotations` the class itself does not know, so this looks.
    """
    while (word := getattr(get_origin(hint), "_name", None)) in _QUALIFIERS:
        if word != "ReadOnly":
            is_required = word == "Required"
        hint = get_args(hint)[0]
    return hint, is_required


# NamedTuples


def named_tuple_functions(
    kind: Any, arguments: tuple[Any, ...], compile_: Compile
) -> tuple[Convert, Convert]:
    hints = hints_of(kind, arguments)
    converters = [_field(compile_, kind, name, hints.get(name, Any)) for name in kind._fields]
    most = len(converters)
    least = most - len(kind._field_defaults)
    name = kind.__name__
    expected = article(name)
    form = f"a list as {name} has it, of {most}" + (f" or down to {least}" if least < most else "")
    encoders = [converter.encoder for converter in converters]
    decoders = [converter.decoder for converter in converters]

    def encode(value: Any) -> Any:
        return row(encoders, value) if isinstance(value, kind) else mismatch(expected, value)

    def decode(value: Any) -> Any:
        if type(value) is not list:
            mismatch(form, value)
        if not least <= len(value) <= most:
            raise ConversionError("", form, f"a list of {len(value)}")
        values = row(decoders, value)
        try:
            return kind(*values)
        except Exception as error:
            raise failed(f"what {name}() takes", error) from error

    return encode, decode
