"""`chasqui watch`: shows what one queue holds, again and again."""

import asyncio
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from chasqui.cli.facts import Facts, History, look, sparkline
from chasqui.cli.known import tell_if_new
from chasqui.cli.options import AsJson, Group, QueueName, RedisUrl, number
from chasqui.cli.output import as_names, cell, print_json_line
from chasqui.cli.run import connection_to, until_signal
from chasqui.model.keys import DEFAULT_GROUP, Keys

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 24


def watch(
    queue: QueueName,
    interval_ms: Annotated[int, number("MS", "Time between two looks.", min=10)] = 1000,
    times: Annotated[int | None, number("N", "End after N looks. Default: never.")] = None,
    redis_url: RedisUrl = None,
    group: Group = DEFAULT_GROUP,
    as_json: AsJson = False,
) -> None:
    """Show how much a queue holds, and how that changes, until interrupted.

    Entered and left are entries per second that came into the stream and went out of it. A retry
    does both. So does one entry whenever a worker gives jobs back, if the server has CLAIM. Servers
    before Redis 7 do not count this. Piped, each look is one line.

    Example: chasqui watch emails --interval-ms 500
    """
    keys = Keys(queue)
    tell_if_new(queue, redis_url)
    if as_json:
        show = _print_json
    elif sys.stdout.isatty():
        show = _Screen(queue, interval_ms)
    else:
        show = _Lines()

    async def work() -> None:
        async with connection_to(redis_url, queue=queue) as connection:
            async for _ in _ticks(interval_ms / 1000, times):
                show(await look(connection, keys, group))

    try:
        until_signal(work)
    finally:
        if isinstance(show, _Screen):
            show.close()


async def _ticks(every_s: float, times: int | None) -> AsyncIterator[int]:
    """Yields at a steady pace: after a slow look it waits less."""
    loop = asyncio.get_running_loop()
    started_s, done = loop.time(), 0
    while True:
        yield done
        done += 1
        if done == times:
            return
        await asyncio.sleep(max(0.0, started_s + done * every_s - loop.time()))


def _print_json(facts: Facts) -> None:
    moment = {"time": datetime.now(UTC)}
    print_json_line({**moment, **as_names(facts.rows()), "entered": facts.entered})


class _Lines:
    """Prints each look as a line, with tabs."""

    def __init__(self) -> None:
        self._has_begun = False

    def __call__(self, facts: Facts) -> None:
        rows: dict[str, Any] = {"time": datetime.now(UTC), **facts.rows()}
        if not self._has_begun:
            print("\t".join(rows))
            self._has_begun = True
        print("\t".join(map(cell, rows.values())), flush=True)


class _Screen:
    """Draws each look as a table, in the place of the one before."""

    def __init__(self, queue: str, interval_ms: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = f"chasqui watch {queue}  refresh={interval_ms}ms"
        self._history = History()
        self._live = Live(console=Console(highlight=False), auto_refresh=False)
        self._live.start()

    def __call__(self, facts: Facts) -> None:
        self._history.add(facts)
        self._live.update(self._table(), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _table(self) -> "Table":
        from rich.table import Table

        history = self._history
        now = datetime.now(UTC)
        table = Table(
            box=None,
            pad_edge=False,
            header_style="bold",
            title=f"{self._title}  {now:%H:%M:%S}Z  (Ctrl+C to exit)",
            title_justify="left",
        )
        table.add_column("")
        for column in ("now", "change", "per s"):
            table.add_column(column, justify="right", min_width=8)
        table.add_column(f"last {_WIDTH} looks")
        for name, value in history.last.rows().items():
            if isinstance(value, bool):
                table.add_row(name, cell(value))
                continue
            change = history.change(name)
            line = sparkline(history.series(name), _WIDTH)
            if name == "pending" and not history.last.has_group:
                line = "(group not created)"
            table.add_row(
                name,
                "-" if value is None else f"{value:,}",
                "" if change is None else f"{change:+,.0f}",
                "",
                line,
            )
        for which in ("entered", "left"):
            rates = history.rates(which)
            rate = f"{rates[-1]:,.1f}" if rates else "-"
            table.add_row(f"{which} the stream", "", "", rate, sparkline(rates, _WIDTH))
        return table
