"""Progress bars."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text


class RateColumn(ProgressColumn):
    """How many a second, so far."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:>9,.0f} jobs/s" if speed else "", style="bold")


def progress(*columns: ProgressColumn, stream: Any = None) -> Progress:
    """A progress bar that stays on the screen; where there is none, its last state is printed."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        *columns,
        console=Console(file=stream, highlight=False),
    )
