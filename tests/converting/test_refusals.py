"""Annotations that have no converter: the error names the place, the part and what to do."""

import collections
import dataclasses
import enum
import re
import typing
from collections.abc import Callable, Generator, Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar

import msgspec
import pydantic
import pytest
import typing_extensions

from chasqui.converting import converter_for
from tests.converting.samples import Box, Color, Line, Numbers, Order, Size

T = TypeVar("T")
PLACE = "parameter 'order' of task 'ship'"
APART = "on the wire, so a worker could not tell them apart; annotate a dataclass"
Endless = typing_extensions.TypeAliasType("Endless", "Endless | int")


class Plain:
    pass


class Callable_:
    pass


Callable_.__name__ = Callable_.__qualname__ = "Callable"


class Name(str):
    pass


class Nested(enum.Enum):
    A = (1, 2)


class Empty(enum.Enum):
    pass


@dataclasses.dataclass
class Holder:
    inner: "list[Deeper]"


@dataclasses.dataclass
class Deeper:
    plain: Plain


@dataclasses.dataclass
class Lost:
    inner: "Nowhere"  # noqa: F821


@dataclasses.dataclass
class Built:
    seed: dataclasses.InitVar[int]


class Partial(typing.TypedDict):
    plain: Plain


class Free(pydantic.BaseModel):
    @pydantic.model_serializer
    def write(self) -> str:
        return "x"


class Undone(pydantic.BaseModel):
    inner: "Nowhere"  # noqa: F821


class BadStruct(msgspec.Struct):
    inner: "Nowhere"  # noqa: F821


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (Plain, "Plain is a class without a form on the wire; supported are str, int, float,"),
        (Name, "Name is a class without a form on the wire"),
        (bytearray, "bytearray is a class without a form"),
        (collections.deque[int], "deque[int] is a class without a form"),
        (list[Plain], "Plain is a class"),
        (dict[str, Plain | None], "Plain is a class"),
        (Holder, "Holder.inner: Deeper.plain: Plain is a class"),
        (Partial, "Partial.plain: Plain is a class"),
        (Lost, "Lost has an annotation with the name 'Nowhere', which is not in tests."),
        (Built, "Built has the InitVar seed, which is not kept; give it a default"),
        (Final[int], "Final[int] marks a constant; write the type alone"),
        (ClassVar[int], "ClassVar[int] marks a field of the class"),
        (typing.Required[int], "Required[int] belongs into a TypedDict"),
        (Callable[[int], str], "Callable[[int], str] cannot be sent; send a name"),
        (Callable, "Callable cannot be sent"),
        (type[int], "type[int] cannot be sent"),
        (T, "~T is a type variable; write the type itself"),
        (list[T], "~T is a type variable"),
        (Box, "Box.item: ~T is a type variable; write the type itself, as in Box[int]"),
        (typing.NoReturn, "NoReturn has no values; a task that returns nothing returns None"),
        (Callable_, "Callable is a class without a form"),
        (typing.Never, "Never has no values"),
        (typing.Self, "Self has no meaning here; name the class"),
        (Iterator[int], "Iterator[int] is used up by its first reader; annotate Iterable or list"),
        (Generator[int, None, None], "Generator[int, None, None] is used up"),
        ("Order", "'Order' is a name that is not resolved; define it before the task"),
        (typing.List["Order"], "ForwardRef('Order') is a name that is not resolved"),  # noqa: UP006
        (5, "5 is not supported; supported are"),
        (Nested, "Nested has the member A, whose value is a tuple; give it a str, int,"),
        (Empty, "Empty is an enum without members"),
        (Literal[Color.RED, "red"], "has two members of one value"),
        (Literal[Nested.A], "has a member whose value is no str, int, bool or bytes"),
        (tuple[int, *tuple[str, ...]], "is unpacked inside; annotate tuple[X, ...] or list"),
        (dict[float, int], "dict[float, int] has keys that are a float, which is neither text nor"),
        (dict[tuple[int, int], int], "annotate a list of pairs, list[tuple[K, V]]"),
        (dict[str | int, int], "has keys that are a str or an int"),
        (dict[bool, int], "has keys that are a bool"),
        (date | datetime, f"has a date and a datetime in it, which are both text {APART}"),
        (str | Decimal | None, f"has a str and a Decimal in it, which are both text {APART}"),
        (str | Size, "has a str and a Size in it, which are both text"),
        (timedelta | int, "has a timedelta and an int in it, which are both an int"),
        (Order | Line, "has an Order and a Line in it, which are both a map"),
        (list[int] | tuple[int, ...], "has a list and a tuple in it, which are both a list"),
        (Order | dict[str, int], "has an Order and a dict in it, which are both a map"),
        (Numbers | None, "has a Numbers in it, which can be anything on the wire"),
        (Free | int, "has a Free in it, which can be anything on the wire"),
        (Endless | None, "names itself outside of a list or dict"),
        (Endless, "names itself outside of a list or dict"),
        (pydantic.BaseModel, "BaseModel has no fields; annotate the model itself"),
        (Undone, "Undone cannot be built by pydantic: "),
        (BadStruct, "BadStruct cannot be read by msgspec: "),
    ],
)
def test_refuses_with_place_part_and_advice(annotation: Any, text: str):
    with pytest.raises(TypeError, match=re.escape(text)) as caught:
        converter_for(annotation, PLACE)
    assert str(caught.value).startswith(f"{PLACE}: ")


def test_a_generic_class_of_the_users_own_is_refused():
    class Own(Generic[T]):
        pass

    with pytest.raises(TypeError, match=r"Own\[int\] is a class without a form"):
        converter_for(Own[int], PLACE)


def test_a_class_in_a_function_may_name_itself_but_not_its_neighbours():
    @dataclasses.dataclass
    class Chain:
        next: "Chain | None"

    converter = converter_for(Chain, PLACE)
    assert converter.decode({"next": {"next": None}}, "x") == Chain(Chain(None))

    @dataclasses.dataclass
    class Linked:
        chain: "Chain"

    with pytest.raises(TypeError, match="Linked has an annotation with the name 'Chain'"):
        converter_for(Linked, PLACE)


def test_an_annotation_is_compiled_once():
    assert converter_for(list[Order], "a") is converter_for(list[Order], "b")
