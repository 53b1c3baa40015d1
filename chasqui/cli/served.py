"""What a group of workers serves, shown when it starts: as tables, or in the log."""

import logging
import sys

from chasqui.cli.output import cell, print_table
from chasqui.running.runnable import Runnable
from chasqui.worker_group import WorkerGroup

logger = logging.getLogger(__name__)


def show(worker: Runnable, *, as_json: bool) -> None:
    """Show the tables of a group on stderr; log each row if that is no terminal, or JSON is wanted.
    A single worker says in its log what it serves."""
    if not isinstance(worker, WorkerGroup):
        return
    is_shown = not as_json and sys.stderr.isatty()
    for table in worker.describe():
        if is_shown:
            print_table(table.columns, table.rows, title=table.title, file=sys.stderr)
            continue
        for row in table.rows:
            facts = dict(zip(table.columns, map(cell, row), strict=True))
            said = ", ".join(f"{name} {value}" for name, value in facts.items())
            fields = {"table": table.title, "facts": facts}
            logger.info("%s: %s", table.title, said, extra=fields)
