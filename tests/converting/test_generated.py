"""Generated annotations, nested as they come, with values of them: all come back."""

import dataclasses
import datetime
import decimal
import enum
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from chasqui.converting import ConversionError, converter_for
from chasqui.model import payload

#: An annotation and a strategy for its values.
Typed = tuple[Any, st.SearchStrategy[Any]]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
#: Seconds as a float tell microseconds apart up to here, which is 272 years.
LONGEST = datetime.timedelta(seconds=2**33 - 1)


class Color(enum.Enum):
    RED = "red"
    NONE = None
    SEVEN = 7


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


KEYS: list[Typed] = [
    (str, texts),
    (int, st.integers(-(2**63), 2**64 - 1)),
    (datetime.date, st.dates()),
    (uuid.UUID, st.uuids()),
    (Level, st.sampled_from(Level)),
    (Literal["a", "b"], st.sampled_from(["a", "b"])),
]
SCALARS: list[Typed] = [
    *KEYS,
    (float, st.floats(allow_nan=False)),
    (bool, st.booleans()),
    (None, st.none()),
    (bytes, st.binary(max_size=5)),
    (datetime.datetime, st.datetimes(timezones=st.none() | st.just(datetime.UTC))),
    (datetime.time, st.times()),
    (datetime.timedelta, st.timedeltas(-LONGEST, LONGEST)),
    (decimal.Decimal, st.decimals(allow_nan=False)),
    (Color, st.sampled_from(Color)),
    (Annotated[int | None, "x"], st.none() | st.integers(0, 9)),
    (int | float | str, st.integers(0, 9) | st.floats(allow_nan=False) | texts),
]


def dataclass_of(inner: Typed) -> Typed:
    kind = dataclasses.make_dataclass(
        "Data", [("a", inner[0]), ("b", list[inner[0]], dataclasses.field(default_factory=list))]
    )
    return kind, st.builds(kind, inner[1], st.lists(inner[1], max_size=2))


def attrs_of(inner: Typed) -> Typed:
    kind = attrs.make_class("Attrs", {"_a": attrs.field(type=inner[0])})
    return kind, st.builds(kind, inner[1])


def typed_dict_of(inner: Typed) -> Typed:
    class Kind(TypedDict, total=False):
        a: inner[0]  # type: ignore[name-defined]
        b: int

    return Kind, st.fixed_dictionaries({}, optional={"a": inner[1], "b": st.integers(0, 9)})


def named_tuple_of(inner: Typed) -> Typed:
    class Kind(NamedTuple):
        a: inner[0]  # type: ignore[name-defined]
        b: int

    return Kind, st.builds(Kind, inner[1], st.integers(0, 9))


def optional_of(inner: Typed) -> Typed:
    if type(None) in converter_for(inner[0], "x").kinds:
        return inner
    return inner[0] | None, inner[1] | st.none()


WRAPPERS: list[Callable[[Typed], Typed]] = [
    lambda inner: (list[inner[0]], st.lists(inner[1], max_size=3)),
    lambda inner: (Sequence[inner[0]], st.lists(inner[1], max_size=3)),
    lambda inner: (tuple[inner[0], ...], st.lists(inner[1], max_size=3).map(tuple)),
    lambda inner: (tuple[inner[0], int], st.tuples(inner[1], st.integers(0, 9))),
    dataclass_of,
    attrs_of,
    typed_dict_of,
    named_tuple_of,
    optional_of,
]


@st.composite
def typed(draw: st.DrawFn) -> Typed:
    """An annotation of up to four levels."""
    found = draw(st.sampled_from(SCALARS))
    if draw(st.booleans()):
        found = draw(st.sampled_from(KEYS))
        kind = draw(st.sampled_from([set, frozenset]))
        items = st.sets if kind is set else st.frozensets
        found = (kind[found[0]], items(found[1], max_size=3))
    for _ in range(draw(st.integers(0, 3))):
        wrap = draw(st.sampled_from([*WRAPPERS, None]))
        if wrap is not None:
            found = wrap(found)
            continue
        key = draw(st.sampled_from(KEYS))
        kind = draw(st.sampled_from([dict, Mapping]))
        found = (kind[key[0], found[0]], st.dictionaries(key[1], found[1], max_size=3))
    return found


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_values_come_back(data: st.DataObject):
    annotation, values = data.draw(typed())
    value = data.draw(values)
    converter = converter_for(annotation, "x")
    encoded = converter.encode(value, "x")
    packed = payload.encode(encoded)
    decoded = converter.decode(payload.decode(packed), "x")
    assert decoded == value
    assert type(decoded) is type(value)
    assert payload.encode(converter.encode(decoded, "x")) == packed
    assert not converter.is_native or encoded is value


foreign = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | texts | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
)


@settings(max_examples=300, deadline=None)
@given(st.data(), foreign)
def test_what_others_write_is_read_or_refused_by_path(data: st.DataObject, wire: Any):
    """No other error ever leaves `decode`, and what it returns can be encoded."""
    annotation, _ = data.draw(typed())
    converter = converter_for(annotation, "x")
    try:
        decoded = converter.decode(wire, "x")
    except ConversionError as error:
        refusal = error
    else:
        payload.encode(converter.encode(decoded, "x"))
        return
    assert str(refusal).startswith("x")
