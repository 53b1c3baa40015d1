"""Single values: those that msgpack holds, and those that travel as text or as a number."""

import datetime
import decimal
import enum
import types
import uuid
from typing import Any, Final, get_args

from chasqui.converting.converter import (
    KINDS,
    Convert,
    Converter,
    Unsupported,
    article,
    either,
    malformed,
    mismatch,
)

#: What a payload can hold.
INT_MIN: Final = -(1 << 63)
INT_MAX: Final = (1 << 64) - 1

_NONE: Final = types.NoneType
_TEXT: Final = frozenset((str,))
#: The types that an enum's values and a Literal may have.
_MEMBER_KINDS: Final = (_NONE, bool, int, float, str, bytes)


# What msgpack holds


def _checking(expected: str, *kinds: type) -> Convert:
    def check(value: Any) -> Any:
        return value if isinstance(value, kinds) else mismatch(expected, value)

    return check


def _encode_int(value: Any) -> Any:
    if type(value) is not int and not isinstance(value, int):
        mismatch("an int", value)
    if not INT_MIN <= value <= INT_MAX:
        malformed("an int of 64 bits", value)
    return value


def _encode_float(value: Any) -> Any:
    """A float or an int as it is; a bool in place of a number is a mistake."""
    if type(value) is float:
        return value
    if not isinstance(value, (float, int)) or isinstance(value, bool):
        mismatch("a float", value)
    if isinstance(value, int) and not INT_MIN <= value <= INT_MAX:
        malformed("a float or an int of 64 bits", value)
    return value


def _decode_float(value: Any) -> Any:
    if type(value) is float:
        return value
    if not isinstance(value, (float, int)) or isinstance(value, bool):
        mismatch("a float", value)
    return float(value)


def _native(kind: type, *also: type) -> Converter:
    expected = "None" if kind is _NONE else article(kind.__name__)
    check = _checking(expected, kind, *also)
    kinds = frozenset((kind,))
    return Converter(expected, kinds, (kind, *also), check, check, is_native=True, scalar=kind)


def _anything(value: Any) -> Any:
    return value


#: Any and object: the payload itself refuses what it cannot hold.
ANY: Final = Converter("anything", KINDS, (object,), _anything, _anything, is_native=True)
INT: Final = _native(int)
INT.encoder = _encode_int
FLOAT: Final = Converter(
    "a float", frozenset((float,)), (float, int), _encode_float, _decode_float, scalar=float
)


# What travels as text or as a number


def _encode_date(value: Any) -> str:
    if not isinstance(value, datetime.date) or isinstance(value, datetime.datetime):
        mismatch("a date", value)
    return datetime.date.isoformat(value)


def _encode_timedelta(value: Any) -> int | float:
    if not isinstance(value, datetime.timedelta):
        mismatch("a timedelta", value)
    if value.microseconds:
        return value.total_seconds()
    return value.days * 86_400 + value.seconds


def _decode_timedelta(value: Any) -> datetime.timedelta:
    expected = "a timedelta in seconds"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        mismatch(expected, value)
    try:
        return datetime.timedelta(seconds=value)
    except (ValueError, OverflowError):
        malformed(expected, value)


def _text(kind: type, write: Convert, read: Convert, form: str) -> Converter:
    """A type that travels as text, which errors call `form`."""
    expected = article(kind.__name__)

    def encode(value: Any) -> Any:
        return write(value) if isinstance(value, kind) else mismatch(expected, value)

    def decode(value: Any) -> Any:
        if not isinstance(value, str):
            mismatch(form, value)
        try:
            return read(value)
        except (ValueError, ArithmeticError):
            malformed(form, value)

    return Converter(expected, _TEXT, (kind,), encode, decode)


def _iso(kind: Any) -> Converter:
    form = f"{article(kind.__name__)} in ISO 8601"
    # The method of the base: a subclass may write another form.
    return _text(kind, kind.isoformat, kind.fromisoformat, form)


_DATE: Final = _iso(datetime.date)
_DATE.encoder = _encode_date
_TIMEDELTA: Final = Converter(
    "a timedelta",
    frozenset((int, float)),
    (datetime.timedelta,),
    _encode_timedelta,
    _decode_timedelta,
)

#: The converter of each class that stands for itself.
SCALARS: Final[dict[object, Converter]] = {
    None: (NONE := _native(_NONE)),
    _NONE: NONE,
    bool: _native(bool),
    int: INT,
    float: FLOAT,
    str: _native(str),
    bytes: _native(bytes, bytearray, memoryview),
    Any: ANY,
    object: ANY,
    datetime.datetime: _iso(datetime.datetime),
    datetime.date: _DATE,
    datetime.time: _iso(datetime.time),
    datetime.timedelta: _TIMEDELTA,
    uuid.UUID: _text(uuid.UUID, str, uuid.UUID, "a UUID as text"),
    decimal.Decimal: _text(decimal.Decimal, str, decimal.Decimal, "a Decimal as text"),
}


# Enums and literals


def enum_converter(kind: type[enum.Enum]) -> Converter:
    """The members of an enum, by their values."""
    members: dict[Any, enum.Enum] = {}
    for member in kind:
        value = _plain_value(member.value)
        if type(value) not in _MEMBER_KINDS:
            raise Unsupported(
                kind,
                f"has the member {member.name}, whose value is {article(type(value).__name__)}; "
                "give it a str, int, float, bool, bytes or None",
            )
        members[value] = member
    is_flag = issubclass(kind, enum.Flag)
    if not members and not is_flag:
        raise Unsupported(kind, "is an enum without members; annotate the enum that has them")
    expected = article(kind.__name__)
    form = f"a value of {kind.__name__}"

    def encode(value: Any) -> Any:
        if not isinstance(value, kind):
            mismatch(expected, value)
        plain = value._value_  # what `value` looks up, several times slower
        return plain if type(plain) in KINDS else _plain_value(plain)

    def decode(value: Any) -> Any:
        try:
            return members[value]
        except (KeyError, TypeError):
            pass
        try:
            return kind(value)  # combined flags, and classes with a `_missing_`
        except Exception:  # from the user's code, or a ValueError that would show the value
            malformed(form, value)

    kinds = frozenset(map(type, members)) | (frozenset((int,)) if is_flag else frozenset())
    return Converter(expected, kinds, (kind,), encode, decode)


def _plain_value(value: Any) -> Any:
    """The value without a subclass of what msgpack holds: an enum of enums, a str of one's own."""
    for kind in (int, float, str, bytes):
        if isinstance(value, kind) and type(value) not in (kind, bool):
            new: Any = kind.__new__
            return new(kind, value if kind is not str else str.__str__(value))
    return value


def literal_converter(annotation: Any) -> Converter:
    """The values of a `Literal`; members of enums in it travel as their values."""
    values = get_args(annotation)
    wire: dict[tuple[type, Any], Any] = {}
    python: dict[tuple[type, Any], Any] = {}
    for value in values:
        plain = _plain_value(value.value) if isinstance(value, enum.Enum) else value
        if type(plain) not in _MEMBER_KINDS:
            raise Unsupported(annotation, "has a member whose value is no str, int, bool or bytes")
        if (type(plain), plain) in python:
            raise Unsupported(annotation, "has two members of one value, which look the same")
        wire[type(value), value] = plain
        python[type(plain), plain] = value
    expected = either([repr(value) for value in values])

    is_native = wire == python

    def lookup(table: dict[tuple[type, Any], Any]) -> Convert:
        def convert(value: Any) -> Any:
            try:
                found = table[type(value), value]
                return value if is_native else found
            except KeyError:
                malformed(expected, value)
            except TypeError:  # it has no hash
                mismatch(expected, value)

        return convert

    kinds = frozenset(kind for kind, _ in python)
    accepts = tuple(dict.fromkeys(type(value) for value in values))
    return Converter(expected, kinds, accepts, lookup(wire), lookup(python), is_native)


def literal_values(literals: list[Any]) -> list[Any]:
    """The values of several `Literal`."""
    return [value for literal in literals for value in get_args(literal)]
