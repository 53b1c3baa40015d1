"""Fields of the job on log records of the standard library: job_id, job_name, attempt, queue."""

import logging
from typing import Any, Final

from chasqui.consuming.current import job_fields

#: What a record gets that is logged outside of a run.
_FIELDS: Final = ("job_id", "job_name", "attempt", "queue")


class JobFields(logging.Filter):
    """Puts `job_id`, `job_name`, `attempt` and `queue` on every record that a job's run logs: on
    the loop, in threads, in child tasks and in processes.

    It belongs on handlers, since a logger's filter does not see records of the loggers below it.
    Records outside of a run get `empty` instead. A field that a record has already stays as it is.
    """

    def __init__(self, name: str = "", *, empty: Any = None) -> None:
        """`name` is that of `logging.Filter`: only records of this logger, or below it, pass."""
        super().__init__(name)
        self._nothing = dict.fromkeys(_FIELDS, empty)

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields; whether the record is to be logged."""
        fields = vars(record)
        # A record with an id is about that job, whichever runs here.
        found = {} if "job_id" in fields else job_fields()
        for field, value in (self._nothing | found).items():
            fields.setdefault(field, value)
        return bool(super().filter(record))
