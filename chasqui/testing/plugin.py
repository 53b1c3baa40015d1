"""The plugin for pytest: the fixture `jobs`. Every run of pytest loads it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from chasqui.testing.api import Jobs


@pytest.fixture
def jobs() -> Iterator["Jobs"]:
    """The jobs of this test, on a server of its own: `drain`, `assert_enqueued`, `run`, `fire`.
    While it lives, every `chasqui.App` uses that server, whatever its `redis_url` says."""
    import chasqui.testing

    with chasqui.testing.jobs() as found:
        yield found
