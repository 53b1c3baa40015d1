"""Adding the jobs of a file, however many."""

import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rich.progress import Progress, TaskID, TextColumn

from chasqui.cli.bars import progress
from chasqui.cli.output import show
from chasqui.cli.run import on_queue
from chasqui.errors import OutcomeUnknownError
from chasqui.queue import Queue
from chasqui.model.words import count

#: Jobs that are sent, and confirmed, together.
_BULK = 1000


def add_file(
    queue: str,
    name: str | None,
    source: Path,
    skip: int,
    unique_s: float | None,
    redis_url: str | None,
    as_json: bool,
) -> None:
    """Add them all, with a progress bar where stderr is a terminal, and print what came of it."""
    started_s = time.perf_counter()
    is_stdin = str(source) == "-"
    total = None if is_stdin else source.stat().st_size
    columns = (TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.fields[added]:,} jobs"))
    with (
        sys.stdin.buffer if is_stdin else source.open("rb") as lines,
        progress(*columns, stream=sys.stderr, is_hidden=as_json) as bar,
    ):
        task = bar.add_task(f"adding to {queue}", total=total, added=0)
        file_import = _Import(_entries(lines, name, skip), skip, bar, task)
        try:
            on_queue(queue, redis_url, lambda it: file_import.run(it, unique_s))
        except OutcomeUnknownError:
            bar.console.print(
                f"lines 1 to {file_import.last_line} are in, and some of those up to "
                f"{file_import.sent_line} may be: --skip {file_import.last_line} adds them again, "
                "but for those with a job_id"
            )
            raise
        except Exception:
            if file_import.last_line:
                bar.console.print(
                    f"lines 1 to {file_import.last_line} are in: go on with --skip "
                    f"{file_import.last_line}"
                )
            raise
    seconds = time.perf_counter() - started_s
    added, already_there = file_import.added, file_import.already_there
    if as_json:
        facts = {"added": added, "already_there": already_there, "seconds": round(seconds, 3)}
        show(facts, as_json=True)
        return
    rest = f"; {already_there:,} were there already" if already_there else ""
    rate = added / seconds
    print(f"added {count(added, 'job')} in {seconds:.1f} s ({rate:,.0f} jobs/s){rest}")


class _Import:
    """Adds entries bulk by bulk, in order, and knows how far it got."""

    def __init__(
        self,
        entries: Iterator[tuple[int, int, dict[str, Any]]],
        skip: int,
        bar: Progress,
        task: TaskID,
    ) -> None:
        self.added = 0
        self.already_there = 0
        #: All lines up to this one are in.
        self.last_line = skip
        #: And those up to this one were sent.
        self.sent_line = skip
        self._entries = entries
        self._bar = bar
        self._task = task

    async def run(self, queue: Queue, unique_s: float | None) -> None:
        while bulk := list(itertools.islice(self._entries, _BULK)):
            self.sent_line = bulk[-1][0]
            try:
                jobs = await queue.add_bulk([entry for _, _, entry in bulk], unique_for=unique_s)
            except (ValueError, TypeError) as error:
                raise ValueError(_with_line(error, [line for line, _, _ in bulk])) from None
            new = sum(job.is_new for job in jobs)
            self.added += new
            self.already_there += len(jobs) - new
            self.last_line = bulk[-1][0]
            size = sum(size for _, size, _ in bulk)
            self._bar.update(self._task, advance=size, added=self.added)


def _entries(
    lines: IO[bytes], name: str | None, skip: int
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Per job its line number, the bytes of the line, and the entry for a bulk add."""
    for number, line in enumerate(lines, 1):
        if number <= skip or not line.strip():
            continue
        try:
            entry = json.loads(line)
        except RecursionError:
            raise ValueError(f"line {number} is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from None
        if not isinstance(entry, dict):
            raise ValueError(f'line {number} is no job: write {{"name": …, "data": …}}')
        if name is not None:
            entry.setdefault("name", name)
        yield number, len(line), entry


def _with_line(error: Exception, numbers: list[int]) -> str:
    """What is wrong with a bulk, by the line of its file instead of its own index."""
    told = "; ".join([str(error), *getattr(error, "__notes__", ())])
    return re.sub(r"jobs\[(\d+)\]", lambda found: f"line {numbers[int(found[1])]}", told)
