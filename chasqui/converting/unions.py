"""Unions whose members can be told apart by what is on the wire."""

import types
from typing import Any, Final

from chasqui.converting.converter import (
    KINDS,
    Convert,
    Converter,
    Unsupported,
    either,
    mismatch,
)
from chasqui.converting.scalars import ANY

#: What the user reads for a type on the wire.
_KIND_NAMES: Final = {
    types.NoneType: "nil",
    str: "text",
    dict: "a map",
    list: "a list",
    int: "an int",
    float: "a float",
    bool: "a bool",
    bytes: "bytes",
}


def union_converter(annotation: object, members: list[Converter]) -> Converter:
    """One of the members, which must differ on the wire."""
    if ANY in members:
        return ANY
    by_kind: dict[type, Converter] = {}
    for member in members:
        for kind in member.kinds:
            if kind in by_kind:
                _overlap(annotation, by_kind[kind], member, kind)
            by_kind[kind] = member
    # A float may be given as an int, and an int as a bool, where nothing else takes these.
    for kind, stand_in in ((int, float), (bool, int)):
        member_for = by_kind.get(stand_in)
        if kind not in by_kind and member_for is not None and member_for.scalar is stand_in:
            by_kind[kind] = member_for
    expected = either([member.expected for member in members])
    # Beside an int, a float only takes floats, and these stay as they are.
    has_int = any(member.scalar is int for member in members)
    is_native = all(member.is_native or (has_int and member.scalar is float) for member in members)
    decode_by = {kind: member.decoder for kind, member in by_kind.items()}

    def decode(value: Any) -> Any:
        convert = decode_by.get(type(value))
        return convert(value) if convert is not None else mismatch(expected, value)

    return Converter(
        expected,
        frozenset().union(*(member.kinds for member in members)),
        tuple(kind for member in members for kind in member.accepts),
        _encoder(members, expected),
        decode,
        is_native,
    )


def _encoder(members: list[Converter], expected: str) -> Convert:
    """What chooses a member by the type of the value, else the first that takes it."""
    exact = {kind: member.encoder for member in reversed(members) for kind in member.accepts}
    # The member that is named for a type goes before one that only takes it too.
    exact |= {member.accepts[0]: member.encoder for member in members if member.accepts}

    def encode(value: Any) -> Any:
        convert = exact.get(type(value))
        if convert is not None:
            return convert(value)
        for member in members:
            if isinstance(value, member.accepts):
                return member.encoder(value)
        return mismatch(expected, value)

    return encode


def _overlap(annotation: object, one: Converter, other: Converter, kind: type) -> None:
    if KINDS in (one.kinds, other.kinds):
        free = one if one.kinds == KINDS else other
        why = f"has {free.expected} in it, which can be anything on the wire"
    else:
        why = f"has {one.expected} and {other.expected} in it, which are both {_KIND_NAMES[kind]}"
    raise Unsupported(
        annotation,
        f"{why} on the wire, so a worker could not tell them apart; annotate a dataclass with one "
        "optional field for each, or take Any and convert the value yourself",
    )
