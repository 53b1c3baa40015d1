"""Columns into msgpack maps: as msgpack itself writes them, and never beyond a buffer."""

import struct
from typing import Any

import msgpack
import pytest

from chasqui._core.maps import pack_maps

INTEGERS = [0, 1, -1, 127, 128, -32, -33, 255, 256, -128, -129, 2**15, -(2**15), -(2**15) - 1]
INTEGERS += [2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, 2**63 - 1, -(2**63)]


def column(name: str, kind: str, form: str, values: list[Any], offset: int = 0) -> tuple[Any, ...]:
    """A column of numbers, laid out as Arrow does it."""
    data = struct.pack(f"<{len(values)}{form}", *(0 if one is None else one for one in values))
    return name, kind, offset, bitmap(values), data, None


def bitmap(values: list[Any]) -> bytes | None:
    if None not in values:
        return None
    bits = sum((value is not None) << i for i, value in enumerate(values))
    return bits.to_bytes((len(values) + 7) // 8, "little")


def runs(name: str, kind: str, values: list[Any], offset: int = 0) -> tuple[Any, ...]:
    parts = [one.encode() if isinstance(one, str) else one or b"" for one in values]
    ends = [sum(map(len, parts[:i])) for i in range(len(parts) + 1)]
    return name, kind, offset, bitmap(values), b"".join(parts), struct.pack(f"<{len(ends)}i", *ends)


def check(rows: list[dict[str, Any]], columns: list[tuple[Any, ...]]) -> None:
    assert pack_maps(len(rows), columns) == [msgpack.packb(row) for row in rows]


def test_numbers_take_their_shortest_form():
    check([{"n": one} for one in INTEGERS], [column("n", "int64", "q", INTEGERS)])
    for kind, form, bits in (("int8", "b", 8), ("int16", "h", 16), ("int32", "i", 32)):
        fitting = [one for one in INTEGERS if -(2 ** (bits - 1)) <= one < 2 ** (bits - 1)]
        check([{"n": one} for one in fitting], [column("n", kind, form, fitting)])


def test_floats_bools_texts_bytes_and_nothing():
    reals = [0.0, -1.5, float("inf"), None]
    truths = [True, False, None, True]
    words: list[Any] = ["", "ünï", None, "x" * 70_000]
    blobs: list[Any] = [b"", None, b"\x00" * 300, b"\xff" * 70_000]
    packed = [[1, {"a": 2}], None, "s", 2**64 - 1]
    rows = [
        {"f": reals[i], "d": reals[i], "b": truths[i], "t": words[i], "r": blobs[i], "p": packed[i]}
        for i in range(4)
    ]
    bits = sum(bool(one) << i for i, one in enumerate(truths)).to_bytes(1, "little")
    check(
        rows,
        [
            column("f", "float", "f", reals),
            column("d", "double", "d", reals),
            ("b", "bool", 0, bitmap(truths), bits, None),
            runs("t", "text", words),
            runs("r", "binary", blobs),
            ("p", "packed", 0, None, [msgpack.packb(one) for one in packed], None),
        ],
    )


def test_a_slice_begins_where_it_says():
    numbers: list[Any] = [i if i % 3 else None for i in range(40)]
    words: list[Any] = [f"w{i}" if i % 5 else None for i in range(40)]
    columns = [column("n", "int64", "q", numbers, 11), runs("t", "text", words, 11)]
    check([{"n": numbers[i], "t": words[i]} for i in range(11, 40)], columns)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 300])
def test_maps_of_any_width(count: int):
    names = [f"c{i}" + "x" * i for i in range(count)]
    check([dict.fromkeys(names, 7)] * 2, [column(name, "int64", "q", [7, 7]) for name in names])


@pytest.mark.parametrize(
    "wrong",
    [
        ("n", "int64", 0, None, bytes(15), None),
        ("n", "int64", 1, None, bytes(16), None),
        ("n", "int64", -1, None, bytes(16), None),
        ("n", "int64", 0, b"", bytes(16), None),
        ("n", "int64", 0, None, None, None),
        ("n", "bool", 8, None, b"\x00", None),
        ("t", "text", 0, None, b"abc", struct.pack("<2i", 0, 1)),
        ("t", "text", 0, None, b"abc", struct.pack("<3i", 0, 2, 1)),
        ("t", "text", 0, None, b"abc", struct.pack("<3i", 0, 2, 4)),
        ("t", "text", 0, None, b"abc", struct.pack("<3i", -1, 2, 3)),
        ("t", "text", 0, None, None, struct.pack("<3i", 0, 1, 2)),
        ("p", "packed", 0, None, [b"\xc0"], None),
    ],
)
def test_buffers_that_are_too_short_are_refused(wrong: tuple[Any, ...]):
    with pytest.raises(ValueError, match=r"promised|negative|needs|rise|rows"):
        pack_maps(2, [wrong])


def test_wrong_types_are_refused_and_buffers_let_go():
    held = bytearray(16)
    with pytest.raises(TypeError):
        pack_maps(2, [("n", "int64", 0, None, held, None), ("p", "packed", 0, None, (), None)])
    held.extend(b"a view that was still out would forbid this")
    with pytest.raises(KeyError):
        pack_maps(1, [("n", "int128", 0, None, held, None)])
    with pytest.raises(TypeError):
        pack_maps(1, [("p", "packed", 0, None, ["text"], None)])
