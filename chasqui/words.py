"""Numbers and names as log lines, errors and commands say them."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

#: How many of many are named.
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
    """Those names that somebody who wrote this one may have meant."""
    return difflib.get_close_matches(name, list(names), n=3)


def meant(names: Sequence[str]) -> str:
    """The end of a sentence: whether it is one of these; empty if there is none."""
    return f": is it {' or '.join(names)}?" if names else ""
