"""Columns into msgpack maps: as msgpack itself writes them, and never beyond a buffer."""

import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chasqui._core.maps import Unkeepable, pack_maps, pack_values

INTEGERS = [0, 1, -1, 127, 128, -32, -33, 255, 256, -128, -129, 2**15, -(2**15), -(2**15) - 1]
INTEGERS += [2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, 2**63 - 1, -(2**63)]
NUMBER = ("", "int64", 0, None, bytes(8), None)


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
    rows = [
        {"f": reals[i], "d": reals[i], "b": truths[i], "t": words[i], "r": blobs[i], "n": None}
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
            ("n", "nothing", 0, None, None, None),
        ],
    )


def test_a_value_may_hold_others():
    numbers = column("n", "int64", "q", [1, None, 3, 4, 5])
    words: list[Any] = ["a", "b", None, "d", "e"]
    fields = ("s", "struct", 0, None, None, None, (5, [numbers, runs("t", "text", words)]))
    structs = [{"n": n, "t": t} for n, t in zip([1, None, 3, 4, 5], words, strict=True)]
    ends = struct.pack("<4i", 0, 2, 2, 5)
    lists = ("l", "list", 0, b"\x05", None, ends, (5, [fields]))
    keyed = ("m", "map", 0, b"\x05", None, ends, (5, [runs("", "text", list("abcde")), fields]))
    inside = [(0, 2), None, (2, 5)]
    check(
        [
            {
                "l": between and structs[slice(*between)],
                "m": between and dict(list(zip("abcde", structs, strict=True))[slice(*between)]),
            }
            for between in inside
        ],
        [lists, keyed],
    )
    assert pack_values(2, (*lists[:2], 1, *lists[3:])) == [b"\xc0", msgpack.packb(structs[2:])]


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
        ("d", "decimal", 0, None, bytes(31), None, 2),
        ("d", "decimal", 0, None, bytes(32), None, 39),
        ("d", "decimal", 0, None, bytes(32), None, -1),
        ("s", "struct", 0, None, None, None, (1, [])),
        ("s", "struct", 0, None, None, None, (2, [("n", "int64", 0, None, bytes(8), None)])),
        ("l", "list", 0, None, None, struct.pack("<2i", 0, 1), (1, [NUMBER])),
        ("l", "list", 0, None, None, struct.pack("<3i", 0, 1, 2), (1, [NUMBER])),
        ("l", "list", 0, None, None, struct.pack("<3i", 0, 1, 0), (1, [NUMBER])),
        ("l", "list", 0, None, None, struct.pack("<3i", 0, 1, 1), (1, [NUMBER, NUMBER])),
        ("m", "map", 0, None, None, struct.pack("<3i", 0, 1, 1), (1, [NUMBER])),
    ],
)
def test_buffers_that_are_too_short_are_refused(wrong: tuple[Any, ...]):
    with pytest.raises(ValueError, match=r"promised|negative|needs|rise|scale|columns in a"):
        pack_maps(2, [wrong])


def test_wrong_types_are_refused_and_buffers_let_go():
    held = bytearray(16)
    with pytest.raises(TypeError):
        pack_maps(2, [("n", "int64", 0, None, held, None), ("t", "text", 0, None, b"", None)])
    held.extend(b"a view that was still out would forbid this")
    with pytest.raises(KeyError):
        pack_maps(1, [("n", "int128", 0, None, held, None)])
    inside = ("n", "int64", 0, None, held, None)
    with pytest.raises(TypeError):
        pack_maps(1, [("s", "struct", 0, None, None, None, (1, [inside, None]))])
    held.extend(b"nor one inside")


# ── Dates, times and decimals ────────────────────────────────────────────────────────────────────


def texts(kind: str, form: str, values: list[Any], *more: Any) -> list[str]:
    packed = pack_values(len(values), (*column("c", kind, form, values), *more))
    return [msgpack.unpackb(one) for one in packed]


@given(st.lists(st.dates()))
def test_dates_are_written_as_python_does(values: list[date]):
    days = [(one - date(1970, 1, 1)).days for one in values]
    assert texts("date", "i", days) == [one.isoformat() for one in values]


@given(st.lists(st.datetimes()))
def test_times_are_written_as_python_does(values: list[datetime]):
    us = [(one - datetime(1970, 1, 1)) // timedelta(microseconds=1) for one in values]
    assert texts("local", "q", us) == [one.isoformat() for one in values]
    aware = [one.replace(tzinfo=UTC).isoformat() for one in values]
    assert texts("moment", "q", us) == aware
    clocks = [one % 86_400_000_000 * 1000 for one in us]
    assert texts("clock", "q", clocks) == [one.time().isoformat() for one in values]


@given(st.lists(st.integers(-(10**38) + 1, 10**38 - 1)), st.integers(0, 38))
def test_decimals_are_written_digit_by_digit(values: list[int], scale: int):
    data = b"".join(one.to_bytes(16, "little", signed=True) for one in values)
    packed = pack_values(len(values), ("d", "decimal", 0, None, data, None, scale))
    expected = [Decimal(one).scaleb(-scale, Context(prec=40)) for one in values]
    assert [msgpack.unpackb(one) for one in packed] == [f"{one:f}" for one in expected]


def test_integers_are_text_as_keys():
    ends = struct.pack("<2i", 0, len(INTEGERS))
    numbers = column("", "int64", "q", INTEGERS)
    packed = pack_values(1, ("m", "map", 0, None, None, ends, (len(INTEGERS), [numbers, numbers])))
    assert packed == [msgpack.packb({str(one): one for one in INTEGERS})]


@pytest.mark.parametrize(
    ("kind", "form", "wrong"),
    [("date", "i", 2_932_897), ("date", "i", -719_163), ("moment", "q", 2**63 - 1),
     ("local", "q", -(2**63)), ("clock", "q", 86_400 * 10**9), ("clock", "q", -1000)],
)  # fmt: skip
def test_what_python_cannot_hold_is_refused_with_its_column(kind: str, form: str, wrong: int):
    with pytest.raises(Unkeepable) as caught:
        pack_maps(2, [column("n", "int64", "q", [1, 2]), column("c", kind, form, [0, wrong])])
    assert caught.value.column == "c"
