"""Instances from columns: the same as a call for each would have made."""

import gc
import sys
import weakref
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest

from chasqui._core.instances import InstanceFactory


@dataclass(slots=True)
class Pair:
    left: Any
    right: Any = None


class Weak:
    __slots__ = ("__weakref__", "left")


class Open:
    left = 1


class Below(Pair):
    __slots__ = ("more",)


T = TypeVar("T")


@dataclass(slots=True)
class Typed(Generic[T]):
    left: Any
    right: Any = None


class Same(Typed[T]):
    __slots__ = ()


class Wide(Pair):
    pass


class Number(int):
    __slots__ = ()


REFUSED = [Weak, Open, Below, Wide, Number, int, type("Few", (), {"__slots__": ["a"]})]


def test_a_column_is_a_list_or_one_value_for_all() -> None:
    lefts = [object() for _ in range(300)]

    made = InstanceFactory(Pair).make(300, lefts, "r")

    assert made == [Pair(left, "r") for left in lefts]
    assert all(type(one) is Pair for one in made)
    assert InstanceFactory(Pair).make(0, [], "r") == []


@pytest.mark.parametrize("cls", [Typed, Same])
def test_bases_without_state_are_no_obstacle(cls: type[Any]) -> None:
    [made] = InstanceFactory(cls).make(1, [1], 2)
    assert type(made) is cls
    assert (made.left, made.right) == (1, 2)


def test_what_is_made_can_be_changed_and_let_go() -> None:
    left, before = object(), sys.getrefcount(Pair)
    kept = sys.getrefcount(left)
    made = InstanceFactory(Pair).make(50, [left] * 50, left)
    made[0].left = made[0].right = None
    assert sys.getrefcount(left) == kept + 98
    assert sys.getrefcount(Pair) >= before + 50

    del made

    assert sys.getrefcount(left) == kept
    assert sys.getrefcount(Pair) == before


def test_the_garbage_collector_finds_them_in_a_cycle() -> None:
    class Held:
        pass

    held = Held()
    seen = weakref.ref(held)
    [pair] = InstanceFactory(Pair).make(1, held, None)
    held.pair = pair  # type: ignore[attr-defined]
    del held, pair

    gc.collect()

    assert seen() is None


@pytest.mark.parametrize("cls", REFUSED)
def test_a_class_is_refused_whose_state_is_not_its_own_slots(cls: type) -> None:
    with pytest.raises(TypeError, match=cls.__name__):
        InstanceFactory(cls)


def test_wrong_numbers_are_refused() -> None:
    factory = InstanceFactory(Pair)
    with pytest.raises(TypeError, match="Pair has 2 slots, not 1"):
        factory.make(1, [1])
    with pytest.raises(ValueError, match="a column has 3 values for 2 instances"):
        factory.make(2, [1, 2, 3], None)
    with pytest.raises(ValueError, match="-1"):
        factory.make(-1, "a", "b")
