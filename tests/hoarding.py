"""Workers that keep what they read ahead, however slow their handlers are."""

from collections.abc import Callable
from typing import Any

from chasqui.consuming.appetite import Appetite


def hoard(patch: Callable[[type, str, Any], None] = setattr) -> None:
    """Let workers of this process have as much in hand, beyond what runs, as one read may bring."""
    patch(Appetite, "_ahead", lambda self: self._config.read_count or 0)
    patch(Appetite, "excess", lambda self: 0)
