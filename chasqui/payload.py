"""User data to bytes and back: msgpack, and only what comes back equal to what went in.

That is None, bool, int of 64 bits, float, str, bytes, list, and dict, nested up to `MAX_DEPTH`, and
subclasses of these (StrEnum, defaultdict), which come back as the type they are made of. A tuple
would come back as a list, a datetime not at all: they are refused where the job is added, with the
place inside the value, and not where a worker trips over them.

Plain values, which nearly all are, go through the compiled core; subclasses and what has to be
refused, through the msgpack library. Only a refused value is walked in Python, to say why.
"""

import dataclasses
import datetime
import decimal
import enum
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import msgpack  # type: ignore[import-untyped]

from chasqui._core.envelope import check_msgpack
from chasqui._core.payload import pack, unpack
from chasqui.errors import PayloadError, PayloadTooLargeError

#: The deepest nesting of lists and dicts.
MAX_DEPTH: Final = 128
#: The most that `decode` takes, as a worker takes no larger job unless told otherwise.
MAX_BYTES: Final = 1 << 20
#: What `encode` leaves for the envelope, which a worker counts too: it takes less than this.
ENVELOPE_ROOM: Final = 512

#: Where a value sits: the way to what holds it, and its index or key there.
_Path: TypeAlias = "tuple[_Path, object] | None"


def encode(
    value: object, *, max_bytes: int = MAX_BYTES - ENVELOPE_ROOM, root: str = "data"
) -> bytes:
    """The value as msgpack bytes.

    Raises TypeError for a type that does not come back as it went in, PayloadError for a value
    that msgpack cannot hold, PayloadTooLargeError above `max_bytes`. Messages name the place
    inside the value, which they call `root`; they never show the data.
    """
    plain = pack(value, max_bytes)
    if plain is not None:
        return plain
    try:
        data: bytes = msgpack.packb(value, use_bin_type=True, strict_types=True, default=_plain)
        check_msgpack(data, MAX_DEPTH)
    except (TypeError, ValueError, OverflowError) as error:
        raise (_refusal(value, root) or error) from None
    if len(data) > max_bytes:
        raise PayloadTooLargeError(len(data), max_bytes)
    return data


def decode(data: bytes, *, max_bytes: int = MAX_BYTES) -> Any:
    """The value in msgpack bytes; PayloadError if they are anything but one whole value.

    Lengths and nesting are checked before anything is built, so that memory goes by what was
    sent and not by what a header claims. Ext types are refused, and keys that are neither str
    nor bytes.
    """
    if len(data) > max_bytes:
        raise PayloadTooLargeError(len(data), max_bytes)
    try:
        return unpack(data)
    except ValueError as error:
        raise PayloadError(f"the payload does not decode: {error}") from None


#: The types that a subclass may stand for, and how to get there whatever it overrides.
_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
    (dict, dict),
    (list, list),
    (bytes, bytes),
)


def _plain(value: object) -> Any:
    """What msgpack is given instead of an instance of a subclass."""
    for base, make in _BASES:
        if isinstance(value, base):
            return make(value)
    raise TypeError


# Why a value was refused

_KEPT = (type(None), bool, float, bytes, bytearray, memoryview)

#: What to pass instead, first match first.
_INSTEAD: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (enum.Enum, "its .value"),
    (datetime.timedelta, "its .total_seconds()"),
    ((datetime.date, datetime.time), "its .isoformat()"),
    ((uuid.UUID, decimal.Decimal), "str() of it"),
    (msgpack.ExtType, "its .data"),
    (tuple, "list() of it, which is what the handler would get"),
    ((set, frozenset), "sorted() or list() of it"),
)


def _refusal(value: object, root: str) -> Exception | None:
    """The error for the first thing inside the value that cannot be encoded."""
    for path, inner, depth in _walk(value):
        kind = _kind(inner)
        if kind is dict or kind is list:
            if depth > MAX_DEPTH:
                return PayloadError(
                    f"{_place(root, path)} is nested deeper than {MAX_DEPTH} levels; "
                    "flatten the value, and see that it does not hold itself"
                )
            if kind is dict and (error := _key_refusal(inner, root, path)):
                return error
        elif kind is int:
            if not -(2**63) <= inner < 2**64:
                return PayloadError(
                    f"{_place(root, path)} is an int beyond 64 bits; pass str() of it"
                )
        elif kind is str:
            if _has_surrogate(inner):
                return PayloadError(
                    f"{_place(root, path)} holds a lone surrogate, which UTF-8 cannot carry; "
                    "pass bytes, or replace it"
                )
        elif kind not in _KEPT:
            return TypeError(
                f"{_place(root, path)} is a {_type_name(kind)}, which a payload cannot hold; "
                f"pass {_instead(inner)}"
            )
    return None


def _kind(value: object) -> type:
    """The type that a value is encoded as; its own where that is none of ours."""
    kind = type(value)
    if kind in _KEPT:
        return kind
    return next((base for base, _ in _BASES if isinstance(value, base)), kind)


def _walk(value: object) -> Iterator[tuple[_Path, Any, int]]:
    """Each value inside the value, parents first, in order; its depth counts itself."""
    waiting: list[tuple[_Path, Any, int]] = [(None, value, 1)]
    while waiting:
        path, inner, depth = waiting.pop()
        yield path, inner, depth
        if isinstance(inner, dict):
            held: Any = inner.items()
        elif isinstance(inner, list):
            held = enumerate(inner)
        else:
            continue
        waiting.extend(reversed([((path, key), item, depth + 1) for key, item in held]))


def _key_refusal(holder: dict[Any, Any], root: str, path: _Path) -> Exception | None:
    for key in holder:
        if not isinstance(key, str | bytes):
            return TypeError(
                f"{_place(root, path)} has a key of type {_type_name(type(key))}; "
                "keys are str or bytes: pass str() of it"
            )
        if isinstance(key, str) and _has_surrogate(key):
            return PayloadError(
                f"{_place(root, path)} has a key with a lone surrogate, which UTF-8 cannot carry"
            )
    return None


def _instead(value: object) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "dataclasses.asdict() of it"
    for kind, instead in _INSTEAD:
        if isinstance(value, kind):
            return instead
    return "what it is made of: None, bool, int, float, str, bytes, list or dict"


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def _type_name(kind: type) -> str:
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _place(root: str, path: _Path) -> str:
    """The place as Python would write it: `data["items"][2]`, its middle left out if it is long."""
    steps: list[str] = []
    while path is not None:
        path, key = path
        steps.append(f"[{_key_text(key)}]")
    steps.reverse()
    if len(steps) > 10:
        steps[5:-5] = [f"[...{len(steps) - 10} more...]"]
    return root + "".join(steps)


def _key_text(key: object) -> str:
    text = repr(key)
    if isinstance(key, str) and '"' not in text and "\\" not in text:
        text = f'"{text[1:-1]}"'
    return text if len(text) <= 60 else text[:57] + "..."
