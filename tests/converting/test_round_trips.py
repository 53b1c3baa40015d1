"""What goes in comes back equal and of the same type, through the bytes of a payload."""

import math
import subprocess
import sys
import typing
from collections.abc import Collection, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Literal, Optional, Union
from uuid import UUID

import pytest

from chasqui.converting import converter_for
from chasqui.model import payload
from tests.converting.samples import (
    ID,
    Access,
    Account,
    Bare,
    Box,
    Color,
    Counted,
    DateBox,
    Dates,
    Extended,
    Ints,
    Json,
    Level,
    Line,
    Loose,
    MaybeInt,
    Meeting,
    Movie,
    Numbers,
    Order,
    Other,
    Page,
    Pair,
    Part,
    Person,
    Point,
    Row,
    Rush,
    Shout,
    Size,
    Strict,
    Struct,
    Tree,
    UserId,
)

NOON = datetime(2024, 2, 29, 12, 0, 0, 5)
ANN = Person(name="Ann", born=date(1990, 1, 1))

#: Annotation, value, and what is on the wire.
CASES: list[tuple[Any, Any, Any]] = [
    (str, "é", "é"),
    (int, 2**64 - 1, 2**64 - 1),
    (int, -(2**63), -(2**63)),
    (int, True, True),
    (float, 1.5, 1.5),
    (bool, False, False),
    (None, None, None),
    (type(None), None, None),
    (bytes, b"\xff", b"\xff"),
    (Any, {"a": [1, None]}, {"a": [1, None]}),
    (object, "x", "x"),
    (datetime, NOON, "2024-02-29T12:00:00.000005"),
    (datetime, NOON.replace(tzinfo=UTC), "2024-02-29T12:00:00.000005+00:00"),
    (
        datetime,
        NOON.replace(tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
        "2024-02-29T12:00:00.000005-03:30",
    ),
    (date, date(2024, 2, 29), "2024-02-29"),
    (time, time(1, 2, 3), "01:02:03"),
    (time, time(1, 2, tzinfo=UTC), "01:02:00+00:00"),
    (timedelta, timedelta(days=1, seconds=1), 86401),
    (timedelta, timedelta(microseconds=-500_000), -0.5),
    (UUID, ID, str(ID)),
    (Decimal, Decimal("1.50"), "1.50"),
    (Decimal, Decimal("-Infinity"), "-Infinity"),
    (Color, Color.RED, "red"),
    (Color, Color.DARK, 3),
    (Size, Size.S, "s"),
    (Level, Level.HIGH, 2),
    (Access, Access.READ | Access.WRITE, 3),
    (Access, Access(0), 0),
    (Loose, Loose.A, "a"),
    (list, [1, "a", None], [1, "a", None]),
    (list[int], [1, 2], [1, 2]),
    (list[date], [date(2024, 1, 1)], ["2024-01-01"]),
    (typing.List[str], ["a"], ["a"]),  # noqa: UP006
    (list[list[UUID]], [[ID], []], [[str(ID)], []]),
    (Sequence[int], [1], [1]),
    (Sequence, [1, "a"], [1, "a"]),
    (MutableSequence[date], [date(2024, 1, 1)], ["2024-01-01"]),
    (Iterable[Decimal], [Decimal(1)], ["1"]),
    (Collection[str], ["a"], ["a"]),
    (tuple, (1, "a"), [1, "a"]),
    (tuple[()], (), []),
    (tuple[int, date], (1, date(2024, 1, 1)), [1, "2024-01-01"]),
    (tuple[int, ...], (1, 2, 3), [1, 2, 3]),
    (set, {1}, [1]),
    (set[str], {"b", "a", "c"}, ["a", "b", "c"]),
    (set[int], {3, -1, 20}, [-1, 3, 20]),
    (set[date], {date(2024, 1, 2), date(2024, 1, 1)}, ["2024-01-01", "2024-01-02"]),
    (frozenset[Level], frozenset({Level.HIGH, Level.LOW}), [1, 2]),
    (AbstractSet[float], {1.5}, [1.5]),
    (set[tuple[int, str]], {(1, "a")}, [[1, "a"]]),
    (dict, {"a": 1}, {"a": 1}),
    (dict[str, int], {"a": 1}, {"a": 1}),
    (dict[str, Any], {"a": [b"x"]}, {"a": [b"x"]}),
    (dict[int, str], {1: "a", -2: "b"}, {"1": "a", "-2": "b"}),
    (dict[Level, date], {Level.LOW: date(2024, 1, 1)}, {"1": "2024-01-01"}),
    (dict[date, int], {date(2024, 1, 1): 1}, {"2024-01-01": 1}),
    (dict[Literal["a", "b"], int], {"a": 1}, {"a": 1}),
    (Mapping[UUID, set[int]], {ID: {1}}, {str(ID): [1]}),
    (MutableMapping[str, float], {"a": 1.0}, {"a": 1.0}),
    (Mapping, {"a": 1}, {"a": 1}),
    (Optional[int], None, None),  # noqa: UP045
    (Optional[date], date(2024, 1, 1), "2024-01-01"),  # noqa: UP045
    (int | float, 1, 1),
    (int | float, 1.5, 1.5),
    (bool | int | str, True, True),
    (bool | int | str, 1, 1),
    (Union[date, list[date], None], [date(2024, 1, 1)], ["2024-01-01"]),  # noqa: UP007
    (Order | int, 5, 5),
    (Decimal | Point | Movie | bytes, Point(1, Decimal(2)), [1, "2"]),
    (Decimal | Point | Movie | bytes, {"title": "x"}, {"title": "x"}),
    (list[int | None], [1, None], [1, None]),
    (Literal["a", 1, None, b"x"], "a", "a"),
    (Literal["a", 1, None, b"x"], None, None),
    (Literal[Color.RED, 5], Color.RED, "red"),
    (Literal[True, 1], 1, 1),
    (Literal[True, 1], True, True),
    (Literal["a"] | Literal["b"] | None, "b", "b"),
    (Literal["a"] | str, "z", "z"),
    (Literal[1] | date, 1, 1),
    (MaybeInt | str | None, None, None),
    (MaybeInt | str | None, "a", "a"),
    (Json | None, [None], [None]),
    (Page[date], Page[date](items=[date(2024, 1, 1)]), {"items": ["2024-01-01"]}),
    (Shout, Shout.LOUD, "s"),
    (Annotated[int, "meters"], 3, 3),
    (Annotated[list[Annotated[date, []]], {}], [date(2024, 1, 1)], ["2024-01-01"]),
    (list[Annotated[date, []]] | None, [date(2024, 1, 1)], ["2024-01-01"]),
    (Box[Annotated[date, []]], Box(NOON.date(), []), {"item": "2024-02-29", "more": []}),
    (list[Literal[1]], [1], [1]),
    (list[Literal[True]], [True], [True]),
    (UserId, UserId(7), 7),
    (typing.LiteralString, "x", "x"),
    (Json, {"a": [1, 2.5, None, {"b": True}]}, {"a": [1, 2.5, None, {"b": True}]}),
    (Dates, [date(2024, 1, 1), [date(2024, 1, 2)]], ["2024-01-01", ["2024-01-02"]]),
    (Pair[date], (date(2024, 1, 1), date(2024, 1, 2)), ["2024-01-01", "2024-01-02"]),
    (
        Order,
        Order([Line("a", Decimal("1.5"))], NOON, tags={"y", "x"}),
        {
            "lines": [{"item": "a", "price": "1.5", "count": 1}],
            "when": "2024-02-29T12:00:00.000005",
            "note": None,
            "tags": ["x", "y"],
        },
    ),
    (
        Rush,
        Rush([], NOON, by=date(2024, 1, 1)),
        {
            "lines": [],
            "when": "2024-02-29T12:00:00.000005",
            "note": None,
            "tags": [],
            "by": "2024-01-01",
        },
    ),
    (
        Tree,
        Tree(1, [Tree(2)], Tree(0)),
        {
            "value": 1,
            "children": [{"value": 2, "children": [], "parent": None}],
            "parent": {"value": 0, "children": [], "parent": None},
        },
    ),
    (Counted, Counted(["a"]), {"words": ["a"], "total": 1}),
    (Box[int], Box(1, [2]), {"item": 1, "more": [2]}),
    (
        Box[Box[date]],
        Box(Box(NOON.date(), []), []),
        {"item": {"item": "2024-02-29", "more": []}, "more": []},
    ),
    (DateBox, DateBox(NOON.date(), [], "x"), {"item": "2024-02-29", "more": [], "label": "x"}),
    (Point, Point(1, Decimal("2.5")), [1, "2.5"]),
    (Bare, Bare(1, "a"), [1, "a"]),
    (Movie, {"title": "x"}, {"title": "x"}),
    (Movie, {"title": "x", "out": date(2024, 1, 1)}, {"title": "x", "out": "2024-01-01"}),
    (Part, {"size": 1}, {"size": 1}),
    (Extended, {"title": "x", "at": NOON}, {"title": "x", "at": NOON.isoformat()}),
    (
        Account,
        Account("s", date(2024, 1, 1), ("a",), Account("t", date(2024, 1, 2))),
        {
            "_secret": "s",
            "opened": "2024-01-01",
            "tags": ["a"],
            "size": 7,
            "parent": {
                "_secret": "t",
                "opened": "2024-01-02",
                "tags": [],
                "size": 7,
                "parent": None,
            },
        },
    ),
    (Other, Other([1], Late=NOON), {"given": [1], "late": NOON.isoformat()}),
    (
        Person,
        Person(name="Bo", born=date(2000, 1, 1), friends=[ANN]),
        {
            "name": "Bo",
            "born": "2000-01-01",
            "friends": [{"name": "Ann", "born": "1990-01-01", "friends": []}],
        },
    ),
    (
        Strict,
        Strict(
            at=NOON,
            price=Decimal("1.50"),
            wait=timedelta(minutes=1),
            keys={1: ID},
            pair=(1, "a"),
            Ratio=math.inf,
        ),
        {
            "at": NOON.isoformat(),
            "price": "1.50",
            "wait": "PT1M",
            "keys": {"1": str(ID)},
            "pair": [1, "a"],
            "ratio": math.inf,
            "shown": "",
        },
    ),
    (Numbers, Numbers([1, 2]), [1, 2]),
    (
        Meeting | None,
        Meeting(NOON, [ANN]),
        {
            "at": NOON.isoformat(),
            "who": [{"name": "Ann", "born": "1990-01-01", "friends": []}],
        },
    ),
    (
        Struct,
        Struct("a", NOON, b"\xff", {1: Decimal("1.5")}),
        {"name": "a", "at": NOON.isoformat(), "raw": "/w==", "by_number": {"1": "1.5"}},
    ),
    (Row | str, Row(1, date(2024, 1, 1)), ["Row", 1, "2024-01-01"]),
    (
        dict[str, list[Order | None]],
        {"a": [None, Order([], NOON)]},
        {"a": [None, {"lines": [], "when": NOON.isoformat(), "note": None, "tags": []}]},
    ),
]


def same_types(one: Any, other: Any) -> bool:
    """Whether both are of the same types, all the way down the containers."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return all(same_types(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return all(map(same_types, one, other))
    return True


@pytest.mark.parametrize(
    ("annotation", "value", "wire"),
    CASES,
    ids=[f"{number}-{str(case[0])[:40]}" for number, case in enumerate(CASES)],
)
def test_comes_back(annotation: Any, value: Any, wire: Any):
    converter = converter_for(annotation, "x")
    encoded = converter.encode(value, "x")
    assert encoded == wire
    assert same_types(encoded, wire)
    sent = payload.decode(payload.encode(encoded))
    decoded = converter.decode(sent, "x")
    assert decoded == value
    assert same_types(decoded, value)
    if converter.is_native:
        assert encoded is value
        assert decoded is sent


@pytest.mark.parametrize(
    ("annotation", "is_native", "scalar"),
    [
        (str, True, str),
        (int, True, int),
        (bool, True, bool),
        (bytes, True, bytes),
        (None, True, type(None)),
        (float, False, float),
        (UserId, True, int),
        (Any, True, None),
        (list, True, None),
        (dict, True, None),
        (list[dict[str, int | None]], True, None),
        (list[float], False, None),
        (int | float, True, None),
        (float | None, False, None),
        (dict[int, int], False, None),
        (Mapping[str, int], False, None),
        (Sequence[str], False, None),
        (Literal["a"], True, None),
        (Literal[Color.RED], False, None),
        (Part, True, None),
        (Movie, False, None),
        (Json, True, None),
        (Dates, False, None),
        (Ints, True, None),
        (tuple, False, None),
        (set, False, None),
        (Order, False, None),
        (date, False, None),
    ],
)
def test_says_whether_it_only_checks(annotation: Any, is_native: bool, scalar: type | None):
    converter = converter_for(annotation, "x")
    assert (converter.is_native, converter.scalar) == (is_native, scalar)


def test_no_library_is_loaded_that_the_user_has_not():
    """Nor is it needed: a class brings its own along."""
    program = (
        "import sys, dataclasses, datetime; from chasqui.converting import converter_for\n"
        "kind = dataclasses.make_dataclass('Kind', [('at', datetime.date)])\n"
        "converter_for(list[kind], 'x').encode([kind(datetime.date.today())], 'x')\n"
        "print(*{'attr', 'attrs', 'msgspec', 'pydantic', 'pydantic_core'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("\n", "")
