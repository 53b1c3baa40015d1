"""The options of new jobs, checked and turned into `NewJobs`. Nothing is sent from here.

Errors name the argument, and in bulk the index of the job: one bad job, and nothing is sent.
"""

import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Required, TypeAlias, TypedDict

from chasqui._core.backoff import MAX_DELAY_MS
from chasqui._core.envelope import encode_retry
from chasqui._core.options import DELAYED, RELATIVE, UNIQUE, read_options
from chasqui._core.payload import pack_rows
from chasqui.errors import PayloadError, PayloadTooLargeError
from chasqui.model import payload
from chasqui.model.job import BackoffSpec, MissedFiresPolicy, RepeatPattern
from chasqui.model.keys import check_job_id, check_job_name, shown
from chasqui.producing.new_jobs import NewJobs

#: The longest delay unless the queue says otherwise; 0 allows any.
MAX_DELAY_S: Final = 30 * 86_400

BackoffLike: TypeAlias = BackoffSpec | int | Mapping[str, Any]
DelayMsLike: TypeAlias = int | float | datetime
RepeatLike: TypeAlias = RepeatPattern | Mapping[str, Any]
MissedFiresLike: TypeAlias = MissedFiresPolicy | Mapping[str, Any]

#: Encoded retries, by the attempts and the address of the backoff. The backoff is kept with its
#: retry, so that no other object gets its address.
_Encoded: TypeAlias = dict[tuple[int | None, int], tuple[bytes | None, object]]

_MAX_ATTEMPTS = 2**32 - 1
#: The longest payload.
MAX_BYTES: Final = payload.MAX_BYTES - payload.ENVELOPE_ROOM

_OPTIONS = frozenset(
    ("name", "data", "delay_ms", "delay", "attempts", "backoff", "job_id", "repeat", "missed_fires")
)


class JobDict(TypedDict, total=False):
    """One job of `add_bulk`: name and data, and options of `add`."""

    name: Required[str]
    data: Required[Any]
    delay_ms: DelayMsLike | None
    delay: timedelta | None
    attempts: int | None
    backoff: BackoffLike | None
    job_id: str | None


def one(
    name: str,
    data: object,
    delay_ms: DelayMsLike | None = None,
    delay: timedelta | None = None,
    attempts: int | None = None,
    backoff: BackoffLike | None = None,
    job_id: str | None = None,
    max_delay_s: int = MAX_DELAY_S,
) -> NewJobs:
    """One job to add."""
    name = check_job_name(name)
    due = due_of(delay_ms, delay, max_delay_s)
    if job_id is not None:
        job_id = check_job_id(job_id)
    retry = retry_of(attempts, backoff)
    jobs = alike([payload.encode(data)], name, due, retry, job_id)
    jobs.data = [data]
    return jobs


def alike(
    payloads: list[bytes], name: str, due: tuple[int, int], retry: bytes | None, job_id: str | None
) -> NewJobs:
    """Jobs with the same options, checked; `due` is what `due_of` gives, and an id is for one."""
    count = len(payloads)
    flags, due_ms = due
    ids: list[str | None] | None = None
    if job_id is not None:
        ids, flags = [job_id], flags | UNIQUE
    return NewJobs(
        payloads,
        name,
        ids,
        None if retry is None else [retry] * count,
        [flags] * count if flags else None,
        [due_ms] * count if flags else None,
    )


def many(
    job_dicts: Sequence[Mapping[str, Any]],
    max_delay_s: int = MAX_DELAY_S,
    *,
    unique_for: float | None = None,
) -> NewJobs:
    """Many jobs to add; only those with options cost more than their payload."""
    if type(job_dicts) is not list and (
        isinstance(job_dicts, Mapping | str | bytes) or not isinstance(job_dicts, Sequence)
    ):
        raise TypeError(f"jobs must be a list of dicts, got {type(job_dicts).__name__}")
    payloads: list[bytes] = []
    names: list[str] = []
    given: list[Any] = []
    special: list[int] = []
    rows = list(job_dicts)  # as they are now, each read once
    i, total = 0, len(rows)
    while (i := pack_rows(rows, i, MAX_BYTES, payloads, names, given, special)) < total:
        row = rows[i]
        if not isinstance(row, Mapping):
            raise TypeError(f"jobs[{i}] must be a dict, got {type(row).__name__}")
        try:
            names.append(check_job_name(row["name"]))
            data = row["data"]
            payloads.append(payload.encode(data))
            given.append(data)
        except Exception as error:
            raise _at(i, error) from None
        if len(row) != 2:
            special.append(i)
        i += 1
    jobs = NewJobs(payloads, names, data=given)
    if special:
        _take_options(jobs, rows, special, max_delay_s)
    if unique_for is not None and total and not any(jobs.ids or ()):
        raise ValueError("unique_for is only meaningful with `job_id`, which no entry has")
    return jobs


def _take_options(
    jobs: NewJobs, rows: list[Mapping[str, Any]], special: list[int], max_delay_s: int
) -> None:
    """Read the options of the rows at the indexes `special`; the core reads those in plain form."""
    total = len(rows)
    ids: list[str | None] = [None] * total
    retries: list[bytes | None] = [None] * total
    flags, due_ms = [0] * total, [0] * total
    encoded: _Encoded = {}
    ahead_ms = _most_ahead_ms(max_delay_s)
    at, count = 0, len(special)
    while at < count:
        i = special[at]
        try:
            ids[i], retries[i], flags[i], due_ms[i] = _options_of(rows[i], max_delay_s, encoded)
        except Exception as error:
            raise _at(i, error) from None
        at = read_options(rows, special, at + 1, ahead_ms, encoded, ids, retries, flags, due_ms)
    if any(retries):
        jobs.retries = retries
    if any(flags):
        jobs.ids, jobs.flags, jobs.due_ms = ids, flags, due_ms


def _options_of(
    row: Mapping[str, Any], max_delay_s: int, encoded: _Encoded
) -> tuple[str | None, bytes | None, int, int]:
    """The options of one row: id, retry, flags and due time."""
    get = row.get
    if not row.keys() <= _OPTIONS:
        unknown = next(option for option in row if option not in _OPTIONS)
        raise ValueError(f"unknown option {unknown!r}")
    if get("repeat") is not None or get("missed_fires") is not None:
        raise ValueError("repeat is not taken in bulk; call upsert_repeatable_job")
    flags = due_ms = 0
    if (delay_ms := get("delay_ms")) is not None or get("delay") is not None:
        flags, due_ms = due_of(delay_ms, get("delay"), max_delay_s)
    if (job_id := get("job_id")) is not None:
        job_id = check_job_id(job_id)
        flags |= UNIQUE
    attempts, backoff = get("attempts"), get("backoff")
    if attempts is not None and type(attempts) is not int:
        retry = retry_of(attempts, backoff)
    elif (known := encoded.get((attempts, id(backoff)))) is not None:
        retry = known[0]
    else:
        retry = retry_of(attempts, backoff)
        encoded[attempts, id(backoff)] = retry, backoff
    return job_id, retry, flags, due_ms


def refuse_unrepeated(delay_ms: object, delay: object, unique_for: object) -> None:
    """Refuse options that mean nothing for a job that repeats."""
    for name, value in (("delay_ms", delay_ms), ("delay", delay), ("unique_for", unique_for)):
        if value is not None:
            raise ValueError(
                f"{name} is not taken with `repeat`; upsert_repeatable_job has start_after_ms"
            )


def refuse_useless(missed_fires: object, unique_for: object, job_id: object) -> None:
    """Refuse options that mean nothing for a job that runs once."""
    if missed_fires is not None:
        raise ValueError(
            "missed_fires is only meaningful with `repeat`; pass "
            "repeat=RepeatPattern.cron(...) or .every(...) too"
        )
    if unique_for is not None and job_id is None:
        raise ValueError("unique_for is only meaningful with `job_id`")


def check_max_delay(value: object) -> int:
    """The longest delay of a queue, in seconds; 0 for any."""
    if value is None:
        return MAX_DELAY_S
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"max_delay_secs must be a non-negative int or None, got {shown(value)}")
    return value


def new_due(delay_ms: object, delay: object, max_delay_s: int) -> tuple[int, bool]:
    """The new due time of a delayed job, and whether it counts from now. 0 and the past are now."""
    if delay_ms is None and delay is None:
        raise ValueError("reschedule needs delay_ms or delay")
    flags, due_ms = due_of(delay_ms, delay, max_delay_s)
    return due_ms, flags == 0 or bool(flags & RELATIVE)


def due_of(delay_ms: object, delay: object, max_delay_s: int = MAX_DELAY_S) -> tuple[int, int]:
    """The flags and the due time that a delay comes to; (0, 0) for now."""
    if delay is not None:
        if delay_ms is not None:
            raise ValueError(
                "pass either delay_ms (int/float/datetime) or delay (timedelta), not both"
            )
        if not isinstance(delay, timedelta):
            raise TypeError(
                f"delay must be a datetime.timedelta; got {type(delay).__name__}"
                " (delay_ms takes milliseconds, or a datetime)"
            )
        if delay < timedelta(0):
            raise ValueError(f"delay must be non-negative, got {delay!r}")
        delay_ms = delay // timedelta(milliseconds=1)
    if delay_ms is None:
        return 0, 0
    if isinstance(delay_ms, datetime):
        return due_at(unix_ms(delay_ms), max_delay_s)
    if isinstance(delay_ms, bool) or not isinstance(delay_ms, int | float):
        raise TypeError(
            f"delay_ms must be int (ms) / float (ms) / datetime; got {type(delay_ms).__name__}"
        )
    if isinstance(delay_ms, float) and not 0 <= delay_ms < math.inf:
        raise ValueError(f"delay_ms must be a finite non-negative number, got {delay_ms}")
    if delay_ms < 0:
        raise ValueError(f"delay_ms must be non-negative, got {shown(delay_ms)}")
    ahead_ms = int(delay_ms)
    _check_ahead(ahead_ms, max_delay_s)
    return (DELAYED | RELATIVE, ahead_ms) if ahead_ms else (0, 0)


def due_at(when_ms: int, max_delay_s: int) -> tuple[int, int]:
    """The same for a moment in unix milliseconds. The past is now; the server's clock decides what
    is past."""
    _check_ahead(when_ms - time.time_ns() // 1_000_000, max_delay_s)
    return (DELAYED, when_ms) if when_ms > 0 else (0, 0)


def unix_ms(moment: datetime) -> int:
    """A naive time is UTC, as everywhere; so is one whose zone does not say how far off it is."""
    if moment.utcoffset() is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def _check_ahead(ahead_ms: int, max_delay_s: int) -> None:
    most_ms = _most_ahead_ms(max_delay_s)
    if ahead_ms > most_ms:
        limit_s = most_ms // 1000
        raise ValueError(f"delay {shown(ahead_ms // 1000)} s exceeds max_delay_secs {limit_s}")


def _most_ahead_ms(max_delay_s: int) -> int:
    return min(max_delay_s or MAX_DELAY_MS, MAX_DELAY_MS // 1000) * 1000


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def retry_of(attempts: object, backoff: BackoffLike | None) -> bytes | None:
    """The job's own limits, encoded; None where it has none."""
    if attempts is None and backoff is None:
        return None
    if attempts is not None:
        if isinstance(attempts, bool) or not isinstance(attempts, int):
            raise TypeError(f"attempts must be an int, got {type(attempts).__name__}")
        if not 1 <= attempts <= _MAX_ATTEMPTS:
            raise ValueError(f"attempts must be from 1 to {_MAX_ATTEMPTS}, got {shown(attempts)}")
    if backoff is None:
        return encode_retry(attempts)
    spec = BackoffSpec.parse(backoff)
    return encode_retry(
        attempts,
        (spec.kind, spec.delay_ms, spec.max_delay_ms, spec.multiplier, spec.jitter_ms),
    )


def _at(index: int, error: Exception) -> Exception:
    return with_place(f"jobs[{index}]", error)


def with_place(place: str, error: Exception) -> Exception:
    """The same error, with the place of the job that it is about."""
    if isinstance(error, KeyError):
        return ValueError(f"{place}: {error} is missing")
    if isinstance(error, PayloadTooLargeError):
        return PayloadTooLargeError(error.size, error.limit, f"{place}: {error.args[2]}")
    for kind in (TypeError, PayloadError, ValueError):
        if isinstance(error, kind):
            return kind(f"{place}: {error}")
    return error
