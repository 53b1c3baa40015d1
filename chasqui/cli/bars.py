"""Progress bars."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text


class RateColumn(ProgressColumn):
    """Jobs per second, since the bar began."""

    def render(self, task: Task) -> Text:
        # Not task.speed: it leaves out the time before the first step, so it would contradict the
        # demo's table.
        rate = task.completed / task.elapsed if task.elapsed else 0
        return Text(f"{rate:>9,.0f} jobs/s" if rate else "", style="bold")


def progress(*columns: ProgressColumn, stream: Any, is_hidden: bool = False) -> Progress:
    """A progress bar that stays on the screen; nothing if the stream is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        *columns,
        console=Console(file=stream, highlight=False),
        disable=is_hidden or not stream.isatty(),
    )
