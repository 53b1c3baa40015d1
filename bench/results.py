"""What was measured: rows of raw.jsonl, and the questions that a report asks of them."""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Value:
    """A number with the range it was seen in."""

    best: float
    low: float
    high: float


class Results:
    """Every row of one run, or of several that were added to it."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.every = every = list(rows)
        #: When and of what each run was, the last one first.
        self.stretches: list[Row] = [row["run"] for row in reversed(every) if "run" in row]
        self.about: Row = self.stretches[0] if self.stretches else {}
        self.rows = [row for row in every if "scenario" in row]
        self.installs = [row for row in every if "install_error" in row]

    @classmethod
    def load(cls, path: Path) -> "Results":
        return cls(json.loads(line) for line in path.read_text().splitlines())

    def runs(self, library: str, scenario: str, field: str = "n") -> list[Row]:
        """The runs that count: those that others did not spoil, or all if there is none."""
        found = [
            row
            for row in self.rows
            if row["library"] == library and row["scenario"] == scenario and field in row
            if "error" not in row
        ]
        return [row for row in found if not row.get("spoiled")] or found

    def value(
        self, library: str, scenario: str, field: str, *, lowest: bool = False
    ) -> Value | None:
        """The best of a field over the rounds, and its range."""
        seen = [row[field] for row in self.runs(library, scenario, field)]
        if not seen:
            return None
        return Value(min(seen) if lowest else max(seen), min(seen), max(seen))

    def ratio(self, scenario: str, field: str, over: str, *, lowest: bool = False) -> Value | None:
        """Our best over another's best; the range is of the ratios within a round."""
        ours = self.value("chasqui", scenario, field, lowest=lowest)
        theirs = self.value(over, scenario, field, lowest=lowest)
        if ours is None or theirs is None or not theirs.best:
            return None
        best = ours.best / theirs.best
        other = {row["round"]: row[field] for row in self.runs(over, scenario, field)}
        each = [
            row[field] / other[row["round"]]
            for row in self.runs("chasqui", scenario, field)
            if other.get(row["round"])
        ] or [best]
        return Value(best, min(best, *each), max(best, *each))

    def problem(self, library: str, scenario: str) -> str | None:
        """Why there is no value: what the library cannot do, or what went wrong."""
        for row in self.rows:
            if row["library"] == library and row["scenario"] == scenario:
                if "unsupported" in row:
                    return str(row["unsupported"])
                if "error" in row and not self.runs(library, scenario):
                    return f"failed: {row['error']}"
        return None

    def libraries(self) -> list[str]:
        """Every library with a row, in the order of their first."""
        return list(dict.fromkeys(row["library"] for row in self.rows))

    def scenarios(self) -> list[str]:
        return list(dict.fromkeys(row["scenario"] for row in self.rows))

    def packages(self) -> dict[str, str]:
        """The versions that took part."""
        found: dict[str, str] = {}
        for row in self.every:
            found.update(row.get("packages", {}))
        return dict(sorted(found.items()))

    def median(self, library: str, scenario: str, field: str) -> float | None:
        seen = [row[field] for row in self.runs(library, scenario, field)]
        return statistics.median(seen) if seen else None


def first(rows: Iterable[Row], key: Callable[[Row], Any]) -> Row | None:
    """The row with the lowest key; None if there is none."""
    return min(rows, key=key, default=None)
