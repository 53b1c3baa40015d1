"""`Queue` and `sync.Queue` have the same face."""

import inspect
from typing import Any

import pytest

from chasqui import sync
from chasqui.queue import Queue

#: Waiting for the end of a job goes by its events, which need a connection and a task of their own.
WAITING = {"wait_for_result", "wait_for_end"}


def face(kind: type[Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("_") and name not in WAITING
    }


def test_the_same_names():
    assert face(Queue).keys() == face(sync.Queue).keys()
    assert hasattr(sync.Queue, "wait_for_result")


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
