"""Tests of programs that use chasqui: `jobs`, as a fixture of pytest or as a context manager.

It is imported by every run of pytest, so it imports nothing before it is used.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chasqui.testing.api import Jobs
    from chasqui.testing.drained import Dead, Drained, DrainError, Run
    from chasqui.testing.enqueued import Enqueued

__all__ = ["Dead", "DrainError", "Drained", "Enqueued", "Jobs", "Run", "jobs"]

_HOMES = {"Enqueued": "enqueued", "Jobs": "api"}


def jobs() -> AbstractContextManager["Jobs"]:
    """The jobs of one test, on a server of its own while the block runs.

    For unittest: `self.jobs = self.enterContext(chasqui.testing.jobs())` in `setUp`. With
    pytest the fixture `jobs` does this.
    """
    from chasqui.testing.api import opened

    return opened()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'drained')}"), name)
