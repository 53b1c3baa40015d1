"""What a queue and a call say about adds, checked when it is made."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol, TypeAlias

from chasqui.model.config import MAX_COUNT, check_credential_provider
from chasqui.model.keys import Keys, shown
from chasqui.producing.new_jobs import NewJobs
from chasqui.producing.tracing import Tracing, check_tracing
from chasqui.scripts.loading import REPLY_TTL_S

OnFull: TypeAlias = Literal["raise", "wait"]
Durable: TypeAlias = Literal["disk", "replica"]

#: Nothing is sent again after this, so no repeat can come after the server forgot its reply.
MAX_REQUEST_TIMEOUT_S: Final = REPLY_TTL_S / 2
_MAX_UNIQUE_FOR_S: Final = 10 * 365 * 86_400


@dataclass(frozen=True, slots=True)
class AddOptions:
    """What a call says about all its jobs."""

    #: The server refuses a chunk that would make the stream longer than this.
    max_backlog: int | None = None
    #: Wait until the add is on the server's disk or on a replica.
    durable: Durable | None = None
    #: None: a day, and for a delayed job an hour past its due time.
    unique_for_s: int | None = None
    tracing: Tracing | None = None

    def of_chunks(self, jobs: NewJobs, first: slice) -> tuple["AddOptions", "AddOptions"]:
        """The options of the first chunk and of those behind it; the same if nothing is bounded.

        The first one asks for room for all jobs. If it gets it, the others follow unasked.
        """
        if self.max_backlog is None:
            return self, self
        unbounded = replace(self, max_backlog=None)
        total = jobs.immediate()
        if not total:
            return unbounded, unbounded
        left = self.max_backlog - total + jobs.chunk(first).immediate()
        return replace(self, max_backlog=left), unbounded


PLAIN: Final = AddOptions()


class Immediate(Protocol):
    """Jobs to add, of whichever form."""

    def immediate(self) -> int:
        """How many go straight into the stream."""


@dataclass(frozen=True, slots=True)
class AddSettings:
    """What a queue says about all its adds."""

    max_backlog: int | None = None
    on_full: OnFull = "raise"
    durable: Durable | bool = False
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        check_positive("max_backlog", self.max_backlog)
        if self.on_full not in ("raise", "wait"):
            raise ValueError(f"on_full must be 'raise' or 'wait', got {shown(self.on_full)}")
        if not isinstance(self.durable, bool) and self.durable not in ("disk", "replica"):
            raise ValueError(
                f"durable must be a bool, 'disk' or 'replica', got {shown(self.durable)}"
            )
        check_tracing(self.tracing)

    def options(self, unique_for: float | None) -> AddOptions:
        """The options of one call; PLAIN itself if there are none."""
        if unique_for is None:
            if self.max_backlog is None and self.durable is False and self.tracing is None:
                return PLAIN
            unique_for_s = None
        else:
            if isinstance(unique_for, bool) or not isinstance(unique_for, int | float):
                raise TypeError(f"unique_for must be seconds, got {type(unique_for).__name__}")
            if not 1 <= unique_for <= _MAX_UNIQUE_FOR_S:
                raise ValueError(
                    f"unique_for must be from 1 to {_MAX_UNIQUE_FOR_S} seconds, "
                    f"got {shown(unique_for)}"
                )
            unique_for_s = math.ceil(unique_for)
        durable: Durable | None = "disk" if self.durable is True else self.durable or None
        return AddOptions(self.max_backlog, durable, unique_for_s, self.tracing)

    def check_fits(self, jobs: Immediate) -> None:
        """Refuse to wait for room that there can never be."""
        limit = self.max_backlog
        if limit is not None and self.on_full == "wait" and (total := jobs.immediate()) > limit:
            raise ValueError(f"{total} jobs at once never fit into max_backlog={limit}")


def full_waits_s() -> Iterator[float]:
    """How long to wait each time that a queue is found full."""
    wait_s = 0.02
    while True:
        yield wait_s
        wait_s = min(wait_s * 2, 0.5)


def check_positive(what: str, value: object) -> None:
    """Raise ValueError unless a bound is a positive int, or None for no bound."""
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT
    ):
        raise ValueError(f"{what} must be a positive int or None, got {shown(value)}")


def connection_options(
    keys: Keys, credential_provider: object, request_timeout_s: float
) -> dict[str, Any]:
    """The options of a connection that adds jobs, checked."""
    check_credential_provider(credential_provider)
    return {
        "key": keys.stream,
        "client_name": "chasqui-producer",
        "credential_provider": credential_provider,
        "request_timeout_s": check_request_timeout(request_timeout_s),
    }


def check_request_timeout(value: float) -> float:
    """How long a request may take: not so long that the server forgets its first arrival."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"request_timeout_s must be seconds, got {type(value).__name__}")
    if not 0 < value <= MAX_REQUEST_TIMEOUT_S:
        raise ValueError(
            f"request_timeout_s must be above 0 and at most {MAX_REQUEST_TIMEOUT_S:g}, "
            f"got {shown(value)}"
        )
    return value
