"""`chasqui add --from`: adds the jobs of a file, a thousand at a time."""

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
from chasqui.cli.output import say
from chasqui.cli.run import on_queue
from chasqui.errors import OutcomeUnknownError
from chasqui.model.words import count
from chasqui.queue import Queue

#: Jobs that are sent together, and confirmed before the next are sent.
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
    """Add the jobs of a file and print the outcome, with a progress bar if stderr is a terminal."""
    started_s = time.perf_counter()
    is_stdin = str(source) == "-"
    total = None if is_stdin else source.stat().st_size
    columns = (TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.fields[added]:,} jobs"))
    with (
        sys.stdin.buffer if is_stdin else source.open("rb") as lines,
        progress(*columns, stream=sys.stderr, is_hidden=as_json) as bar,
    ):
        task = bar.add_task(f"adding to {queue}", total=total, added=0)
        file_import = _Import(_job_dicts(lines, name, skip), skip, bar, task)
        try:
            on_queue(queue, redis_url, lambda it: file_import.run(it, unique_s))
        except OutcomeUnknownError:
            bar.console.print(
                f"lines 1 to {file_import.last_line} are in, and some of those up to "
                f"{file_import.sent_line} may be: --skip {file_import.last_line} adds them again, "
                "except jobs with a job_id"
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
    facts = {"added": added, "already_there": already_there, "seconds": round(seconds, 3)}
    rest = f"; {already_there:,} were there already" if already_there else ""
    rate = f"{added / seconds:,.0f} jobs/s"
    say(f"added {count(added, 'job')} in {seconds:.1f} s ({rate}){rest}", facts, as_json=as_json)


class _Import:
    """Adds job dicts in bulks, in order, and knows how far it got."""

    def __init__(
        self,
        jobs: Iterator[tuple[int, int, dict[str, Any]]],
        skip: int,
        bar: Progress,
        task: TaskID,
    ) -> None:
        self.added = 0
        self.already_there = 0
        #: The jobs of all lines up to this one are in the queue.
        self.last_line = skip
        #: The jobs of all lines up to this one were sent.
        self.sent_line = skip
        self._jobs = jobs
        self._bar = bar
        self._task = task

    async def run(self, queue: Queue, unique_s: float | None) -> None:
        while bulk := list(itertools.islice(self._jobs, _BULK)):
            self.sent_line = bulk[-1][0]
            try:
                jobs = await queue.add_bulk([job for _, _, job in bulk], unique_for=unique_s)
            except (ValueError, TypeError) as error:
                raise ValueError(_with_line(error, [line for line, _, _ in bulk])) from None
            new = sum(job.is_new for job in jobs)
            self.added += new
            self.already_there += len(jobs) - new
            self.last_line = bulk[-1][0]
            size = sum(size for _, size, _ in bulk)
            self._bar.update(self._task, advance=size, added=self.added)


def _job_dicts(
    lines: IO[bytes], name: str | None, skip: int
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The number of each line, its length in bytes, and its job."""
    for number, line in enumerate(lines, 1):
        if number <= skip or not line.strip():
            continue
        try:
            job = json.loads(line)
        except RecursionError:
            raise ValueError(f"line {number} is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from None
        if not isinstance(job, dict):
            raise ValueError(f'line {number} is not a job: write {{"name": …, "data": …}}')
        if name is not None:
            job.setdefault("name", name)
        yield number, len(line), job


def _with_line(error: Exception, numbers: list[int]) -> str:
    """The error of a bulk, with line numbers of the file instead of positions in the bulk."""
    text = "; ".join([str(error), *getattr(error, "__notes__", ())])
    return re.sub(r"jobs\[(\d+)\]", lambda found: f"line {numbers[int(found[1])]}", text)
