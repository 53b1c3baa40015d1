"""Says what a run found: the targets, then each scenario's table, then what did not run."""

from bench.document import Block, Heading, Image, Table, Text
from bench.libraries import LIBRARIES
from bench.lines import all_checks
from bench.results import Results, Value
from bench.scenarios import SCENARIOS

RATES = ("n", "rate", "client_cpu_per_100k", "server_cpu_per_100k", "rss_mb")


def blocks(results: Results, images: dict[str, str]) -> list[Block]:
    """The whole report; `images` are those that were drawn, by name."""
    found: list[Block] = [Heading("Benchmark", 1), *machine(results)]
    found += [Heading("Targets"), *targets(results)]
    if "overview" in images:
        found.append(Image("Ours against each library", images["overview"]))
    for scenario in SCENARIOS:
        rows = table_of(results, scenario.name)
        if rows is None:
            continue
        found += [Heading(f"{scenario.line}. {scenario.title}"), rows]
        if scenario.name in images:
            found.append(Image(scenario.title, images[scenario.name]))
    found += growth(results, images)
    found += troubles(results)
    return found


def machine(results: Results) -> list[Block]:
    about = results.about
    servers = ", ".join(sorted({row["server"] for row in results.rows if "server" in row}))
    options = about["options"]
    changed = " with changes that are not committed" if about["changed"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in results.packages().items())
    return [
        Text(
            f"Commit `{about['commit']}`{changed}, {about['at']}. {about['processor']}, "
            f"{about['cores']} cores shared by client and server, {about['memory_gb']} GB, "
            f"{about['system']}. {servers}, nothing on disk. Python {about['python']}, "
            f"Node {about['node'] or 'none'}. {options['rounds']} rounds, seed {options['seed']}"
            + (f", a {options['fraction']}th of the jobs." if options["fraction"] > 1 else ".")
        ),
        Text(f"Versions: {packages}."),
        *stretches(results),
    ]


def stretches(results: Results) -> list[Block]:
    """Where it was measured in more than one go: each of them."""
    if len(results.stretches) < 2:
        return []
    each = ", ".join(
        f"`{about['commit']}` at {about['at'][:16]} ({about['options']['rounds']} rounds)"
        for about in reversed(results.stretches)
    )
    count = len(results.stretches)
    return [Text(f"Measured in {count} goes, each with a header of its own in the rows: {each}.")]


def targets(results: Results) -> list[Block]:
    """PASS or SHORT for every number that is owed."""
    rows = []
    for check in all_checks():
        found = check.value(results)
        sign = "≤" if check.is_most else "≥"
        rows.append(
            [
                str(check.line),
                check.scenario,
                check.what,
                f"{sign} {check.target:g}{check.unit}",
                "" if found is None else f"{amount(found.best)}{check.unit}",
                "" if found is None else spread(found),
                check.verdict(results),
            ]
        )
    head = ["line", "scenario", "what", "owed", "found", "spread", "verdict"]
    counts = [row[-1] for row in rows]
    summary = ", ".join(f"{counts.count(word)} {word}" for word in dict.fromkeys(counts))
    return [Text(f"{summary}."), Table(head, rows, 3)]


def table_of(results: Results, scenario: str) -> Table | None:
    """One scenario: a row per library, the fastest first."""
    rows = [row for row in results.rows if row["scenario"] == scenario]
    if not rows:
        return None
    names = list(dict.fromkeys(row["library"] for row in rows))
    shapes = {
        "latency": delays_row,
        "lateness": delays_row,
        "idle": idle_row,
        "delayed": delayed_row,
    }
    head, row_of, key, lowest = {
        delays_row: (DELAYS_HEAD, delays_row, "p50_ms", True),
        idle_row: (IDLE_HEAD, idle_row, "cpu_percent", True),
        delayed_row: (DELAYED_HEAD, delayed_row, "rate", False),
        rate_row: (RATE_HEAD, rate_row, "rate", False),
    }[shapes.get(scenario, rate_row)]

    def order(name: str) -> float:
        value = results.value(name, scenario, key, lowest=lowest)
        return float("inf") if value is None else value.best if lowest else -value.best

    lines = []
    for name in sorted(names, key=order):
        title = LIBRARIES[name].title
        if not results.runs(name, scenario, key):
            reason = results.problem(name, scenario) or "no result"
            lines.append([title, f"*{reason}*"] + [""] * (len(head) - 2))
        else:
            lines.append([title, *row_of(results, name, scenario)])
    return Table(head, lines)


RATE_HEAD = [
    *("library", "jobs/s", "spread", "chasqui over it", "client CPU s/100k"),
    *("server CPU s/100k", "RSS MB", "jobs", "runs"),
]
DELAYS_HEAD = ["library", "p50 ms", "p90 ms", "p99 ms", "max ms", "early", "runs"]
IDLE_HEAD = ["library", "CPU %", "server CPU %", "commands/s", "RSS MB"]
DELAYED_HEAD = [
    *("library", "scheduled/s", "run/s once due", "first after ms", "client CPU s/100k"),
    *("early", "jobs", "runs"),
]


def rate_row(results: Results, library: str, scenario: str) -> list[str]:
    rate = results.value(library, scenario, "rate")
    assert rate is not None
    runs = results.runs(library, scenario)
    over = results.ratio(scenario, "rate", library)
    cells = [f"{rate.best:,.0f}", spread(rate), "" if over is None else f"{over.best:.1f}x"]
    for field in ("client_cpu_per_100k", "server_cpu_per_100k", "rss_mb"):
        value = results.value(library, scenario, field, lowest=True)
        cells.append("" if value is None else amount(value.best))
    return [*cells, f"{runs[-1]['n']:,}", str(len(runs))]


def delays_row(results: Results, library: str, scenario: str) -> list[str]:
    runs = results.runs(library, scenario, "p50_ms")
    cells = []
    for field in ("p50_ms", "p90_ms", "p99_ms", "max_ms"):
        value = results.value(library, scenario, field, lowest=True)
        cells.append("" if value is None else amount(value.best))
    return [*cells, str(max(row["early"] for row in runs)), str(len(runs))]


def idle_row(results: Results, library: str, scenario: str) -> list[str]:
    fields = ("cpu_percent", "server_cpu_percent", "commands_per_s", "rss_mb")
    values = [results.value(library, scenario, field, lowest=True) for field in fields]
    return ["" if value is None else amount(value.best) for value in values]


def delayed_row(results: Results, library: str, scenario: str) -> list[str]:
    runs = results.runs(library, scenario, "rate")
    cells = []
    for field in ("schedule_rate", "rate"):
        value = results.value(library, scenario, field)
        cells.append("" if value is None else f"{value.best:,.0f}")
    for field in ("first_after_ms", "client_cpu_per_100k"):
        value = results.value(library, scenario, field, lowest=True)
        cells.append("" if value is None else amount(value.best))
    return [*cells, str(max(row["early"] for row in runs)), f"{runs[-1]['n']:,}", str(len(runs))]


def growth(results: Results, images: dict[str, str]) -> list[Block]:
    """How our cost per job grows with their number and with their size."""
    found: list[Block] = []
    for varies, title in (("jobs", "number of jobs"), ("bytes", "bytes of payload")):
        rows = [row for row in results.rows if row.get("varies") == varies]
        if not rows:
            continue
        values = sorted({row["at"] for row in rows})
        ways = list(dict.fromkeys(row["scenario"].split()[0] for row in rows))
        lines = []
        for way in ways:
            cells = []
            for at in values:
                rate = results.value("chasqui", f"{way} {varies}={at}", "rate")
                cells.append("" if rate is None else f"{1e6 / rate.best:.2f}")
            lines.append([way, *cells])
        found += [
            Heading(f"Microseconds a job, by {title}"),
            Table(["scenario", *(f"{value:,}" for value in values)], lines),
        ]
        if f"growth_{varies}" in images:
            found.append(Image(f"Cost by {title}", images[f"growth_{varies}"]))
    return found


def troubles(results: Results) -> list[Block]:
    """What did not install, what failed, and what others spoiled."""
    lines = []
    for row in results.installs:
        lines.append(f"- {row['library']} did not install: {row['install_error']}")
    for row in results.rows:
        if "error" in row:
            lines.append(f"- {row['scenario']}, {row['library']}: {row['error']}")
        elif row.get("more_than_once"):
            count = row["more_than_once"]
            lines.append(f"- {row['scenario']}, {row['library']}: {count} jobs ran more than once")
        elif row.get("exit"):
            lines.append(f"- {row['scenario']}, {row['library']}: it ended with {row['exit']}")
    spoiled = sum(bool(row.get("spoiled")) for row in results.rows)
    lines.append(
        f"- {spoiled} of {len(results.rows)} measurements were spoiled by other processes; they "
        "count only where every run of their kind was."
    )
    return [Heading("What did not go well"), Text("\n".join(dict.fromkeys(lines)))]


def amount(number: float) -> str:
    """A number at the precision that it deserves."""
    if abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"


def spread(value: Value) -> str:
    return f"{amount(value.low)} to {amount(value.high)}"
