"""Every key and field name in Redis, and the checks of what becomes part of one.

All keys of a queue start with the hash tag `{chasqui:<queue>}`, so a Redis Cluster keeps them in
one hash slot and one script may touch them all. docs/wire.md says what each key holds.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from chasqui._core.options import job_keys

# Fields of entries in the stream and in the dead-letter queue
ENVELOPE: Final = b"d"
NAME: Final = b"n"
SOURCE_ID: Final = b"source_id"
REASON: Final = b"reason"
DETAIL: Final = b"detail"
# Ours, in the dead-letter queue; chasquimq does not read them.
ERROR: Final = b"error"
TRACEBACK: Final = b"traceback"
ATTEMPTS: Final = b"attempts"
FAILED_AT: Final = b"failed_at"
CONSUMER: Final = b"consumer"
# Ours, in the stream and in the dead-letter queue: where a traced job was added, and its last run.
TRACEPARENT: Final = b"traceparent"
RUN_BEFORE: Final = b"run_before"
# Ours, in the dead-letter queue: the flow that cannot go on. Such an entry stands for the last job
# of the flow, which was never added, and is not replayed.
FLOW: Final = b"flow"

# Fields of events; `n` and `reason` as above
EVENT: Final = b"e"
EVENT_JOB_ID: Final = b"id"
EVENT_TS: Final = b"ts"
EVENT_ATTEMPT: Final = b"attempt"
EVENT_DURATION_US: Final = b"duration_us"
EVENT_BACKOFF_MS: Final = b"backoff_ms"
EVENT_DELAY_MS: Final = b"delay_ms"
# Ours: when the job was created, unix ms, if its id is no ULID, which tells it.
EVENT_CREATED: Final = b"created"
# Ours; chasquimq does not write it.
EVENT_TYPE: Final = b"type"

# Fields of the hash that holds a repeat spec
SPEC: Final = b"spec"
FIRED: Final = b"fired"
# Ours; chasquimq does not read it.
RETRY: Final = b"retry"

#: What the ids of steps of flows begin with, and no other id.
STEP_MARK: Final = "~"

#: The consumer group that all workers share by default.
DEFAULT_GROUP: Final = "default"

MAX_QUEUE_NAME_CHARS: Final = 200
MAX_JOB_ID_BYTES: Final = 256
MAX_JOB_NAME_BYTES: Final = 256

_QUEUE_NAME = re.compile(r"[A-Za-z0-9._:/-]+")
# Braces could end or open a hash tag; C0, DEL, C1 and the line separators break logs and tools.
_BAD_IN_JOB_ID = re.compile("[{}\x00-\x1f\x7f-\x9f\u2028\u2029]")
#: What stands behind the hash tag, if it is not the name of the field.
_SUFFIXES = {
    "_prefix": "",
    "promoter_lock": "promoter:lock",
    "scheduler_lock": "scheduler:lock",
    "traces": "trace",
}


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one queue, as the bytes that go to Redis.

    The queue's name is checked here. It holds no brace, so nothing behind the hash tag can turn a
    key into another one. Ids are taken as they are: chasquimq accepts some that `check_job_id`
    refuses.
    """

    queue: str
    stream: bytes = field(init=False, repr=False, compare=False)
    delayed: bytes = field(init=False, repr=False, compare=False)
    dlq: bytes = field(init=False, repr=False, compare=False)
    events: bytes = field(init=False, repr=False, compare=False)
    #: Finished jobs with their data, if workers are asked to write them.
    history: bytes = field(init=False, repr=False, compare=False)
    repeat: bytes = field(init=False, repr=False, compare=False)
    promoter_lock: bytes = field(init=False, repr=False, compare=False)
    scheduler_lock: bytes = field(init=False, repr=False, compare=False)
    #: While this key exists, workers read nothing new.
    paused: bytes = field(init=False, repr=False, compare=False)
    #: A list that the promoter sleeps on; an element means that there is a new earliest job.
    wake: bytes = field(init=False, repr=False, compare=False)
    #: While this key exists, delayed jobs may have a trace.
    traces: bytes = field(init=False, repr=False, compare=False)
    #: A hash of the queue's settings, and of the readers of its logs.
    config: bytes = field(init=False, repr=False, compare=False)
    _prefix: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        prefix = b"{chasqui:%b}:" % check_queue_name(self.queue).encode()
        for one in fields(self)[1:]:
            suffix = _SUFFIXES.get(one.name, one.name).encode()
            object.__setattr__(self, one.name, prefix + suffix)

    @property
    def pattern(self) -> bytes:
        """A SCAN pattern for every key of the queue; its name holds no glob characters."""
        return self._prefix + b"*"

    @staticmethod
    def freed(lock: bytes) -> bytes:
        """The key of the list on which processes wait for a lock; an element means that its holder
        released it."""
        return lock + b":freed"

    def result(self, job_id: str) -> bytes:
        """The key of the stored return value of a job."""
        return self._prefix + b"result:" + job_id.encode()

    def dlid(self, job_id: str) -> bytes:
        """The key of the marker that keeps a delayed job from being added twice."""
        return self._prefix + b"dlid:" + job_id.encode()

    def didx(self, job_id: str) -> bytes:
        """The key of a delayed job's exact member, by which it is cancelled."""
        return self._prefix + b"didx:" + job_id.encode()

    def unique(self, job_id: str) -> bytes:
        """The key of the marker that keeps an immediate job from being added twice."""
        return self._prefix + b"unique:" + job_id.encode()

    def trace(self, job_id: str) -> bytes:
        """The key of the trace that a delayed job belongs to."""
        return self.traces + b":" + job_id.encode()

    def of_jobs(self, flags: list[int], ids: list[str | None], *, is_traced: bool) -> list[bytes]:
        """The keys that new jobs with these flags have of their own, in the order in which
        add_mixed.lua takes them."""
        trace = self.trace("") if is_traced else None
        named = self.unique(""), self.dlid(""), self.result("")
        return job_keys(flags, ids, self.didx(""), trace, *named)

    def repeat_spec(self, spec_key: str) -> bytes:
        """The key of the hash that holds one repeat spec."""
        return self._prefix + b"repeat:spec:" + spec_key.encode()

    def applied(self, producer_id: str, page: int) -> bytes:
        """The key of the bitmap that says which chunks of a producer are in."""
        return b"%bapplied:%b:%d" % (self._prefix, producer_id.encode(), page)

    def flags(self, producer_id: str, chunk: int) -> bytes:
        """The key of the reply to a chunk of jobs with options when it first arrived; also that of
        the reply to another numbered call."""
        return b"%bflags:%b:%d" % (self._prefix, producer_id.encode(), chunk)

    def flow(self, flow_id: str) -> bytes:
        """The key of the hash that says how far a flow is, and what comes next."""
        return self._prefix + b"flow:" + flow_id.encode()

    def flow_results(self, flow_id: str) -> bytes:
        """The key of the hash of what a flow's chains returned."""
        return self.flow(flow_id) + b":r"

    def spark(self, what: str) -> bytes:
        """The key of what a Spark job keeps with the queue: its stages, progress, driver."""
        return self._prefix + b"spark:" + what.encode()


def check_queue_name(name: object) -> str:
    """The name itself, if a queue may be called that."""
    if not isinstance(name, str):
        raise TypeError(f"queue name must be a str, got {type(name).__name__}")
    if not 1 <= len(name) <= MAX_QUEUE_NAME_CHARS or not _QUEUE_NAME.fullmatch(name):
        raise ValueError(
            f"queue name must be 1 to {MAX_QUEUE_NAME_CHARS} characters out of "
            f"A-Z a-z 0-9 . _ - : /: got {shown(name)}"
        )
    return name


def check_job_id(job_id: object) -> str:
    """The id itself, if a new job may carry it.

    A value that is no str is a ValueError too, as in chasquimq.
    """
    if not isinstance(job_id, str) or not job_id.strip():
        raise ValueError(f"job_id must be a non-empty, non-whitespace string, got {shown(job_id)}")
    if _BAD_IN_JOB_ID.search(job_id):
        raise ValueError(f"job_id must hold no braces or control characters, got {shown(job_id)}")
    if job_id.startswith(STEP_MARK):
        raise ValueError(
            f"job_id must not begin with {STEP_MARK!r}, which marks the steps of flows, "
            f"got {shown(job_id)}"
        )
    if _utf8_size(job_id, "job_id") > MAX_JOB_ID_BYTES:
        raise ValueError(f"job_id takes more than {MAX_JOB_ID_BYTES} bytes of UTF-8")
    return str.__str__(job_id)  # of a StrEnum its text


def check_job_name(name: object) -> str:
    """The name itself, if a job may be called that; empty means unnamed."""
    if type(name) is str and name.isascii() and len(name) <= MAX_JOB_NAME_BYTES:
        return name
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if _utf8_size(name, "name") > MAX_JOB_NAME_BYTES:
        raise ValueError(f"name takes more than {MAX_JOB_NAME_BYTES} bytes of UTF-8")
    return str.__str__(name)  # of a StrEnum its text


def check_text(text: object, what: str) -> str:
    """The text itself, if it can be part of a key or of a command."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a str, got {type(text).__name__}")
    _utf8_size(text, what)
    return text


def check_ids(job_ids: Iterable[str]) -> list[str]:
    """The ids as a list. Any text may be the id of a job that exists, since chasquimq takes any."""
    if isinstance(job_ids, str | Mapping) or not isinstance(job_ids, Iterable):
        raise TypeError(f"job_ids must be a list of ids, got {type(job_ids).__name__}")
    return [check_text(job_id, f"job_ids[{i}]") for i, job_id in enumerate(job_ids)]


def _utf8_size(text: str, what: str) -> int:
    try:
        return len(str.encode(text))
    except UnicodeEncodeError:
        raise ValueError(f"{what} holds a lone surrogate, which UTF-8 cannot carry") from None


def shown(value: object) -> str:
    """A short repr: a refused value may be long, and errors end up in logs."""
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits has none
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."
