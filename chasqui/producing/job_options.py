"""What a caller says about jobs, checked and turned into a batch. Nothing is sent from here.

Errors name the argument, and in bulk the index of the entry: one bad entry, and nothing is sent.
"""

import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Required, TypeAlias, TypedDict

from chasqui import payload
from chasqui._core.backoff import MAX_DELAY_MS
from chasqui._core.envelope import encode_retry
from chasqui._core.options import DELAYED, RELATIVE, UNIQUE, read_options
from chasqui._core.payload import pack_rows
from chasqui.adding import Batch
from chasqui.errors import PayloadError, PayloadTooLargeError
from chasqui.model.job import BackoffSpec, MissedFiresPolicy, RepeatPattern
from chasqui.model.keys import check_job_id, check_job_name, shown

#: The longest delay that is taken unless the queue says otherwise; 0 takes any.
MAX_DELAY_S: Final = 30 * 86_400

BackoffLike: TypeAlias = BackoffSpec | int | Mapping[str, Any]
DelayMsLike: TypeAlias = int | float | datetime
RepeatLike: TypeAlias = RepeatPattern | Mapping[str, Any]
MissedFiresLike: TypeAlias = MissedFiresPolicy | Mapping[str, Any]

#: What was encoded before, by the attempts and the address of what says the backoff; that is kept
#: with it, so that no other gets its address.
_Encoded: TypeAlias = dict[tuple[int | None, int], tuple[bytes | None, object]]

_MAX_ATTEMPTS = 2**32 - 1
_MAX_BYTES = payload.MAX_BYTES - payload.ENVELOPE_ROOM

_OPTIONS = frozenset(
    ("name", "data", "delay_ms", "delay", "attempts", "backoff", "job_id", "repeat", "missed_fires")
)


class JobEntry(TypedDict, total=False):
    """One entry of `add_bulk`: name and data, and options of `add`."""

    name: Required[str]
    data: Required[Any]
    delay_ms: DelayMsLike | None
    delay: timedelta | None
    attempts: int | None
    backoff: BackoffLike | None
    job_id: str | None


def single(
    name: str,
    data: object,
    *,
    delay_ms: DelayMsLike | None = None,
    delay: timedelta | None = None,
    attempts: int | None = None,
    backoff: BackoffLike | None = None,
    job_id: str | None = None,
    max_delay_s: int = MAX_DELAY_S,
) -> Batch:
    """A batch of one job."""
    name = check_job_name(name)
    kind, due = due_of(delay_ms, delay, max_delay_s)
    if job_id is not None:
        job_id = check_job_id(job_id)
        kind |= UNIQUE
    retry = retry_of(attempts, backoff)
    encoded = payload.encode(data)
    return Batch(
        [encoded],
        name,
        None if job_id is None else [job_id],
        None if retry is None else [retry],
        [kind] if kind else None,
        [due] if kind else None,
        [data],
    )


def bulk(
    entries: Sequence[Mapping[str, Any]],
    max_delay_s: int = MAX_DELAY_S,
    *,
    unique_for: float | None = None,
) -> Batch:
    """A batch of many jobs; only those with options cost more than their payload."""
    if type(entries) is not list and (
        isinstance(entries, Mapping | str | bytes) or not isinstance(entries, Sequence)
    ):
        raise TypeError(f"jobs must be a list of dicts, got {type(entries).__name__}")
    payloads: list[bytes] = []
    names: list[str] = []
    given: list[Any] = []
    special: list[int] = []
    entries = list(entries)  # as they are now, each read once
    i, total = 0, len(entries)
    while (i := pack_rows(entries, i, _MAX_BYTES, payloads, names, given, special)) < total:
        entry = entries[i]
        if not isinstance(entry, Mapping):
            raise TypeError(f"jobs[{i}] must be a dict, got {type(entry).__name__}")
        try:
            names.append(check_job_name(entry["name"]))
            data = entry["data"]
            payloads.append(payload.encode(data))
            given.append(data)
        except Exception as error:
            raise _at(i, error) from None
        if len(entry) != 2:
            special.append(i)
        i += 1
    batch = Batch(payloads, names, data=given)
    if special:
        _take_options(batch, entries, special, max_delay_s)
    if unique_for is not None and total and not any(batch.ids or ()):
        raise ValueError("unique_for is only meaningful with `job_id`, which no entry has")
    return batch


def _take_options(
    batch: Batch, entries: list[Mapping[str, Any]], special: list[int], max_delay_s: int
) -> None:
    total = len(batch.payloads)
    ids: list[str | None] = [None] * total
    retries: list[bytes | None] = [None] * total
    kinds, dues = [0] * total, [0] * total
    encoded: _Encoded = {}
    ahead_ms = _most_ahead_ms(max_delay_s)
    at, count = 0, len(special)
    while at < count:
        i = special[at]
        try:
            ids[i], retries[i], kinds[i], dues[i] = _options_of(entries[i], max_delay_s, encoded)
        except Exception as error:
            raise _at(i, error) from None
        at = read_options(entries, special, at + 1, ahead_ms, encoded, ids, retries, kinds, dues)
    if any(retries):
        batch.retries = retries
    if any(kinds):
        batch.ids, batch.kinds, batch.dues = ids, kinds, dues


def _options_of(
    entry: Mapping[str, Any],
    max_delay_s: int,
    encoded: _Encoded,
) -> tuple[str | None, bytes | None, int, int]:
    """What one entry says: id, retry, kind and due time."""
    get = entry.get
    if not entry.keys() <= _OPTIONS:
        unknown = next(option for option in entry if option not in _OPTIONS)
        raise ValueError(f"unknown option {unknown!r}")
    if get("repeat") is not None or get("missed_fires") is not None:
        raise ValueError("repeat is not taken in bulk; call upsert_repeatable_job")
    kind = due = 0
    if (delay_ms := get("delay_ms")) is not None or get("delay") is not None:
        kind, due = due_of(delay_ms, get("delay"), max_delay_s)
    if (job_id := get("job_id")) is not None:
        job_id = check_job_id(job_id)
        kind |= UNIQUE
    attempts, backoff = get("attempts"), get("backoff")
    if attempts is not None and type(attempts) is not int:
        retry = retry_of(attempts, backoff)
    elif (known := encoded.get((attempts, id(backoff)))) is not None:
        retry = known[0]
    else:
        retry = retry_of(attempts, backoff)
        encoded[attempts, id(backoff)] = retry, backoff
    return job_id, retry, kind, due


def refuse_unrepeated(delay_ms: object, delay: object, unique_for: object) -> None:
    """Refuse what says nothing about a job that repeats."""
    for name, value in (("delay_ms", delay_ms), ("delay", delay), ("unique_for", unique_for)):
        if value is not None:
            raise ValueError(
                f"{name} is not taken with `repeat`; upsert_repeatable_job has start_after_ms"
            )


def refuse_useless(missed_fires: object, unique_for: object, job_id: object) -> None:
    """Refuse what says nothing about a job that runs once."""
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
    kind, due = due_of(delay_ms, delay, max_delay_s)
    return due, kind == 0 or bool(kind & RELATIVE)


def due_of(delay_ms: object, delay: object, max_delay_s: int = MAX_DELAY_S) -> tuple[int, int]:
    """What a delay means: the job's kind and its due time; (0, 0) for now."""
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
    """The same for a moment in unix milliseconds. The past is now; what is past, the server's clock
    decides."""
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
    """The same error, saying which entry it is about."""
    if isinstance(error, KeyError):
        return ValueError(f"jobs[{index}]: {error} is missing")
    if isinstance(error, TypeError):
        return TypeError(f"jobs[{index}]: {error}")
    if isinstance(error, PayloadTooLargeError):
        return PayloadTooLargeError(error.size, error.limit, f"jobs[{index}]: {error.args[2]}")
    if isinstance(error, PayloadError):
        return PayloadError(f"jobs[{index}]: {error}")
    if isinstance(error, ValueError):
        return ValueError(f"jobs[{index}]: {error}")
    return error
