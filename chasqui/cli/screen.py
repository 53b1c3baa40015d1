"""The screen of `chasqui top`: a table of queues, and below it the work of the chosen queue."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.css.query import NoMatches
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Static

from chasqui.cli.board import Board, Details
from chasqui.cli.facts import Facts, History, sparkline
from chasqui.cli.output import at_ms, cell, escaped
from chasqui.errors import ChasquiError, OutcomeUnknownError, UnreachableError
from chasqui.model.config import Endpoint
from chasqui.model.words import count

_QUEUE_COLUMNS = ("queue", "waiting", "pending", "delayed", "dead", "in/s", "out/s", "depth", "")
_SPARK_WIDTH = 12
#: How long a look, or the action of a key, may take before the server counts as gone.
ANSWER_S: Final = 2.0


class Table(DataTable[Text]):
    """A table of texts."""


class Top(App[None]):
    """All queues on a full screen, refreshed again and again."""

    CSS = """
    #queues { height: 1fr; }
    #workers, #running { height: auto; max-height: 30%; }
    .title { height: 1; text-style: bold; color: $accent; }
    #status { height: 1; }
    ModalScreen { align: center middle; }
    ModalScreen > Vertical {
        width: 76; height: auto; max-height: 90%; padding: 1 2; border: round $accent;
        background: $surface;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("p", "pause", "Pause/resume"),
        ("r", "replay", "Replay dead"),
        ("i", "inspect", "Inspect"),
        ("q", "quit", "Quit"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self, endpoint: Endpoint, queues: list[str], *, group: str, interval_s: float
    ) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._board = Board(endpoint, queues, group)
        self._interval_s = interval_s
        self._due = asyncio.Event()
        #: When the server last answered, by the monotonic clock, and whether it answered last time.
        self._answered_s = time.monotonic()
        self._answers = True

    def compose(self) -> ComposeResult:
        yield Table(id="queues", cursor_type="row")
        yield Static("workers", id="workers-title", classes="title")
        yield Table(id="workers", cursor_type="none")
        yield Static("running", classes="title")
        yield Table(id="running", cursor_type="none")
        yield Static(id="status", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        columns = {
            "queues": _QUEUE_COLUMNS,
            "workers": ("worker", "pending", "seen ms ago"),
            "running": ("job", "name", "worker", "renewed ms ago", "deliveries"),
        }
        for name, labels in columns.items():
            table = self._table(name)
            for label in labels:
                table.add_column(label, key=label)
        self._table("queues").focus()
        self.run_worker(self._watch())

    async def on_unmount(self) -> None:
        await self._board.close()

    def on_data_table_row_highlighted(self) -> None:
        self._due.set()

    # ── Looking ─────────────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        """Look and draw, again and again, and at once when another queue is chosen."""
        with suppress(NoMatches):  # the screen is being taken down
            while True:
                self._due.clear()
                try:
                    async with asyncio.timeout(ANSWER_S):
                        await self._look()
                    self._answered_s, self._answers = time.monotonic(), True
                    self._tell("" if self._board.histories else "no queues")
                except (TimeoutError, UnreachableError, OutcomeUnknownError):
                    self._answers = False
                    self._tell(self._gone())
                except ChasquiError as error:
                    self._tell(str(error))
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._due.wait()

    async def _look(self) -> None:
        await self._board.look()
        self._draw_queues()
        if (queue := self._chosen()) is not None:
            self._draw_workers(self._board.histories[queue].last)
            self._draw_details(await self._board.details(queue))

    def _gone(self) -> str:
        gone_s = time.monotonic() - self._answered_s
        return f"no connection to {self._endpoint} for {gone_s:.0f} s: showing what was last seen"

    def _draw_queues(self) -> None:
        table, histories = self._table("queues"), self._board.histories
        there = {str(key.value) for key in table.rows}
        for name in there - histories.keys():
            table.remove_row(name)
        for name, history in histories.items():
            cells = [Text(value) for value in _queue_row(name, history)]
            if name not in there:
                table.add_row(*cells, key=name)
                continue
            for column, value in zip(_QUEUE_COLUMNS, cells, strict=True):
                table.update_cell(name, column, value, update_width=True)

    def _draw_workers(self, facts: Facts) -> None:
        """Draw the live workers, and say how many silent ones the group has."""
        silent = len(facts.consumers) - len(facts.live)
        title = "workers" + (f", and {silent:,} not seen for a minute" if silent else "")
        self._main.query_one("#workers-title", Static).update(title)
        rows = ((one.name, one.pending, one.idle_ms) for one in facts.live)
        _fill(self._table("workers"), rows)

    def _draw_details(self, details: Details) -> None:
        _fill(
            self._table("running"),
            (
                (one.job_id, one.name, one.worker, one.idle_ms, one.deliveries)
                for one in details.running
            ),
        )

    def _tell(self, text: str) -> None:
        self._main.query_one("#status", Static).update(escaped(text))

    def _table(self, name: str) -> Table:
        return self._main.query_one(f"#{name}", Table)

    @property
    def _main(self) -> Screen[Any]:
        """The screen with the tables, also while another screen covers it."""
        if not self.screen_stack:
            raise NoMatches("the screen is being taken down")
        return self.screen_stack[0]

    def _chosen(self) -> str | None:
        """The queue under the cursor."""
        table = self._table("queues")
        if not table.row_count:
            return None
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value

    # ── Acting ──────────────────────────────────────────────────────────────────────────────────

    def _chosen_to_change(self) -> str | None:
        """The queue under the cursor; None, with a message, while there is no connection."""
        if self._answers:
            return self._chosen()
        self.notify("not done: there is no connection", severity="error")
        return None

    async def action_pause(self) -> None:
        if (queue := self._chosen_to_change()) is not None:
            with self._errors_shown():
                async with asyncio.timeout(ANSWER_S):
                    is_paused = await self._board.toggle_pause(queue)
                self.notify(f"queue {queue} {'paused' if is_paused else 'resumed'}", markup=False)

    async def action_replay(self) -> None:
        queue = self._chosen_to_change()
        if queue is None:
            return
        dead = self._board.histories[queue].last.counts.dlq
        if not dead:
            self.notify(f"queue {queue} has no dead jobs", markup=False)
            return

        async def answer(is_yes: bool | None) -> None:
            if is_yes:  # in the background: there may be many
                self.run_worker(self._replay(queue, dead))

        self.push_screen(Question(f"Replay {count(dead, 'dead job')} of queue {queue}?"), answer)

    async def _replay(self, queue: str, dead: int) -> None:
        with self._errors_shown():
            moved = await self._board.replay(queue, dead)
            self.notify(f"replayed {moved} of queue {queue}", markup=False)

    async def action_inspect(self) -> None:
        if (queue := self._chosen_to_change()) is not None:
            with self._errors_shown():
                async with asyncio.timeout(ANSWER_S):
                    details = await self._board.details(queue)
                rows = self._board.histories[queue].last.rows()
                self.push_screen(Inspection(queue, rows, details))

    @contextmanager
    def _errors_shown(self) -> Iterator[None]:
        """Around an action: show its error as a message, and look again soon."""
        try:
            yield
        except TimeoutError:
            text = f"no answer within {ANSWER_S:g} s: it may be done or not"
            self.notify(text, severity="error", markup=False)
        except ChasquiError as error:
            self.notify(str(error), severity="error", markup=False)
        self._due.set()


class Question(ModalScreen[bool]):
    """Asks a question: y is yes, n and escape are no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("y", "dismiss(True)", "Yes"),
        ("n,escape", "dismiss(False)", "No"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(f"{self._text}  y/n", markup=False)


class Inspection(ModalScreen[None]):
    """All facts of one queue, and its oldest dead jobs."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,i,q", "dismiss(None)", "Close")]

    def __init__(self, queue: str, rows: dict[str, Any], details: Details) -> None:
        super().__init__()
        self._queue = queue
        self._rows = rows
        self._details = details

    def compose(self) -> ComposeResult:
        lines = [f"queue {self._queue}", ""]
        lines += [f"{name:<28}{cell(value)}" for name, value in self._rows.items()]
        if self._details.dead:
            lines += ["", "dead since           name             why"]
        for job in self._details.dead[:8]:
            why = job.error or job.detail or job.reason
            lines.append(f"{cell(at_ms(job.added_ms))[:19]}  {job.name[:15]:<15}  {why[:34]}")
        with Vertical():
            yield Static("\n".join(map(escaped, lines)), markup=False)


def _queue_row(name: str, history: History) -> Sequence[str]:
    counts = history.last.counts
    rates = (history.rates(which) for which in ("entered", "left"))
    return (
        name,
        *(f"{number:,}" for number in (counts.waiting, counts.pending, counts.delayed, counts.dlq)),
        *(f"{rate[-1]:,.0f}" if rate else "-" for rate in rates),
        sparkline(history.series("stream depth"), _SPARK_WIDTH),
        "paused" if counts.is_paused else "",
    )


def _fill(table: Table, rows: Iterable[Sequence[Any]]) -> None:
    table.clear()
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
