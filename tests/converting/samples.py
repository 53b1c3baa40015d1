"""Classes of every kind that an annotation may name."""

from __future__ import annotations

import collections
import dataclasses
import enum
import typing
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import NamedTuple, NewType, NotRequired
from uuid import UUID

import attrs
import msgspec
import pydantic
import typing_extensions

ID = UUID("12345678-1234-5678-1234-567812345678")
UserId = NewType("UserId", int)
Json = typing_extensions.TypeAliasType(
    "Json", "bool | int | float | str | list[Json] | dict[str, Json] | None"
)
MaybeInt = typing_extensions.TypeAliasType("MaybeInt", "int | None")
Ints = typing_extensions.TypeAliasType("Ints", "list[Ints] | int")
Dates = typing_extensions.TypeAliasType("Dates", "list[Dates] | date")
T = typing.TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    DARK = 3


class Size(enum.StrEnum):
    S = "s"


class Shout(enum.Enum):
    LOUD = Size.S


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Loose(enum.Enum):
    A = "a"

    @classmethod
    def _missing_(cls, value: object) -> Loose | None:
        return cls.A if value == "A" else None


@dataclasses.dataclass
class Line:
    item: str
    price: Decimal
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Order:
    lines: list[Line]
    when: datetime
    note: str | None = None
    tags: set[str] = dataclasses.field(default_factory=set, kw_only=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Rush(Order):
    by: date = date(2030, 1, 1)


@dataclasses.dataclass
class Tree:
    value: int
    children: list[Tree] = dataclasses.field(default_factory=list)
    parent: Tree | None = None


@dataclasses.dataclass(frozen=True)
class Counted:
    words: list[str]
    total: int = dataclasses.field(init=False)
    seed: dataclasses.InitVar[int] = 0
    kind: typing.ClassVar[str] = "x"

    def __post_init__(self, seed: int) -> None:
        object.__setattr__(self, "total", len(self.words))


@dataclasses.dataclass
class Box(typing.Generic[T]):
    item: T
    more: list[T]


@dataclasses.dataclass
class DateBox(Box[date]):
    label: str


class Point(NamedTuple):
    x: int
    y: Decimal = Decimal(0)


Bare = collections.namedtuple("Bare", "x y")


class Movie(typing.TypedDict):
    title: str
    out: NotRequired[date]


class Part(typing.TypedDict, total=False):
    name: str
    size: typing.Required[int]


class Extended(typing_extensions.TypedDict):
    title: typing_extensions.ReadOnly[str]
    at: typing_extensions.NotRequired[datetime]


@attrs.define
class Account:
    _secret: str
    opened: date
    tags: tuple[str, ...] = ()
    size: int = attrs.field(init=False, default=7)
    parent: Account | None = None


@attrs.define
class Other:
    given = attrs.field()
    late: datetime = attrs.field(alias="Late")


class Person(pydantic.BaseModel):
    name: str
    born: date
    friends: list[Person] = []


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True)
    at: datetime
    price: Decimal
    wait: timedelta
    keys: dict[int, UUID]
    pair: tuple[int, str]
    ratio: float = pydantic.Field(alias="Ratio", default=0.5)
    shown: str = pydantic.Field(validation_alias="in", serialization_alias="out", default="")

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def total(self) -> int:
        return 1


class Page(pydantic.BaseModel, typing.Generic[T]):
    items: list[T]


class Numbers(pydantic.RootModel[list[int]]):
    pass


@pydantic.dataclasses.dataclass
class Meeting:
    at: datetime
    who: list[Person]


class Struct(msgspec.Struct):
    name: str
    at: datetime
    raw: bytes
    by_number: dict[int, Decimal] = {}


class Row(msgspec.Struct, array_like=True, tag=True):
    x: int
    at: date


Pair = typing_extensions.TypeAliasType("Pair", tuple[T, T], type_params=(T,))
