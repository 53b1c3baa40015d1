"""Values that are taken though they are not quite of the type, and values that are refused."""

import collections
import dataclasses
import pickle
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Literal, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest

from chasqui.converting import ConversionError, converter_for
from chasqui.errors import ChasquiError
from chasqui.model import payload
from tests.converting.samples import (
    Access,
    Account,
    Color,
    Counted,
    Level,
    Line,
    Loose,
    Movie,
    Numbers,
    Order,
    Part,
    Person,
    Point,
    Row,
    Rush,
    Size,
    Strict,
    Struct,
    Tree,
)

NOON = datetime(2024, 2, 29, 12)


# Taken


class Text(str):
    pass


class Late(datetime):
    def isoformat(self, *args: Any, **kwargs: Any) -> str:
        return "late"


@pytest.mark.parametrize(
    ("annotation", "value", "sent"),
    [
        (str, Size.S, "s"),
        (str, Text("x"), "x"),
        (int, Level.HIGH, 2),
        (float, 3, 3),
        (float | None, 3, 3),
        (int | str, True, True),
        (bytes, bytearray(b"x"), b"x"),
        (bytes, memoryview(b"x"), b"x"),
        (list[str], [Size.S], ["s"]),
        (dict[str, int], {Size.S: 1}, {"s": 1}),
        (dict[str, int], collections.OrderedDict(a=1), {"a": 1}),
        (dict[int, int], {True: 1, Level.HIGH: 2}, {"1": 1, "2": 2}),
        (Mapping[str, int], types.MappingProxyType({"a": 1}), {"a": 1}),
        (Mapping, types.MappingProxyType({"a": 1}), {"a": 1}),
        (Sequence[int], (1, 2), [1, 2]),
        (Sequence[int], range(3), [0, 1, 2]),
        (Sequence, (1, "a"), [1, "a"]),
        (Iterable[int], (number for number in (1, 2)), [1, 2]),
        (Collection[str], {"b", "a"}, ["a", "b"]),
        (Collection[str], {"b": 1, "a": 2}.keys(), ["b", "a"]),
        (datetime, Late(2024, 1, 1), "2024-01-01T00:00:00"),
        (
            datetime,
            datetime(2024, 7, 1, tzinfo=ZoneInfo("Europe/Berlin")),
            "2024-07-01T00:00:00+02:00",
        ),
        (Order, Rush([], NOON), {"lines": [], "when": NOON.isoformat(), "note": None, "tags": []}),
        (Literal["s"] | str, Size.S, "s"),
        (Literal["s"] | int, 3, 3),
    ],
)
def test_takes_what_can_stand_for_the_type(annotation: Any, value: Any, sent: Any):
    encoded = converter_for(annotation, "x").encode(value, "x")
    assert payload.decode(payload.encode(encoded)) == sent


def test_a_subclass_of_a_model_is_written_by_the_fields_of_the_annotated_one():
    class Employee(Person):
        salary: int

    value = Employee(name="Ann", born=date(1990, 1, 1), salary=1)
    assert "salary" not in converter_for(Person, "x").encode(value, "x")


@pytest.mark.parametrize(
    ("annotation", "wire", "value"),
    [
        (float, 3, 3.0),
        (list[float], [1, 2.5], [1.0, 2.5]),
        (float | None, 3, 3.0),
        (datetime, "2024-01-01T10:00:00Z", datetime(2024, 1, 1, 10, tzinfo=UTC)),
        (timedelta, 1.5, timedelta(seconds=1.5)),
        (Loose, "A", Loose.A),
        (Access, 2, Access.WRITE),
        (set[int], [1, 1], {1}),
        (Point, [1], Point(1)),
        (Line, {"item": "a", "price": "1"}, Line("a", Decimal(1))),
        (Counted, {"words": ["a"]}, Counted(["a"])),
        (Account, {"_secret": "s", "opened": "2024-01-01"}, Account("s", date(2024, 1, 1))),
        (Person, {"name": "Ann", "born": "1990-01-01", "x": 1}, None),
        (Struct, {"name": "a", "at": "2024-01-01T00:00:00", "raw": "", "x": 1}, None),
    ],
)
def test_reads_what_others_write(annotation: Any, wire: Any, value: Any):
    decoded = converter_for(annotation, "x").decode(wire, "x")
    assert type(decoded) is (type(value) if value is not None else annotation)
    assert value is None or decoded == value


def test_a_model_is_read_by_its_aliases_too():
    wire = {"at": "2024-01-01T00:00:00", "price": "1", "wait": "PT1S", "keys": {}, "pair": [1, "a"]}
    decoded = converter_for(Strict, "x").decode({**wire, "Ratio": 2.5, "in": "b"}, "x")
    assert (decoded.ratio, decoded.shown) == (2.5, "b")


def test_a_value_set_after_the_init_comes_back():
    value = Counted(["a"])
    object.__setattr__(value, "total", 9)
    converter = converter_for(Counted, "x")
    assert converter.decode(converter.encode(value, "x"), "x").total == 9


# Refused

ORDER = {"lines": [], "when": "2024-01-01T00:00:00"}


class Odd(NamedTuple):
    at: date


@dataclasses.dataclass
class Positive:
    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError(f"{self.number} is secret")


class Checked(pydantic.BaseModel):
    numbers: list[int]

    @pydantic.field_validator("numbers")
    @classmethod
    def check(cls, numbers: list[int]) -> list[int]:
        if sum(numbers) < 0:
            raise ValueError(f"{numbers} is secret")
        return numbers


class Sub(Struct):
    pass


class Sealed(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Tagged(msgspec.Struct):
    color: Size
    by_number: dict[int, int] = {}


def loop() -> Tree:
    tree = Tree(1)
    tree.children.append(tree)
    return tree


def broken_line() -> Line:
    line = Line("a", Decimal(1))
    del line.item
    return line


@pytest.mark.parametrize(
    ("annotation", "value", "text"),
    [
        (str, 1, "x must be a str, got int"),
        (str, None, "x must be a str, got None"),
        (int, "1", "x must be an int, got str"),
        (int, 1.0, "x must be an int, got float"),
        (int, 2**64, "x must be an int of 64 bits, got an int that is none"),
        (list[int], [1, 2**64], "x[1] must be an int of 64 bits, got an int that is none"),
        (float, 2**64, "x must be a float or an int of 64 bits, got an int that is none"),
        (float, True, "x must be a float, got bool"),
        (bool, 1, "x must be a bool, got int"),
        (None, 0, "x must be None, got int"),
        (bytes, "x", "x must be a bytes, got str"),
        (datetime, date(2024, 1, 1), "x must be a datetime, got date"),
        (date, NOON, "x must be a date, got datetime"),
        (time, "10:00", "x must be a time, got str"),
        (timedelta, 5, "x must be a timedelta, got int"),
        (UUID, "x", "x must be a UUID, got str"),
        (Decimal, 1.5, "x must be a Decimal, got float"),
        (Color, "red", "x must be a Color, got str"),
        (Size, "s", "x must be a Size, got str"),
        (Literal["a", 1], "b", "x must be 'a' or 1, got a str that is none"),
        (Literal["a", 1], True, "x must be 'a' or 1, got a bool that is none"),
        (Literal["a", 1], [], "x must be 'a' or 1, got list"),
        (list[int], (1,), "x must be a list, got tuple"),
        (list[date], (1,), "x must be a list, got tuple"),
        (list[str], ["a", 1], "x[1] must be a str, got int"),
        (list[list[str]], [[], ["a", None]], "x[1][1] must be a str, got None"),
        (list[date], [date.today(), 1], "x[1] must be a date, got int"),
        (Sequence[str], "abc", "x must be a Sequence, got str"),
        (Iterable[int], b"abc", "x must be an Iterable, got bytes"),
        (tuple[int, str], [1, "a"], "x must be a tuple of 2, got list"),
        (tuple[int, str], (1,), "x must be a tuple of 2, got a tuple of 1"),
        (tuple[int, str], (1, 2), "x[1] must be a str, got int"),
        (tuple[int, ...], [1], "x must be a tuple, got list"),
        (set[str], ["a"], "x must be a set, got list"),
        (frozenset[str], {"a"}, "x must be a frozenset, got set"),
        (set[str], {1}, "x[0] must be a str, got int"),
        (dict[str, int], {"a": "b"}, "x['a'] must be an int, got str"),
        (dict[str, int], [], "x must be a dict, got list"),
        (dict[str, int], {1: 1}, "x[1] must be under a key that is a str, got int"),
        (dict[int, int], {"1": 1}, "x['1'] must be under a key that is an int, got str"),
        (dict[date, int], {"1": 1}, "x['1'] must be under a key that is a date, got str"),
        (dict[str, date], {"k" * 99: 1}, f"x['{'k' * 56}...] must be a date, got int"),
        (int | None, "a", "x must be an int or None, got str"),
        (int | date | None, 1.5, "x must be an int, a date or None, got float"),
        (list[int] | None, ["a"], "x[0] must be an int, got str"),
        (Order, ORDER, "x must be an Order, got dict"),
        (Order, Order([Line("a", "1")], NOON), "x.lines[0].price must be a Decimal, got str"),
        (Line, broken_line(), "x.item must be set, got nothing"),
        (Account, Account("a", 5), "x.opened must be a date, got int"),
        (Point, (1, Decimal(1)), "x must be a Point, got tuple"),
        (Point, Point(1, 2), "x[1] must be a Decimal, got int"),
        (Movie, {}, "x['title'] must be given, got nothing"),
        (Movie, [], "x must be a dict as Movie has it, got list"),
        (Movie, {"title": 1}, "x['title'] must be a str, got int"),
        (
            Part,
            {"size": 1, "new": 2},
            "x['new'] must be left out, since Part has no such field, got a value",
        ),
        (Person, {"name": "Ann"}, "x must be a Person, got dict"),
        (
            Person,
            Person.model_construct(name=object(), born=1),
            "x must be a Person that pydantic can write, got a PydanticSerializationError from it",
        ),
        (Struct, {}, "x must be a Struct, got dict"),
        (Struct, Sub("a", NOON, b""), "x must be a Struct, got Sub"),
        (
            Struct,
            Struct("a", object(), b""),
            "x must be a Struct that msgspec can write, got a TypeError from it",
        ),
        (Tree, loop(), "x must be nested up to 128 levels and not inside itself, got more"),
    ],
)
def test_refuses_to_encode(annotation: Any, value: Any, text: str):
    with pytest.raises(ConversionError) as caught:
        converter_for(annotation, "place").encode(value, "x")
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("annotation", "wire", "text"),
    [
        (str, 1, "x must be a str, got int"),
        (int, 1.5, "x must be an int, got float"),
        (float, True, "x must be a float, got bool"),
        (float, "1", "x must be a float, got str"),
        (datetime, "soon", "x must be a datetime in ISO 8601, got a str that is none"),
        (datetime, 5, "x must be a datetime in ISO 8601, got int"),
        (date, "2024-01-01T10:00", "x must be a date in ISO 8601, got a str that is none"),
        (time, "25:00", "x must be a time in ISO 8601, got a str that is none"),
        (timedelta, "5", "x must be a timedelta in seconds, got str"),
        (timedelta, True, "x must be a timedelta in seconds, got bool"),
        (timedelta, float("inf"), "x must be a timedelta in seconds, got a float that is none"),
        (timedelta, float("nan"), "x must be a timedelta in seconds, got a float that is none"),
        (UUID, "x", "x must be a UUID as text, got a str that is none"),
        (Decimal, "x", "x must be a Decimal as text, got a str that is none"),
        (Decimal, 1.5, "x must be a Decimal as text, got float"),
        (Color, "blue", "x must be a value of Color, got a str that is none"),
        (Color, [], "x must be a value of Color, got a list that is none"),
        (Access, 8, "x must be a value of Access, got an int that is none"),
        (Literal["a"], "b", "x must be 'a', got a str that is none"),
        (list[int], {}, "x must be a list, got dict"),
        (list[date], {}, "x must be a list, got dict"),
        (
            list[date],
            ["2024-01-01", "x"],
            "x[1] must be a date in ISO 8601, got a str that is none",
        ),
        (Sequence, {}, "x must be a list, got dict"),
        (tuple[int, str], [1], "x must be a list of 2, got a list of 1"),
        (tuple[int, str], "ab", "x must be a list of 2, got str"),
        (tuple, {}, "x must be a list, got dict"),
        (set[int], [1, "a"], "x[1] must be an int, got str"),
        (set[int], {}, "x must be a list, got dict"),
        (set, [[]], "x must be a list of values that a set can hold, got another one"),
        (
            dict[int, int],
            {"01": 1},
            "x['01'] must be under a key that is an int as text, got a str that is none",
        ),
        (
            dict[int, int],
            {"a": 1},
            "x['a'] must be under a key that is an int as text, got a str that is none",
        ),
        (
            dict[int, int],
            {b"a": 1},
            "x[b'a'] must be under a key that is an int as text, got bytes",
        ),
        (dict[str, int], {b"a": 1}, "x[b'a'] must be under a key that is a str, got bytes"),
        (dict[str, date], [], "x must be a dict, got list"),
        (int | None, "a", "x must be an int or None, got str"),
        (Order, [], "x must be a dict of the fields of Order, got list"),
        (Order, {"lines": []}, "x.when must be given, got nothing"),
        (Order, {**ORDER, "lines": [{"item": 1}]}, "x.lines[0].item must be a str, got int"),
        (
            Order,
            {**ORDER, "new": 1},
            "x['new'] must be left out, since Order has no such field, got a value",
        ),
        (Account, {"secret": "s"}, "x._secret must be given, got nothing"),
        (Positive, {"number": -5}, "x must be what Positive() takes, got a ValueError from it"),
        (Point, [], "x must be a list as Point has it, of 2 or down to 1, got a list of 0"),
        (Odd, ["x"], "x[0] must be a date in ISO 8601, got a str that is none"),
        (Odd, {}, "x must be a list as Odd has it, of 1, got dict"),
        (Movie, {"title": "a", "out": 5}, "x['out'] must be a date in ISO 8601, got int"),
        (Movie, {"out": "2024-01-01"}, "x['title'] must be given, got nothing"),
        (Person, [], "x must be what Person takes, got list (model_type)"),
        (Person, {"name": "Ann"}, "x.born must be given, got nothing"),
        (
            Person,
            {"name": "A", "born": "1990-01-01", "friends": [{"name": 1}]},
            "x.friends[0].name must be what Person takes there, got int (string_type)",
        ),
        (Person, {"name": b"\xff"}, "x must be a Person in its JSON form, got other values"),
        (
            Checked,
            {"numbers": [-5]},
            "x.numbers must be what Checked takes there, got list (value_error)",
        ),
        (Numbers, ["a"], "x[0] must be what Numbers takes there, got str (int_parsing)"),
        (Strict, {"at": "2024-01-01T00:00:00"}, "x.price must be given, got nothing"),
        (Struct, [], "x must be an object, got array"),
        (Struct, {"name": 1}, "x.name must be a str, got int"),
        (Struct, {}, "x.name must be given, got nothing"),
        (Tagged, {"color": "secret"}, "x.color must be what Tagged takes, got another value"),
        (
            Tagged,
            {"color": "s", "by_number": {"a": 1}},
            "x.by_number must be under a key that is an int, got str",
        ),
        (Sealed, {"new": 1}, "x.new must be left out by Sealed, got a value"),
        (Row | int, ["Row", 1], "x must be what Row takes, got another value"),
        (Row | int, ["Other", 1, "2024-01-01"], "x[0] must be what Row takes, got another value"),
    ],
)
def test_refuses_to_decode(annotation: Any, wire: Any, text: str):
    with pytest.raises(ConversionError) as caught:
        converter_for(annotation, "place").decode(wire, "x")
    assert str(caught.value) == text


def test_the_error_has_its_parts_and_can_be_pickled():
    with pytest.raises(ConversionError) as caught:
        converter_for(list[Line], "place").encode([Line("a", "secret")], "order.lines")
    error = caught.value
    assert (error.path, error.expected, error.got) == ("order.lines[0].price", "a Decimal", "str")
    assert isinstance(error, ChasquiError)
    assert isinstance(error, TypeError)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.path) == (str(error), error.path)
    assert "secret" not in repr(error)


def test_a_value_that_the_class_refuses_keeps_its_reason():
    with pytest.raises(ConversionError) as caught:
        converter_for(Positive, "place").decode({"number": -5}, "x")
    assert isinstance(caught.value.__cause__, ValueError)


def test_what_a_library_says_of_the_data_is_not_passed_on():
    for annotation, wire in ((Checked, {"numbers": [-5]}), (Tagged, {"color": "secret"})):
        with pytest.raises(ConversionError) as caught:
            converter_for(annotation, "place").decode(wire, "x")
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


def test_any_error_of_the_class_is_a_bad_value():
    class Model(pydantic.BaseModel):
        number: int

        @pydantic.field_validator("number")
        @classmethod
        def check(cls, number: int) -> int:
            raise KeyError(number)

    class Kind(msgspec.Struct):
        number: int

        def __post_init__(self) -> None:
            raise KeyError(self.number)

    for annotation in (Model, Kind):
        text = f"^x must be what {annotation.__name__} takes, got a KeyError from it$"
        with pytest.raises(ConversionError, match=text):
            converter_for(annotation, "place").decode({"number": 1}, "x")
