"""Progress bars."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text


class RateColumn(ProgressColumn):
    """How many a second, so far."""

    def render(self, task: Task) -> Text:
        # Not task.speed, which leaves out the time before the first step: the demo's table, which
        # does not, would contradict it.
        rate = task.completed / task.elapsed if task.elapsed else 0
        return Text(f"{rate:>9,.0f} jobs/s" if rate else "", style="bold")


def progress(*columns: ProgressColumn, stream: Any, is_hidden: bool = False) -> Progress:
    """A progress bar that stays on the screen; none where the stream is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        *columns,
        console=Console(file=stream, highlight=False),
        disable=is_hidden or not stream.isatty(),
    )
