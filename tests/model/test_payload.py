"""Payloads: what goes in comes back, what cannot is refused by name, hostile bytes are harmless."""

import collections
import dataclasses
import datetime
import decimal
import enum
import math
import tracemalloc
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chasqui.errors import PayloadError, PayloadTooLargeError
from chasqui.model.payload import ENVELOPE_ROOM, MAX_BYTES, MAX_DEPTH, decode, encode

texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.binary()
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(texts | st.binary(), inner)
)


class Color(enum.IntEnum):
    RED = 1


class Size(enum.StrEnum):
    LARGE = "large"


class Plain(enum.Enum):
    ONE = 1


class Shouting(str):
    def __str__(self) -> str:
        return self.upper()


class Numbers(list[int]):
    pass


@dataclasses.dataclass
class Point:
    x: int = 1


Pair = collections.namedtuple("Pair", "a b")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@given(values)
def test_what_goes_in_comes_back(value: Any) -> None:
    back = decode(encode(value))
    assert back == value
    assert type(back) is type(value)


@given(values)
def test_the_bytes_are_those_of_chasquimq(value: Any) -> None:
    assert encode(value) == msgpack.packb(value, use_bin_type=True)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Color.RED, 1),
        (Size.LARGE, "large"),
        ({Size.LARGE: [Color.RED]}, {"large": [1]}),
        (Shouting("low"), "low"),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (
            collections.defaultdict(list, {"k": [collections.Counter("aab")]}),
            {"k": [{"a": 2, "b": 1}]},
        ),
        (Numbers([1, 2]), [1, 2]),
        (type("Ratio", (float,), {})(0.5), 0.5),
        (type("Blob", (bytes,), {})(b"x"), b"x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_subclasses_come_back_as_what_they_are_made_of(value: Any, plain: Any) -> None:
    back = decode(encode(value))
    assert back == plain
    assert type(back) is type(plain)
    assert encode(value) == encode(plain) == msgpack.packb(value, use_bin_type=True)


def test_odds_and_ends() -> None:
    assert math.isnan(decode(encode(math.nan)))
    assert math.copysign(1, decode(encode(-0.0))) == -1
    assert decode(encode(bytearray(b"x"))) == b"x"
    assert decode(encode(memoryview(b"x"))) == b"x"
    assert decode(encode(memoryview(b"abcd")[::2])) == b"ac"
    assert decode(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            datetime.datetime(2026, 1, 2),
            r"data is a datetime.datetime, .*; pass its .isoformat\(\)",
        ),
        (datetime.date(2026, 1, 2), r"data is a datetime.date, .*isoformat"),
        (datetime.timedelta(1), r"data is a datetime.timedelta, .*total_seconds"),
        (uuid.UUID(int=1), r"data is a uuid.UUID, .*; pass str\(\) of it"),
        (decimal.Decimal(1), r"data is a decimal.Decimal, .*; pass str\(\) of it"),
        ({1}, r"data is a set, .*list\(\) of it"),
        (frozenset(), r"data is a frozenset, .*list\(\) of it"),
        ((1, 2), r"data is a tuple, .*; pass list\(\) of it"),
        (Pair(1, 2), r"data is a .*Pair, .*; pass list\(\) of it"),
        (Point(), r"data is a .*Point, .*; pass dataclasses.asdict\(\) of it"),
        (Point, r"data is a type, .*; pass what it is made of"),
        (Plain.ONE, r"data is a .*Plain, .*; pass its .value"),
        ([collections.OrderedDict(a=(1,))], r'data\[0\]\["a"\] is a tuple'),
        (msgpack.ExtType(1, b""), r"data is a msgpack.ext.ExtType, .*; pass its .data"),
        (msgpack.Timestamp(1), r"data is a msgpack.ext.Timestamp, "),
        (1j, r"data is a complex, .*; pass what it is made of: None, bool"),
        ({"items": [1, 2, {"when": {1}}]}, r'data\["items"\]\[2\]\["when"\] is a set'),
        ([{b"k": [object()]}], r"data\[0\]\[b'k'\]\[0\] is a object"),
        ({'say "hi"': (1,)}, r"""data\['say "hi"'\] is a tuple"""),
        (
            {"a": {"b": {3: (1,)}}},
            r'data\["a"\]\["b"\] has a key of type int; keys are str or bytes',
        ),
        ([nested(60), (1,)], r"data\[1\] is a tuple"),
        ({1: "one"}, r"data has a key of type int; keys are str or bytes: pass str\(\) of it"),
        ([{"a": {None: 1}}], r'data\[0\]\["a"\] has a key of type NoneType'),
        ({"a": 1, True: 2}, "data has a key of type bool"),
        ({0.5: 1}, "data has a key of type float"),
        ({(1, 2): 1}, "data has a key of type tuple"),
        (collections.Counter([7]), "data has a key of type int"),
        ({Color.RED: 1}, r"data has a key of type [\w.]*Color"),
    ],
)
def test_types_that_would_not_come_back(value: object, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        encode(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2**64, r"data is an int beyond 64 bits; pass str\(\) of it"),
        ({"n": [-(2**63) - 1]}, r'data\["n"\]\[0\] is an int beyond 64 bits'),
        (["ok", "\ud800"], r"data\[1\] holds a lone surrogate"),
        ({"a": {"\udc00": 1}}, r'data\["a"\] has a key with a lone surrogate'),
        (
            nested(MAX_DEPTH + 1),
            r"data(\[0\]){5}\[\.\.\.118 more\.\.\.\](\[0\]){5} is nested deeper",
        ),
        (nested(5000), r"data.* is nested deeper than 128 levels"),
        ({"a": nested(MAX_DEPTH)}, r'data\["a"\].* is nested deeper than 128 levels'),
    ],
)
def test_values_that_msgpack_cannot_hold(value: object, message: str) -> None:
    with pytest.raises(PayloadError, match=f"^{message}"):
        encode(value)


def test_the_first_fault_is_the_one_that_is_named() -> None:
    with pytest.raises(TypeError, match=r'^data\["a"\]\[1\] is a set'):
        encode({"a": [1, set(), (1,)], "b": 2**70})


def test_a_value_that_holds_itself() -> None:
    ring: list[Any] = ["x"]
    ring.append({"again": ring})
    with pytest.raises(PayloadError, match="does not hold itself"):
        encode(ring)


def test_the_value_may_be_called_something_else() -> None:
    with pytest.raises(TypeError, match=r"^result\[0\] is a set"):
        encode([set()], root="result")


def test_errors_do_not_show_the_data() -> None:
    with pytest.raises(TypeError) as caught:
        encode({"k" * 500: {"hunter2"}})
    assert "hunter2" not in str(caught.value)
    assert len(str(caught.value)) < 200
    assert caught.value.__suppress_context__


def test_a_refused_value_does_not_spoil_the_next() -> None:
    for bad in ([1, "ok", set()], {"a": [2**70]}, nested(600), "x" * MAX_BYTES):
        with pytest.raises((TypeError, ValueError)):
            encode(bad)
        assert encode({"a": 1}) == b"\x81\xa1a\x01"


def test_threads_do_not_mix_their_values() -> None:
    wanted = [{"n": n, "text": "x" * n} for n in range(500)]
    with ThreadPoolExecutor(4) as pool:
        assert [decode(data) for data in pool.map(encode, wanted)] == wanted


@pytest.mark.fault(40)
def test_the_size_is_capped_both_ways() -> None:
    most = MAX_BYTES - ENVELOPE_ROOM
    assert len(encode(b"x" * (most - 5))) == most
    with pytest.raises(PayloadTooLargeError) as caught:
        encode(b"x" * (most - 4))
    assert (caught.value.size, caught.value.limit) == (most + 1, most)
    data = encode(b"x" * (MAX_BYTES - 4), max_bytes=2 * MAX_BYTES)
    with pytest.raises(PayloadTooLargeError):
        decode(data)
    assert len(decode(data, max_bytes=len(data))) == MAX_BYTES - 4


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ("x" * (64 << 20), ""),
        ("\u00fc" * (64 << 20), ""),
        (bytes(64 << 20), ""),
        (bytearray(64 << 20), ""),
        (memoryview(bytes(64 << 20)), ""),
        ([bytes(1 << 16)] * 1024, r" up to data\[15\]"),
        ({"a": [1, {"b": bytes(64 << 20)}]}, r' up to data\["a"\]\[1\]\["b"\]'),
        ({"k" * (64 << 20): 1}, ""),
        ([None] * (8 << 20), r" up to data\[1048059\]"),
    ],
    ids=["str", "wide str", "bytes", "bytearray", "memoryview", "many", "inside", "key", "items"],
)
def test_what_is_too_large_is_not_packed_to_its_end(value: Any, place: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(PayloadTooLargeError, match=rf"^the payload{place} takes \d+ bytes"):
            encode(value)
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_BYTES
    finally:
        tracemalloc.stop()


def test_a_value_that_holds_one_thing_very_often() -> None:
    value: Any = "x" * 100
    for _ in range(100):
        value = [value] * 10
    with pytest.raises(PayloadTooLargeError, match=r"^the payload up to data(\[0\])+"):
        encode(value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut short"),
        (b"\xc1", "no msgpack type"),
        (b"\x92\x01", "more than bytes are left"),
        (b"\x01\x02", "bytes after the value"),
        (b"\xa1\xff", "utf-8"),
        (b"\xa3\xed\xa0\x80", "utf-8"),
        (b"\x81\x01\x02", "map key"),
        (b"\x81\xc0\x02", "map key"),
        (b"\x81\x90\x02", "map key|unhashable"),
        (b"\xd4\x01\x00", "ext types"),
        (b"\xd6\xff\x00\x00\x00\x01", "ext types"),
        (b"\xc7\x00\x05", "ext types"),
        (b"\x91" * (MAX_DEPTH + 1) + b"\x01", "nested too deeply"),
        (b"\x91" * 100_000 + b"\x01", "nested too deeply"),
    ],
)
def test_bytes_that_are_no_payload(data: bytes, message: str) -> None:
    with pytest.raises(PayloadError, match=f"does not decode: .*({message})"):
        decode(data)


@pytest.mark.fault(41)
@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    try:
        value = decode(data)
    except PayloadError:
        return
    assert value == msgpack.unpackb(data, raw=False, strict_map_key=True) or value != value


@given(values, st.data())
def test_a_value_cut_short_is_refused(value: Any, draw: st.DataObject) -> None:
    data = encode(value)
    with pytest.raises(PayloadError):
        decode(data[: draw.draw(st.integers(0, len(data) - 1))])


@pytest.mark.fault(42)
@pytest.mark.parametrize(
    "header", [b"\xdd\x00\x0f\xff\x00", b"\xdf\x00\x07\xff\x00", b"\xc6\x7f\xff\xff\xff"]
)
def test_a_length_alone_allocates_nothing(header: bytes) -> None:
    # Every header fits the million bytes that the first one sees, so only a check of what is
    # really left can stop a decoder from taking megabytes for each of them.
    data = header * (MAX_BYTES // len(header))
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()


def test_a_value_that_its_own_parts_change_is_refused() -> None:
    """What is written would not be what its header says."""
    items: list[Any] = []

    class Short(list[Any]):
        def __iter__(self) -> Any:
            items.pop()
            return super().__iter__()

    items.extend([Short([1]), 2])
    with pytest.raises(PayloadError, match="changed"):
        encode(items)


@pytest.mark.parametrize("change", ["grow", "shrink"])
def test_a_dict_that_its_own_parts_change_is_refused(change: str) -> None:
    fields: dict[str, Any] = {}

    class Part(list[Any]):
        def __iter__(self) -> Any:
            if change == "grow":
                fields["more"] = 1
            else:
                fields.pop("last", None)
            return super().__iter__()

    fields.update(first=Part([1]), last=2)
    with pytest.raises(PayloadError, match=r'data\["fields"\] was changed while it was encoded'):
        encode({"fields": fields})


def test_a_dict_that_changes_while_it_is_copied_is_refused() -> None:
    class Growing(dict[str, Any]):
        def __iter__(self) -> Any:
            for key in super().__iter__():
                self[f"{key}+"] = 1
                yield key

        keys = __iter__

    with pytest.raises(PayloadError, match=r"data\[0\] was changed while it was encoded"):
        encode([Growing(a=1, b=2)])
