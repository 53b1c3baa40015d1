"""A handler whose module is not easily imported in a process of a pool."""

import multiprocessing
import os
import time

from chasqui import Job

#: What the import does there: the name of a variable of the environment, set by the tests.
MANNER = "CHASQUI_TEST_IMPORT"

if multiprocessing.parent_process() is not None:
    match os.environ.get(MANNER, "").split():
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["raise"]:
            raise ImportError("as told")
        case ["exit"]:
            os._exit(5)


def echo(job: Job) -> object:
    return job.data
