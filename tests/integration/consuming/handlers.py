"""Handlers for process pools, which find them by name."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from chasqui import Job, UnrecoverableError


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


class CannotBeUnpickledError(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


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
        case "exit":
            sys.exit(4)
        case "hang":
            time.sleep(60)
    return job.data
