"""The names of events, as they are written."""

from typing import Final

WAITING: Final = b"waiting"
ACTIVE: Final = b"active"
COMPLETED: Final = b"completed"
FAILED: Final = b"failed"
RETRY_SCHEDULED: Final = b"retry-scheduled"
DLQ: Final = b"dlq"
DRAINED: Final = b"drained"
