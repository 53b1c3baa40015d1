"""Fields of the job on structlog's events: job_id, job_name, attempt, queue."""

from collections.abc import MutableMapping
from typing import Any

from chasqui.consuming.current import job_fields


def add_job_fields(
    logger: Any, method_name: str, event_dict: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """A processor that puts `job_id`, `job_name`, `attempt` and `queue` on every event that a job's
    run logs: on the loop, in threads, in child tasks and in processes.

    Events outside of a run stay as they are, and so does a field that an event has already. It
    binds nothing, so a run pays only for the events that it logs.
    """
    # An event with an id is about that job, whichever runs here.
    if "job_id" not in event_dict:
        for field, value in job_fields().items():
            event_dict.setdefault(field, value)
    return event_dict
