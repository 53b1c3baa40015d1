"""`python -m tests.chaos --report`: puts what was measured into docs/reliability.md.

What stands between `<!-- NAME: generated -->` and `<!-- end -->` comes from the results in
tests/chaos/results and tests/faults; the rest of the page is written by hand.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "reliability.md"
FAULTS = ROOT / "tests" / "faults" / "results.json"
SERVERS = ("redis-8.6", "redis-6.2", "valkey-9")

_SECTION = re.compile(r"(<!-- (\w+): generated -->\n).*?(<!-- end -->)", re.DOTALL)


def write() -> None:
    """Bring the page up to date."""
    PAGE.write_text(render(PAGE.read_text()))


def render(page: str) -> str:
    """The page with every generated section made anew."""
    return _SECTION.sub(lambda found: found[1] + SECTIONS[found[2]]() + found[3], page)


# ── Chaos ───────────────────────────────────────────────────────────────────────────────────────


def chaos() -> str:
    """One row for each run."""
    rows = []
    for told in _runs("chaos-"):
        rows.append(
            [
                f"{told['server']} ({told['versions']['server']})",
                str(told["seed"]),
                f"{told['jobs']:,}",
                f"{sum(told['faults'].values())} of {len(told['faults'])} kinds",
                *_verdict(told),
                f"{told['extra_runs']:,} of {told['extra_bound']:,}",
                f"{told['overlapping']:,}",
                f"{told['refused']:,}",
                f"{told['unknown']:,}, {told['recovered']:,}",
                _times(told["taken_over_s"]),
                _times(told["resumed_s"]),
                f"{_most(told, 'rss_mb')} MB, {_most(told, 'fds')} files",
            ]
        )
    head = ["server", "seed", "jobs", "faults", "lost", "unexpected", "stuck", "without cause",
            "extra runs of those allowed", "at once in two", "adds refused",
            "of unknown fate, and recovered", "begun elsewhere, p50 / p99 / max",
            "next job done, p50 / p99 / max", "worker, start → end"]  # fmt: skip
    return _table(head, rows)


def kinds() -> str:
    """How often each kind of fault struck in all runs of the table above."""
    runs = _runs("chaos-")
    names = sorted({kind for told in runs for kind in told["faults"]})
    rows = [[name, str(sum(told["faults"].get(name, 0) for told in runs))] for name in names]
    return _table(["fault", "times"], rows)


def commands() -> str:
    """What repeats each run."""
    prefixes = ("chaos-", "peer-", "figure-", "soak-")
    runs = [told for prefix in prefixes for told in _runs(prefix)]
    runs += [_result(word) for word in WORDS if (RESULTS / f"{word}.json").exists()]
    lines = [_command(told) for told in [*runs, *_runs_by_server()]]
    fuzzed: dict[str, list[str]] = {}
    for one in (_read(RESULTS / "fuzz.json") or {}).values():
        command, _, only = one["command"].partition(" --only ")
        fuzzed.setdefault(command, []).append(only)
    lines += [" --only ".join([command, *targets]) for command, targets in fuzzed.items()]
    return "\n" + "\n".join(f"    {line}" for line in lines) + "\n\n"


def peers() -> str:
    """One row for each queue and settings, ours first, and a list of what the settings are."""
    head = ["queue", "settings", "takes over after", "confirmed", "not confirmed", "faults", "lost",
            "unexpected", "stuck", "extra runs", "at once in two", "workers that ended",
            "begun elsewhere, p50 / p99 / max", "next job done, p50 / p99 / max",
            "worker, start → end", "took"]  # fmt: skip
    rows, notes = [], []
    for told in sorted(_runs("peer-"), key=_place):
        if "missing" in told:
            told_why = [told["title"], told["settings"], "not measured: " + told["missing"]]
            rows.append(told_why + [""] * (len(head) - len(told_why)))
            continue
        versions = {k: v for k, v in told["versions"].items() if k != "server"}
        rows.append(
            [
                f"{told['title']} {', '.join(versions.values())}",
                told["settings"],
                f"{told['recovers_s']:g} s",
                f"{told['confirmed']:,}",
                f"{told['unknown'] + told['refused']:,}",
                f"{sum(told['faults'].values())} of {len(told['faults'])} kinds",
                str(told["lost"]),
                str(told["unexpected"]),
                f"{told['stuck']:,}{_waiting(told)}",
                f"{told['extra_runs']:,}",
                f"{told['overlapping']:,}",
                str(told["deaths"]),
                _times(told["taken_over_s"]),
                _times(told["resumed_s"]),
                f"{_most(told, 'rss_mb')} MB, {_most(told, 'fds')} files",
                f"{told['seconds']:.0f} s",
            ]
        )
        notes.append(f"- {told['title']}, {told['settings']}: {told['setup']}")
    return _table(head, rows) + "\n".join(notes) + "\n\n"


# ── Durability, faults, figures ─────────────────────────────────────────────────────────────────


def durability() -> str:
    """What crashes cost, by the server's settings."""
    told = _read(RESULTS / "durability.json")
    rows = []
    for server, modes in (told or {}).items():
        for mode, crashes in modes.items():
            row = [server, mode]
            for crash in ("kill -9", "power cut"):
                cell = crashes[crash]
                if "missing" in cell:
                    row += ["not there", ""]
                    continue
                within = f", the last {cell['window_s']} s" if cell["lost"] else ""
                row += [f"{cell['lost']:,} of {cell['confirmed']:,}{within}",
                        f"{cell['back']:,} of {cell['done']:,}"]  # fmt: skip
            rows.append(row)
    head = [
        "server",
        "settings",
        "lost by kill -9",
        "run again",
        "lost by a power cut",
        "run again",
    ]
    return _table(head, rows)


def faults() -> str:
    """Each fault of the catalogue on each server."""
    told = _read(FAULTS)
    if told is None:
        return "\nThe catalogue has not been run: `make faults`.\n\n"
    at = told.pop("commit", "")
    servers = [name for name in (*SERVERS, *sorted(set(told) - set(SERVERS))) if name in told]
    rows = [
        [str(number), entry.title, entry.right]
        + [told[server].get(str(number), "").partition(":")[0] for server in servers]
        for number, entry in CATALOGUE.items()
    ]
    run = f"Run at {at}." if at else "At which commit it was run was not kept."
    return _table(["#", "fault", "what is right", *servers], rows) + f"{run}\n\n"


def figures() -> str:
    """The figures that are owed, each with what was found."""
    rows = []
    for figure in _read(RESULTS / "figures.json") or ():
        try:
            found = figure.get("found") or FOUND[figure["id"]]()
        except FileNotFoundError:
            found = "not measured yet"
        rows.append([figure["id"], figure["owed"], figure["state"], found, figure["shown_by"]])
    return _table(["", "owed", "", "found", "shown by"], rows)


def _found_chaos() -> str:
    runs = _runs("chaos-")
    jobs, struck = sum(r["jobs"] for r in runs), sum(sum(r["faults"].values()) for r in runs)
    wrong = sum(r["lost"] + r["unexpected"] + r["stuck"] for r in runs)
    largest = max(runs, key=lambda run: run["jobs"])
    return (
        f"{jobs:,} jobs and {struck} faults in {len(runs)} runs, the largest of "
        f"{largest['jobs']:,} jobs and {sum(largest['faults'].values())} faults: {wrong} lost, "
        "unexpected or stuck"
    )


def _found_faults() -> str:
    told = _read(FAULTS)
    if told is None:
        return "the catalogue has not been run"
    told.pop("commit", "")
    seen: dict[str, set[str]] = {}
    for outcomes in told.values():
        for number, outcome in outcomes.items():
            seen.setdefault(number, set()).add(outcome.partition(":")[0])
    counts = Counter(
        "failed" if "failed" in found else found.pop() if len(found) == 1 else "passed in part"
        for found in seen.values()
    )
    count = len(CATALOGUE)
    in_part = f"{counts['passed in part']} in part, " if counts["passed in part"] else ""
    not_run = count - len(seen) + counts["skipped"]
    return (
        f"{counts['passed']} of {count} pass, {in_part}{counts['failed']} fail, "
        f"{not_run} did not run"
    )


def _found_restarts() -> str:
    told = _measured("G4")
    rounds = sum(told["faults"].values())
    under_load = told["resumed_s"].get("count", 0)  # a job was done after them
    return (
        f"{4 * rounds} restarts in {rounds} rounds under {told['jobs']:,} jobs, in {under_load} of "
        f"them while there were still jobs to do: {told['extra_runs']} extra runs"
    )


def _found_takeover() -> str:
    told = _measured("G5")
    found = told["taken_over_s"]
    return (
        f"p99 {found['p99']:.1f} s, at most {found['max']:.1f} s, of {found['count']:,} jobs; "
        f"lease {told['lease_ms'] / 1000:g} s"
    )


def _found_leases() -> str:
    told = _result("leases")
    return (
        f"{told['done']:,} handlers of {told['shortest_s']:g} s and more, {told['blocking']:,} of "
        f"them blocking the loop, in {told['processes']} processes with a lease of "
        f"{told['lease_ms'] / 1000:g} s on {told['server']}, some of which always wait: "
        f"{told['extra_runs']} extra runs"
    )


def _found_reconnect() -> str:
    told = _result("restarts")
    found, silent = told["recovered_s"], len(told["silent"])
    return (
        f"{_quantiles(found)} after {told['restarts']:,} restarts and crashes on "
        f"{told['server']}, after {silent} of which nothing was done; at most "
        f"{told['most_dials_in_a_second']} dials in a second; "
        f"{told['extra_runs']} extra runs and {len(told['faults'])} faults among "
        f"{told['jobs']:,} jobs"
    )


def _found_failover() -> str:
    told = _result("failovers")
    each = [
        f"{name}: {_quantiles(told[name]['took_s'])} of {told[name]['failovers']}, "
        f"{len(told[name]['faults'].get('lost', []))} of {told[name]['confirmed']:,} confirmed "
        f"jobs lost, {told[name]['extra_runs']:,} extra runs"
        for name in ("sentinel", "cluster")
    ]
    since = "from when the new primary is one and the old one, where it lives, is none any more"
    return f"on {told['server']}, {since}: {'; '.join(each)}"


def _found_fuzz() -> str:
    told = _result("fuzz")
    crashes = sum(one["crashes"] for one in told.values())
    grown_mb = max(one["grown_mb"] for one in told.values())
    counts = sorted({one["inputs"] for one in told.values()}, reverse=True)
    each = [
        f"{count:,} inputs for each of {', '.join(n for n in told if told[n]['inputs'] == count)}"
        for count in counts
    ]
    found = f"{'; '.join(each)}: {crashes} crashes or reports, at most {grown_mb} MB grown"
    return "; ".join([found, *_found_garbage()])


def _found_garbage() -> list[str]:
    """The same into live connections, where that was measured."""
    told = (_read(RESULTS / "garbage.json") or {}).get("connections", {})
    if not told:
        return []
    each = ", ".join(f"{one['given']:,} on {kind}" for kind, one in told.items())
    wrong = sum(one["mismatched"] + one["failed"] for one in told.values())
    left = sum(one["descriptors_left"] for one in told.values())
    grown_mb = max(one["grown_mb"] for one in told.values())
    return [
        f"as replies into live connections, {each}: {wrong} of the calls behind them answered "
        f"wrong or not, {left} descriptors left, at most {grown_mb} MB grown"
    ]


def _found_cancels() -> str:
    told = _result("cancels")
    return (
        f"{told['cancelled']:,} calls cancelled, {told['answered']:,} answered, links cut "
        f"{told['cuts']} times: {told['mismatched']} mismatched, {told['failed']} failed, "
        f"{sum(told['left'].values())} tasks, links or descriptors left"
    )


def _found_slots() -> str:
    told = _result("slots")
    return (
        f"{told['fires']:,} fires of {told['slots']:,} slots of {told['specs']} specs, through "
        f"{sum(told['faults'].values()) - told['faults'].get('calm', 0)} faults, of them "
        f"{told['faults']['clock_put_forward'] + told['faults'].get('clock_put_back', 0)} jumps of "
        f"the clock, on {told['server']}; equal at each rest"
    )


def _found_idle() -> str:
    found = _result("idle")
    return "; ".join(
        f"{told['queues']} queues in one process on {server}: {told['cpu_percent']} % of a core, "
        f"{told['commands_per_s_and_worker']} commands a second for each worker"
        for server, told in sorted(found.items(), key=lambda item: SERVERS.index(item[0]))
    )


def _found_soak() -> str:
    return "; ".join(map(_soaked, _runs("soak-")))


def _soaked(told: dict[str, Any]) -> str:
    first, last = told["first"], told["last"]
    return (
        f"{told['server']}: {told['hours']:g} h, {told['jobs']:,} jobs, "
        f"{told['links_cut']:,} links cut: memory "
        f"{told['rss_mib_per_h']:+g} MiB/h, of which {told['used_mib_per_h']:+g} are in use, "
        f"{told['blocks_per_h']:+d} blocks/h of Python's own allocator, "
        f"{first['files']} → {last['files']} descriptors, the "
        f"server's memory {first['server_mib']:.1f} → {last['server_mib']:.1f} MiB"
    )


def _found_hostile() -> str:
    told = _result("hostile")
    first, most = told["rss_mb"]
    return (
        f"{told['done']:,} of {told['good']:,} good ones done, {told['buried']:,} of "
        f"{told['broken']:,} broken ones buried on {told['server']}, {first} → {most} MB"
    )


#: The programs that show one figure each, and keep what repeats it.
WORDS = ("leases", "restarts", "failovers", "cancels", "slots", "garbage", "hostile")
#: Figures that are worked out from results.
FOUND: dict[str, Callable[[], str]] = {
    "G1": _found_chaos, "G2": _found_faults, "G4": _found_restarts, "G5": _found_takeover,
    "G6": _found_leases, "G7": _found_reconnect, "G8": _found_failover, "G9": _found_fuzz,
    "G11": _found_cancels, "G12": _found_soak, "G13": _found_idle, "G14": _found_slots,
    "G15": _found_hostile,
}  # fmt: skip
SECTIONS: dict[str, Callable[[], str]] = {
    "chaos": chaos, "kinds": kinds, "commands": commands, "peers": peers,
    "durability": durability, "faults": faults, "figures": figures,
}  # fmt: skip


# ── Helpers ─────────────────────────────────────────────────────────────────────────────────────


def _runs_by_server() -> Iterator[dict[str, Any]]:
    """What repeats the results that hold all servers in one file, and no command."""
    for server, told in (_read(RESULTS / "idle.json") or {}).items():
        size = f"--queues {told['queues']} --seconds {told['seconds']:.0f}"
        yield told | {"command": f"python -m tests.chaos.idle {size} --server {server}"}
    for server, modes in (_read(RESULTS / "durability.json") or {}).items():
        cells = [cell for crashes in modes.values() for cell in crashes.values()]
        trials = max(cell.get("trials", 0) for cell in cells)
        made_at = sorted({cell["commit"] for cell in cells if "commit" in cell})
        yield {
            "command": f"python -m tests.chaos.durability --trials {trials} --server {server}",
            "commit": ", ".join(made_at),
        }


def _runs(prefix: str) -> list[dict[str, Any]]:
    """The results whose file name begins so, the largest run first."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{prefix}*.json"))]
    return sorted(found, key=lambda told: -told.get("jobs", 0))


def _measured(figure: str) -> dict[str, Any]:
    """The run of the chaos that was made for a figure."""
    return _result(f"figure-{figure}")


def _result(word: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((RESULTS / f"{word}.json").read_text())
    return told


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _place(told: dict[str, Any]) -> tuple[bool, str, bool]:
    """Where a queue's row is: ours first, and what is safe before the defaults."""
    return told["subject"] != "chasqui", told["title"].lower(), told["settings"] != "safe"


def _waiting(told: dict[str, Any]) -> str:
    """What is said of jobs that their queue, by its documents, need not have run again by then."""
    is_early = told["recovers_s"] > told["rest_s"]
    return ", still waiting" if told["stuck"] and is_early else ""


def _command(told: dict[str, Any]) -> str:
    """What repeats a run, and the commit that it was made at if that is known."""
    command: str = told["command"]
    return f"{command}  # at {told['commit']}" if told.get("commit") else command


def _verdict(told: dict[str, Any]) -> list[str]:
    return [str(told[name]) for name in ("lost", "unexpected", "stuck", "uncaused")]


def _times(found: dict[str, float]) -> str:
    if not found:
        return "none"
    return " / ".join(f"{found[name]:.2f}" for name in ("p50", "p99", "max")) + " s"


def _quantiles(found: dict[str, float]) -> str:
    return f"p50 {found['p50']:.2f} s, p99 {found['p99']:.2f} s, at most {found['max']:.2f} s"


def _most(told: dict[str, Any], key: str) -> str:
    return f"{max(told['before'][key]):.0f} → {max(told['after'][key]):.0f}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"
