"""Values as Redis gives them, to Arrow arrays. What does not fit costs itself, not its column."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

#: The last moment that Python can show; beyond it a time is taken for damaged.
MAX_MS: Final = 253_402_300_799_999


def texts(values: Sequence[bytes | str | None]) -> Any:
    """Text out of UTF-8 bytes; what is no UTF-8 gets replacement characters."""
    try:
        return pa.array(values, pa.string())
    except pa.ArrowInvalid:
        return pa.array(
            [one.decode(errors="replace") if isinstance(one, bytes) else one for one in values],
            pa.string(),
        )


def integers(values: Sequence[bytes | None], kind: Any) -> Any:
    """Numbers out of decimals; what is none becomes null."""
    try:
        return pa.array(values, pa.string()).cast(kind)
    except pa.ArrowInvalid:
        return pa.array([_number(one, kind) for one in values], kind)


def _number(value: bytes | None, kind: Any) -> int | None:
    most = 2**31 if kind == pa.int32() else 2**63
    try:
        number = int(value) if value is not None else None
    except ValueError:
        return None
    return number if number is not None and -most <= number < most else None


def moments(values_ms: Iterable[int | None], kind: Any) -> Any:
    """Times out of unix milliseconds."""
    return pa.array(
        [None if ms is None or not 0 <= ms <= MAX_MS else ms * 1000 for ms in values_ms], kind
    )


def moments_of_ids(ids: Sequence[bytes], kind: Any) -> Any:
    """The times in stream ids."""
    dash = ids[0].find(b"-") if ids else -1
    if dash > 0 and ids[-1].find(b"-") == dash:
        # Ids rise, so all between two with times of one length have times of that length.
        times = pc.utf8_slice_codeunits(pa.array(ids, pa.string()), 0, dash).cast(pa.int64())
        if times[-1].as_py() <= MAX_MS:
            return pc.multiply(times, 1000).cast(kind)
    return moments((int(one.partition(b"-")[0]) for one in ids), kind)


_ULID_VALUES: Any = np.full(256, -1, np.int64)
for _value, _char in enumerate(b"0123456789ABCDEFGHJKMNPQRSTVWXYZ"):
    _ULID_VALUES[_char] = _value
    _ULID_VALUES[ord(chr(_char).lower())] = _value
_ULID_WEIGHTS: Any = 32 ** np.arange(9, -1, -1, dtype=np.int64)


def moments_of_ulids(ids: Sequence[bytes | None], kind: Any) -> Any:
    """When jobs were created, from ids that are ULIDs; null for other ids."""
    # What is no ULID for its length stands in as one that is none for its letters.
    even = [one if one is not None and len(one) == 26 else _NO_ULID for one in ids]
    digits = _ULID_VALUES[np.frombuffer(b"".join(even), np.uint8).reshape(-1, 26)]
    times = digits[:, :10] @ _ULID_WEIGHTS
    is_none = (digits.min(axis=1) < 0) | (times > MAX_MS)
    return pa.array(np.where(is_none, 0, times * 1000), pa.int64(), mask=is_none).cast(kind)


_NO_ULID = b"-" * 26
