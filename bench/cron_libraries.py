"""Which cron library: measure the candidates, print markdown tables.

    python bench/cron_libraries.py                       print them
    python bench/cron_libraries.py --write docs/cron.md  put them between the markers there

Needs `croniter` (the `dev` extra).
"""

import argparse
import copy
import importlib.util
import itertools
import platform
import random
import sys
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from importlib.metadata import files, requires, version
from pathlib import Path
from zoneinfo import ZoneInfo

from croniter import croniter
from cronsim import CronSim

from chasqui.timed.cron import Cron

MARKERS = ("<!-- begin bench/cron_libraries.py -->", "<!-- end bench/cron_libraries.py -->")

#: Zones that between them change their clocks in every way: by half an hour, an hour and two, at
#: midnight, backwards in summer, around Ramadan.
ZONES = (
    "Africa/Casablanca",
    "America/New_York",
    "America/Santiago",
    "America/Sao_Paulo",
    "Antarctica/Troll",
    "Asia/Beirut",
    "Asia/Gaza",
    "Australia/Lord_Howe",
    "Europe/Dublin",
    "Europe/London",
)
AROUND = ("* * * * *", "*/20 * * * *", "30 * * * *", "30 0 * * *", "30 1 * * *", "30 2 * * *")
CALENDAR = (
    "*/5 * * * *",
    "0 2 * * *",
    "0 9 * * 1-5",
    "*/15 * * * * *",
    "0 0 1 1 *",
    "0 0 L * *",
    "0 0 13 * 5",
    "0 0 * * 1#2",
    "0 0 29 2 *",
)
Fires = Callable[[str, datetime], Iterator[datetime]]


def cronsim_fires(expression: str, start: datetime) -> Iterator[datetime]:
    return CronSim(expression, start)


def croniter_fires(expression: str, start: datetime) -> Iterator[datetime]:
    seconds_first = len(expression.split()) == 6
    each: Iterator[datetime] = croniter(
        expression, start, ret_type=datetime, second_at_beginning=seconds_first
    )
    return each


LIBRARIES: dict[str, Fires] = {"cronsim": cronsim_fires, "croniter": croniter_fires}


def transitions(zone: ZoneInfo) -> Iterator[int]:
    """The moments since 2016 at which the zone's offset changes, in unix seconds."""

    def offset(second: int) -> timedelta | None:
        return datetime.fromtimestamp(second, zone).utcoffset()

    start, end = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in (2016, 2027))
    for low, high in itertools.pairwise(range(start, end, 86400)):
        before = offset(low)
        if before != offset(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if offset(middle) == before else (low, middle)
            yield high


def around_transitions(fires: Fires) -> Counter[str]:
    """How often a library's own zone handling keeps to the rule, and how it fails to."""
    told: Counter[str] = Counter()
    for name in ZONES:
        zone = ZoneInfo(name)
        for at, expression in itertools.product(transitions(zone), AROUND):
            start, end = at - 5 * 3600, at + 5 * 3600
            cron, expected = Cron(expression, name), []
            ms = cron.next_after(start * 1000)
            while ms is not None and ms <= end * 1000:
                expected.append(ms // 1000)
                ms = cron.next_after(ms)
            found = []
            try:
                for local in fires(expression, datetime.fromtimestamp(start, zone)):
                    if local.timestamp() > end:
                        break
                    found.append(int(local.timestamp()))
            except Exception:
                told["raises"] += 1
                continue
            if found == expected:
                told["keeps the rule"] += 1
            elif any(later <= earlier for earlier, later in itertools.pairwise(found)):
                told["goes back in time"] += 1
            elif any(datetime.fromtimestamp(each, zone).fold for each in found):
                told["fires in a repeated hour again"] += 1
            else:
                told["differs behind a gap"] += 1
    return told


def same_calendar() -> list[str]:
    """The expressions whose next 10 fires, on a clock without a zone, are not the same."""
    start = datetime(2026, 1, 1)
    each = [
        {text: list(itertools.islice(fires(text, start), 10)) for text in CALENDAR}
        for fires in LIBRARIES.values()
    ]
    return [text for text in CALENDAR if each[0][text] != each[1][text]]


def microseconds(expression: str) -> list[float]:
    """The time for the next fire from a random moment, parsed before; the best of 15 rounds."""
    moment_of = random.Random(7).randrange
    moments = [datetime(2026, 1, 1) + timedelta(seconds=moment_of(366 * 86400)) for _ in range(200)]
    sim = CronSim(expression, moments[0])
    seconds_first = len(expression.split()) == 6
    it = croniter(expression, moments[0], ret_type=datetime, second_at_beginning=seconds_first)
    cron, in_zone = Cron(expression), Cron(expression, "Europe/London")
    stamps = [int(moment.replace(tzinfo=UTC).timestamp()) * 1000 for moment in moments]

    def run_cronsim() -> None:
        for moment in moments:
            each = copy.copy(sim)
            each.dt = moment
            next(each)

    def run_croniter() -> None:
        for moment in moments:
            it.get_next(start_time=moment)

    def run_chasqui() -> None:
        for stamp in stamps:
            cron.next_after(stamp)

    def run_chasqui_in_zone() -> None:
        for stamp in stamps:
            in_zone.next_after(stamp)

    runs = (run_cronsim, run_croniter, run_chasqui, run_chasqui_in_zone)
    best = [float("inf")] * len(runs)
    for _ in range(15):  # taking turns, so that a slow moment hits all alike
        for index, run in enumerate(runs):
            best[index] = min(best[index], timeit.timeit(run, number=1))
    return [seconds / len(moments) * 1e6 for seconds in best]


def health(library: str) -> tuple[str, str, int]:
    """What it depends on, whether it is typed, and its lines of code."""
    needs = ", ".join(requires(library) or ()) or "nothing"
    paths = [str(path) for path in files(library) or ()]
    spec = importlib.util.find_spec(library)
    assert spec is not None
    assert spec.origin is not None
    sources = Path(spec.origin).parent.glob("*.py")
    lines = sum(len(path.read_text().splitlines()) for path in sources)
    return needs, "yes" if any(path.endswith("py.typed") for path in paths) else "no", lines


def report() -> str:
    told = {name: around_transitions(fires) for name, fires in LIBRARIES.items()}
    kinds = sorted({kind for each in told.values() for kind in each}, key="keeps the rule".__ne__)
    facts = {name: health(name) for name in LIBRARIES}
    differing = same_calendar()
    lines = [
        f"Python {platform.python_version()} on {platform.machine()}; "
        + ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
        + ".",
        "",
        "| | " + " | ".join(LIBRARIES) + " |",
        "| --- |" + " --- |" * len(LIBRARIES),
        "| depends on | " + " | ".join(facts[name][0] for name in LIBRARIES) + " |",
        "| typed | " + " | ".join(facts[name][1] for name in LIBRARIES) + " |",
        "| lines | " + " | ".join(str(facts[name][2]) for name in LIBRARIES) + " |",
        *(
            f"| around a transition: {kind} | "
            + " | ".join(f"{told[name][kind]} of {told[name].total()}" for name in LIBRARIES)
            + " |"
            for kind in kinds
        ),
        "",
        "On a clock without a zone, their next 10 fires are the same for "
        + (f"all but {', '.join(map(repr, differing))}." if differing else "each expression below.")
        + " Microseconds for the next fire from a random moment, the expression parsed before:",
        "",
        "| expression | cronsim | croniter | chasqui, UTC | chasqui, Europe/London |",
        "| --- |" + " ---: |" * 4,
    ]
    for expression in CALENDAR:
        cells = " | ".join(f"{time:.1f}" for time in microseconds(expression))
        lines.append(f"| `{expression}` | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="put the tables between their markers"
    )
    target = parser.parse_args().write
    text = report()
    if target is None:
        print(text)
        return
    begin, end = MARKERS
    head, found, rest = target.read_text().partition(begin)
    tail = rest.partition(end)[2]
    if not found or not tail:
        sys.exit(f"{target} has no lines {begin} and {end}")
    target.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


if __name__ == "__main__":
    main()
