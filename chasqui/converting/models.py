"""Pydantic models and msgspec Structs, each in the JSON form that its own library gives it.

Neither library is imported here: a class of one of them has brought it along.
"""

import re
import sys
from typing import Any, Final

from chasqui.converting.converter import (
    KINDS,
    Convert,
    Converter,
    Unsupported,
    article,
    failed,
    kind_name,
    mismatch,
)
from chasqui.errors import ConversionError

_MAP: Final = frozenset((dict,))
#: The first that validates by the names of fields and by their aliases alike.
_PYDANTIC: Final = (2, 11)


def is_pydantic(kind: type) -> bool:
    """A model or dataclass of pydantic 2."""
    return hasattr(kind, "__pydantic_validator__") and hasattr(kind, "__pydantic_core_schema__")


def is_struct(kind: type) -> bool:
    return hasattr(kind, "__struct_fields__") and "msgspec" in sys.modules


# pydantic


def pydantic_converter(kind: Any, annotation: Any) -> Converter:
    """A model by its own serializer and validator.

    It is read as JSON and not as Python values: only so do strict models take the text of a date.
    Computed fields are left out, so that a model without extra fields takes its own form back.
    """
    pydantic: Any = sys.modules["pydantic"]
    core: Any = sys.modules["pydantic_core"]
    if tuple(map(int, pydantic.VERSION.split(".")[:2])) < _PYDANTIC:
        raise Unsupported(annotation, "is of a pydantic before 2.11; install a newer one")
    if kind is pydantic.BaseModel:
        raise Unsupported(annotation, "has no fields; annotate the model itself")
    try:
        adapter = pydantic.TypeAdapter(annotation)
        adapter.rebuild(raise_errors=True)
    except (pydantic.errors.PydanticUserError, NameError) as error:
        why = getattr(error, "message", error)
        raise Unsupported(annotation, f"cannot be built by pydantic: {why}") from None
    write, read, to_json = (
        adapter.serializer.to_python,
        adapter.validator.validate_json,
        core.to_json,
    )
    expected = article(kind.__name__)

    def encode(value: Any) -> Any:
        if not isinstance(value, kind):
            mismatch(expected, value)
        try:
            return write(value, mode="json", round_trip=True, warnings="error")
        except Exception as error:  # what it says may show the data
            raise failed(f"{expected} that pydantic can write", error) from None

    def decode(value: Any) -> Any:
        try:
            # With the constants: JSON has no infinity, and msgpack has.
            return read(to_json(value, inf_nan_mode="constants"), by_alias=True, by_name=True)
        except core.ValidationError as error:
            raise _invalid(error, kind.__name__) from None
        except core.PydanticSerializationError:
            raise ConversionError("", f"{expected} in its JSON form", "other values") from None
        except Exception as error:  # a validator's own
            raise failed(f"what {kind.__name__} takes", error) from error

    return Converter(expected, _pydantic_kinds(kind), (kind,), encode, decode)


def _pydantic_kinds(kind: Any) -> frozenset[type]:
    """A map, unless the class says otherwise: then it can be anything."""
    decorators = getattr(kind, "__pydantic_decorators__", None)
    is_free = getattr(kind, "__pydantic_root_model__", False) or (
        decorators is not None and decorators.model_serializers
    )
    return KINDS if is_free else _MAP


def _invalid(error: Any, name: str) -> ConversionError:
    """The first fault of a ValidationError, by its code: its text may show the data."""
    fault = error.errors(include_url=False)[0]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in fault["loc"])
    if fault["type"] == "missing":
        return ConversionError(path, "given", "nothing")
    got = f"{kind_name(fault['input'])} ({fault['type']})"
    return ConversionError(path, f"what {name} takes there" if path else f"what {name} takes", got)


# msgspec


def struct_converter(kind: Any, annotation: Any) -> Converter:
    """A Struct by `msgspec.to_builtins` and `msgspec.convert`.

    Instances of a subclass are refused: msgspec has no way to write them as their base.
    """
    msgspec: Any = sys.modules["msgspec"]
    expected = article(kind.__name__)
    is_array = kind.__struct_config__.array_like
    try:
        msgspec.json.Decoder(annotation)  # it looks at every field
    except (TypeError, NameError) as error:
        raise Unsupported(annotation, f"cannot be read by msgspec: {error}") from None
    return Converter(
        expected,
        frozenset((list,)) if is_array else _MAP,
        (kind,),
        _struct_encoder(kind, msgspec, expected),
        _struct_decoder(annotation, msgspec, kind.__name__),
    )


def _struct_encoder(kind: Any, msgspec: Any, expected: str) -> Convert:
    to_builtins = msgspec.to_builtins

    def encode(value: Any) -> Any:
        if type(value) is not kind:
            mismatch(expected, value)
        try:
            return to_builtins(value, str_keys=True)
        except Exception as error:  # what it says may show the data
            raise failed(f"{expected} that msgspec can write", error) from None

    return encode


def _struct_decoder(annotation: Any, msgspec: Any, name: str) -> Convert:
    convert, invalid = msgspec.convert, msgspec.ValidationError

    def decode(value: Any) -> Any:
        try:
            return convert(value, annotation, str_keys=True)
        except invalid as error:
            raise _invalid_struct(str(error), name) from None
        except Exception as error:  # of its own __post_init__
            raise failed(f"what {name} takes", error) from error

    return decode


def _invalid_struct(text: str, name: str) -> ConversionError:
    """The fault that msgspec's text tells, without the values that it may show."""
    place = re.search(r"`\$(.*?)`$", text)
    path = place[1] if place else ""
    if missing := re.match(r"Object missing required field `(\w+)`", text):
        return ConversionError(f"{path}.{missing[1]}", "given", "nothing")
    if unknown := re.match(r"Object contains unknown field `(.*?)`", text):
        return ConversionError(f"{path}.{unknown[1]}", f"left out by {name}", "a value")
    types = re.match(r"Expected `([^`]*)`, got `(\w+)`", text)
    if types:
        key = "under a key that is " if "at `key` in" in text else ""
        return ConversionError(path, f"{key}{article(types[1])}", types[2])
    return ConversionError(path, f"what {name} takes", "another value")
