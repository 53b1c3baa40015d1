"""When a cron expression fires next, in any time zone.

cronsim parses the expression and walks the calendar, on a clock without a zone. This module turns
that clock's times into real time, also where a zone's clock is put forward or back. docs/cron.md
has the rule, and why we use cronsim.
"""

import copy
import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

_ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_MAX_CHARS = 1000
_FIELDS = ("second", "minute", "hour", "day-of-month", "month", "day-of-week")
_OFFSET = re.compile(r"([+-])([01]\d|2[0-3]):?([0-5]\d)", re.ASCII)
# Names in a system's zone folder that are not IANA's: they mean something else on other machines.
_NOT_IANA = ("localtime", "posixrules", "posix", "right")
_EPOCH = datetime(1970, 1, 1)
_SECOND = timedelta(seconds=1)


class Cron:
    """The fire times of a cron expression in a time zone.

    The expression has 5 fields, or 6 with leading seconds, or is an alias such as `@hourly`. `tz`
    is None or "UTC" or "Z", an offset such as "+05:30" or "-0800", or an IANA name.
    Raises ValueError if the expression cannot be read or never fires.
    """

    __slots__ = ("_catches_up", "_sim", "_zone", "expression", "tz")

    def __init__(self, expression: str, tz: str | None = None) -> None:
        self.expression = expression
        self.tz = tz
        self._zone = _read_zone(tz)
        fields = _split(expression)
        self._sim = _read_fields(expression, fields)
        if self._next_local(datetime(2000, 1, 1)) is None:
            raise ValueError(f"cron expression {expression!r} never fires")
        # As in Debian's cron, `*` in a time field means an interval. An interval fires again soon
        # after a gap; a time of day that the gap skips would not fire before the next day.
        self._catches_up = not any(field.startswith("*") for field in fields[:3])

    def __repr__(self) -> str:
        return f"Cron({self.expression!r}, {self.tz!r})"

    def next_after(self, unix_ms: int) -> int | None:
        """The first fire later than `unix_ms`, in unix ms: a whole second.

        None if there is none within fifty years, or before the year 10000.
        """
        try:
            second = self._next_second(unix_ms // 1000)
        except (OSError, OverflowError, ValueError):  # datetime ends with the year 9999
            return None
        return None if second is None else second * 1000

    def _next_second(self, second: int) -> int | None:
        zone = self._zone
        if not isinstance(zone, ZoneInfo):
            offset = _offset(second, zone)
            found = self._next_local(_EPOCH + timedelta(seconds=second + offset))
            return None if found is None else _seconds(found) - offset

        now = datetime.fromtimestamp(second, zone)
        local = now.replace(tzinfo=None, fold=0)
        if now.fold:
            # The clock was put back: this local time comes for the second time, and all up to the
            # end of the repetition have fired already.
            before = _seconds(local) - _local_offset(local, zone)
            transition = _transition(zone, before, second)
            local = _EPOCH + timedelta(seconds=transition + _offset(before, zone) - 1)
        while (found := self._next_local(local)) is not None:
            # For a local time that comes twice, this is the earlier one.
            second = _seconds(found) - _local_offset(found, zone)
            offset = _offset(second, zone)
            if _seconds(found) == second + offset:
                return second
            # The gap skips this local time: `second` is as far behind the gap as `found` is inside
            # it, and with the new offset `found` comes before the gap.
            transition = _transition(zone, _seconds(found) - offset, second)
            if self._catches_up:
                return transition
            local = _EPOCH + timedelta(seconds=transition + offset - 1)
        return None

    def _next_local(self, after: datetime) -> datetime | None:
        # A copy, so that threads may share a Cron; parsing again would cost far more.
        sim = copy.copy(self._sim)
        sim.dt = after
        return next(sim, None)


def _read_zone(tz: str | None) -> tzinfo:
    """The zone that `tz` names."""
    name = "" if tz is None else tz.strip()
    if name in ("", "Z") or name.upper() == "UTC":
        return UTC
    if offset := _OFFSET.fullmatch(name):
        sign, hours, minutes = offset.groups()
        east = timedelta(hours=int(hours), minutes=int(minutes))
        return timezone(east if sign == "+" else -east)
    try:
        if name.split("/")[0] not in _NOT_IANA:
            return ZoneInfo(name)
    # What zoneinfo raises depends on where in its folders the name points.
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    raise ValueError(
        f"unknown tz {tz!r}: expected UTC, an offset such as +05:30, "
        'or an IANA name such as "America/New_York"'
    )


def _split(expression: str) -> list[str]:
    """The six fields of an expression."""
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"cron expression takes more than {_MAX_CHARS} characters")
    fields = _ALIASES.get(expression.strip().lower(), expression).split()
    if len(fields) == 5:
        return ["0", *fields]
    if len(fields) == 6:
        return fields
    if len(fields) == 1 and fields[0].startswith("@"):
        known = ", ".join(_ALIASES)
        raise ValueError(f"cron expression {expression!r}: unknown alias, expected one of {known}")
    years = "; years are not supported" if len(fields) == 7 else ""
    raise ValueError(
        f"cron expression {expression!r} has {len(fields)} fields, "
        f"expected 5, or 6 with leading seconds{years}"
    )


def _read_fields(expression: str, fields: list[str]) -> CronSim:
    """The expression, parsed by cronsim."""
    try:
        return CronSim(" ".join(fields), _EPOCH)
    except (CronSimError, ValueError):
        pass
    # Trying each field alone shows which one is bad.
    for index, name in enumerate(_FIELDS):
        alone = ["*"] * 6
        alone[index] = fields[index]
        try:
            CronSim(" ".join(alone), _EPOCH)
        except (CronSimError, ValueError):
            raise ValueError(
                f"cron expression {expression!r}: bad {name} {fields[index]!r}"
            ) from None
    raise ValueError(
        f"cron expression {expression!r} never fires: "
        f"no day-of-month {fields[3]!r} in month {fields[4]!r}"
    )


def _seconds(local: datetime) -> int:
    """Seconds since 1970 on a clock without a zone."""
    return (local - _EPOCH) // _SECOND


def _offset(second: int, zone: tzinfo) -> int:
    """By how many seconds the zone's clock is ahead of UTC at an instant."""
    return _seconds(datetime.fromtimestamp(second, zone).replace(tzinfo=None)) - second


def _local_offset(local: datetime, zone: ZoneInfo) -> int:
    """The same at a local time; near a transition, the offset from before it."""
    offset = zone.utcoffset(local)
    assert offset is not None
    return offset // _SECOND


def _transition(zone: ZoneInfo, before: int, after: int) -> int:
    """The first instant later than `before` at which the zone's offset is that of `after`."""
    offset = _offset(after, zone)
    while after - before > 1:
        middle = (before + after) // 2
        if _offset(middle, zone) == offset:
            after = middle
        else:
            before = middle
    return after
