"""User data to bytes and back: msgpack, and only values that come back equal.

These are None, bool, int of 64 bits, float, str, bytes, list and dict, nested up to `MAX_DEPTH`,
and subclasses of them (StrEnum, defaultdict), which come back as their base type. A tuple would
come back as a list, and a datetime not at all. They are refused where the job is added, with the
place inside the value, and not where a worker stumbles over them.

The compiled core packs and unpacks, and stops at the first value that it must refuse. The words of
the error are made here.
"""

import dataclasses
import datetime
import decimal
import enum
import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from chasqui._core.payload import Refused, pack, unpack
from chasqui.errors import PayloadError, PayloadTooLargeError

#: The deepest nesting of lists and dicts.
MAX_DEPTH: Final = 128
#: The most that `decode` takes: workers take no larger job by default.
MAX_BYTES: Final = 1 << 20
#: What `encode` leaves for the envelope, which is smaller than this: workers count it too.
ENVELOPE_ROOM: Final = 512


def encode(
    value: object, *, max_bytes: int = MAX_BYTES - ENVELOPE_ROOM, root: str = "data"
) -> bytes:
    """The value as msgpack bytes.

    Raises TypeError for a type that does not come back equal, PayloadError for a value that
    msgpack cannot hold, PayloadTooLargeError as soon as the bytes pass `max_bytes`. Messages name
    the place inside the value, which they call `root`; they never show the data.
    """
    try:
        return pack(value, max_bytes)
    except Refused as refused:
        raise _refusal(refused, root, max_bytes) from None


def decode(data: bytes, *, max_bytes: int = MAX_BYTES) -> Any:
    """The value in msgpack bytes; PayloadError if they are anything but one whole value.

    Lengths and nesting are checked before anything is built: memory grows with the bytes that are
    there, not with the length that a header claims. Ext types are refused, and keys that are
    neither str nor bytes.
    """
    if len(data) > max_bytes:
        raise PayloadTooLargeError(len(data), max_bytes)
    try:
        return unpack(data)
    except ValueError as error:
        raise PayloadError(f"the payload does not decode: {error}") from None


# Why a value was refused

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


def _refusal(refused: Refused, root: str, max_bytes: int) -> Exception:
    """The error for a value that the core refused."""
    place = _place(root, refused.path)
    if refused.why == "size":
        what = f"the payload up to {place}" if refused.path else "the payload"
        return PayloadTooLargeError(refused.size, max_bytes, what)
    if refused.why == "type":
        return TypeError(
            f"{place} is a {_type_name(type(refused.value))}, which a payload cannot hold; "
            f"pass {_instead(refused.value)}"
        )
    if refused.why == "key":
        return TypeError(
            f"{place} has a key of type {_type_name(type(refused.value))}; "
            "keys are str or bytes: pass str() of it"
        )
    return PayloadError(f"{place} {_FAULTS[refused.why]}")


_FAULTS: Final = {
    "depth": f"is nested deeper than {MAX_DEPTH} levels; "
    "flatten the value, and see that it does not hold itself",
    "int": "is an int beyond 64 bits; pass str() of it",
    "surrogate": "holds a lone surrogate, which UTF-8 cannot carry; pass bytes, or replace it",
    "key surrogate": "has a key with a lone surrogate, which UTF-8 cannot carry",
    "changed": "was changed while it was encoded; pass a copy of it",
}


def _instead(value: object) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "dataclasses.asdict() of it"
    for kind, instead in _INSTEAD:
        if isinstance(value, kind):
            return instead
    return "what it is made of: None, bool, int, float, str, bytes, list or dict"


def _type_name(kind: type) -> str:
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__


def _place(root: str, path: Sequence[object]) -> str:
    """The place as Python writes it, `data["items"][2]`, without its middle if it is long."""
    steps = [f"[{_key_text(key)}]" for key in path]
    if len(steps) > 10:
        steps[5:-5] = [f"[...{len(steps) - 10} more...]"]
    return root + "".join(steps)


def _key_text(key: object) -> str:
    text = repr(key)
    if isinstance(key, str) and '"' not in text and "\\" not in text:
        text = f'"{text[1:-1]}"'
    return text if len(text) <= 60 else text[:57] + "..."
