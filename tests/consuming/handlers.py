"""Handlers for process pools, which find them by name."""

import contextvars
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from chasqui import BatchError, Job, UnrecoverableError, current_job


def double(job: Job) -> int:
    return int(job.data) * 2


async def double_later(job: Job) -> int:
    return int(job.data) * 2


def process_id(job: Job) -> int:
    return os.getpid()


def wait_for_file(job: Job) -> str:
    """Say that it has begun by one file, and go on until there is another."""
    if job.data == "die":
        os._exit(3)
    Path(job.data["began"]).touch()
    while not Path(job.data["until"]).exists():
        time.sleep(0.01)
    return "waited"


def take_no_notice(job: Job) -> None:
    """Say by a file which process runs it, and go on for ever, though told to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    partial = Path(f"{job.data}.partial")
    partial.write_text(str(os.getpid()))
    partial.rename(job.data)
    while True:
        time.sleep(1)


def fork_and_die(job: Job) -> None:
    """Leave a child behind that has all that its parent had open; its id is in a file."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    Path(job.data).write_text(str(child))
    os._exit(3)


class CannotBeUnpickledError(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def behave_in_batches(jobs: list[Job]) -> list[Any]:
    """What each job says; those that raise do so together, at the end."""
    failures, results = {}, {}
    for job in jobs:
        try:
            results[job.id] = behave(job)
        except Exception as error:
            failures[job.id] = error
    if failures:
        raise BatchError(failures, results=results)
    return [results[job.id] for job in jobs]


noted: contextvars.ContextVar[Any] = contextvars.ContextVar("noted", default="nothing")


def note(job: Job) -> Any:
    """What a run before this one noted, and what a coroutine sees of this one's note."""
    found = noted.get()
    noted.set(job.data)

    async def later() -> list[Any]:
        return [found, noted.get()]

    return later()


def behave(job: Job) -> Any:
    """What the job says."""
    match job.data:
        case "raise":
            raise ValueError("as told")
        case "unpicklable":
            raise CannotBeUnpickledError("as", "told")
        case "final":
            raise UnrecoverableError("as told")
        case "stop iteration":
            raise StopIteration
        case "die":
            os._exit(3)
        case "lambda":
            return lambda: None
        case "sealed":
            return CannotBeUnpickledError("as", "told")
        case "exit":
            sys.exit(4)
        case "hang":
            time.sleep(60)
    return job.data


def attempts(job: Job) -> list[Any]:
    """How many runs it has, once it is in the last but one, and in the last."""
    known = [job.attempt, job.max_attempts, job.is_last_attempt]
    if not job.attempt:
        raise ValueError(f"{known}")
    return known


def attempts_of_batch(jobs: list[Job]) -> list[Any]:
    return [attempts(job) for job in jobs]


def current(job: Job) -> list[Any]:
    """What a function finds by `current_job` that it was not given."""
    known = current_job()
    return [known.id, known.max_attempts, known == job]
