"""`Queue` and `sync.Queue` have the same face."""

import inspect
from typing import Any

import pytest

from chasqui import sync
from chasqui.queue import Queue


def face(kind: type[Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


def test_the_same_names():
    assert face(Queue).keys() == face(sync.Queue).keys()


@pytest.mark.parametrize("name", ["__init__", *face(Queue)])
def test_the_same_parameters(name: str):
    ours, theirs = getattr(Queue, name), getattr(sync.Queue, name)
    if isinstance(ours, property):
        assert isinstance(theirs, property)
        return
    one, other = inspect.signature(ours), inspect.signature(theirs)
    # Names, kinds and defaults; a sync queue takes more as a credential provider.
    assert [p.replace(annotation=None) for p in one.parameters.values()] == [
        p.replace(annotation=None) for p in other.parameters.values()
    ]


@pytest.mark.parametrize("name", face(Queue))
def test_the_same_first_words(name: str):
    """Where both explain themselves, they say the same."""
    assert getattr(Queue, name).__doc__ == getattr(sync.Queue, name).__doc__
