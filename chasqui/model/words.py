"""Numbers and names in the words of log lines, errors and commands."""

from collections.abc import Iterable, Sequence
from typing import Final

#: How many names of a long list are shown.
NAMED: Final = 5


def count(number: int, what: str) -> str:
    """`1 job`, `2 jobs`, `3 entries`, `4 keys`."""
    if number == 1:
        return f"1 {what}"
    return f"{number:,} {what[:-1] + 'ies' if what.endswith('ry') else what + 's'}"


def some(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more:,} more" if more > 0 else "")


def near(name: str, names: Iterable[str]) -> list[str]:
    """The names that a mistyped one may stand for."""
    import difflib  # here: only errors need it

    return difflib.get_close_matches(name, list(names), n=3)


def meant(names: Sequence[str]) -> str:
    """The end of a sentence that asks whether it is one of these; empty if there is none."""
    return f": is it {' or '.join(names)}?" if names else ""


def duration(us: float) -> str:
    """`850 µs`, `7.9 ms`, `46 ms`, `2.5 s`, `1m 44s`, `3h 20m`, `2d 5h`."""
    seconds = us / 1_000_000
    if us < 999.5:
        return f"{us:.0f} µs"
    if us < 999_500:
        return f"{_short(us / 1000)} ms"
    if seconds < 59.5:
        return f"{_short(seconds)} s"
    if seconds < 3599.5:
        return _pair(round(seconds), 60, "ms")
    if seconds < 86_370:
        return _pair(round(seconds / 60), 60, "hm")
    return _pair(round(seconds / 3600), 24, "dh")


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}".removesuffix(".0")


def _pair(value: int, size: int, units: str) -> str:
    large, small = divmod(value, size)
    return f"{large}{units[0]}" + (f" {small}{units[1]}" if small else "")
