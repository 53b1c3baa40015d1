"""Does one checkout take more CPU time than another? `python -m bench.compare OLD NEW --rounds 5`.

Both do the same work through the public API, in turns (old, new, new, old). Each run is a process
of its own, with the Python of the checkout's .venv, and all use one private server. Rates depend on
what else the machine does, CPU seconds much less. The best of several rounds says most.
`--instructions` has valgrind count the client's instead: slow, and almost the same each time.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from bench.noise import Watch
from bench.peers.meter import ServerInfo
from tests.servers import KINDS, Server

HERE = Path(__file__).parent
#: Jobs of each load. A round of all of them takes about a minute on two idle cores.
JOBS = {
    "single": 20_000,
    "gather": 80_000,
    "bulk50": 300_000,
    "bulk1000": 400_000,
    "mixed": 100_000,
    "drain": 100_000,
    "drain-events": 50_000,
    "retry": 15_000,
}
IMPORT = "import"
#: Of one checkout, in one round.
IMPORTS = 15
#: Jobs under valgrind: what the second number takes more than the first is counted.
FEW, MORE = 1_000, 3_000
LIMIT_S = 600

#: What was measured by load, by what it is, and by side: one number for each run.
Found = dict[str, dict[str, dict[str, list[float]]]]


def main() -> int:
    arguments = _arguments()
    sides = {"old": arguments.old.resolve(), "new": arguments.new.resolve()}
    for checkout in sides.values():
        if not python_of(checkout).exists():
            sys.exit(f"{checkout} has no .venv: run `make build` there")
    with Server(arguments.server) as server:
        if arguments.instructions:
            found = count(server, sides, arguments.only)
        else:
            found = measure(server, sides, arguments.only, arguments.rounds, arguments.scale)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=_loads, default=[*JOBS, IMPORT], help="single,drain,…")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many jobs")
    parser.add_argument("--server", choices=list(KINDS), default="redis-8.6")
    parser.add_argument("--instructions", action="store_true", help="count them by valgrind")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    return parser.parse_args()


def _loads(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - {*JOBS, IMPORT}:
        known = ", ".join([*JOBS, IMPORT])
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {known}")
    return names


# ── CPU seconds ─────────────────────────────────────────────────────────────────────────────────


def measure(
    server: Server, sides: dict[str, Path], loads: list[str], rounds: int, scale: float
) -> Found:
    """CPU seconds of client and server per 100,000 jobs; of an import, milliseconds."""
    found: Found = {}
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for load in loads:
            if load == IMPORT:
                kept = found.setdefault(load, {}).setdefault("client ms", {})
                for side, times in imports(sides, order).items():
                    kept.setdefault(side, []).append(statistics.median(times))
                tell(number, rounds, load, kept)
                continue
            n = max(1000, int(JOBS[load] * scale) // 1000 * 1000)
            others = 0.0
            for side in order:
                flush(server)
                watch = Watch(server.pid)
                done = run(sides[side], *load_of(sides[side], server.url, load, n))
                spent = json.loads(done.stdout)
                for what in ("client", "server"):
                    kept = found.setdefault(load, {}).setdefault(f"{what} s/100k", {})
                    kept.setdefault(side, []).append(spent[f"{what}_s"] / n * 1e5)
                others = max(others, watch.noise().foreign_cores or 0.0)
            tell(number, rounds, load, found[load]["client s/100k"], others)
    return found


def load_of(checkout: Path, url: str, load: str, n: int) -> list[str]:
    """What Python is to run for one load."""
    return [str(HERE / "loads.py"), str(checkout), url, load, str(n)]


def run(
    checkout: Path, *program: str, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a program by the checkout's Python, to its end."""
    done = subprocess.run(
        [*before, str(python_of(checkout)), *program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        cwd=checkout,
    )
    if done.returncode:
        sys.exit(f"{' '.join(program)} failed in {checkout}:\n{done.stderr}")
    return done


def imports(sides: dict[str, Path], order: list[str]) -> dict[str, list[float]]:
    """CPU milliseconds of `import chasqui`, with the start of Python, again and again."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    for i in range(IMPORTS):
        for side in order if i % 2 == 0 else order[::-1]:
            command = [str(python_of(sides[side])), "-c", "import chasqui"]
            started = subprocess.Popen(command, cwd=sides[side])
            _, status, used = os.wait4(started.pid, 0)
            started.returncode = os.waitstatus_to_exitcode(status)
            if started.returncode:
                sys.exit(f"chasqui cannot be imported in {sides[side]}")
            times[side].append((used.ru_utime + used.ru_stime) * 1000)
    return times


def flush(server: Server) -> None:
    info = ServerInfo(server.url)
    info.command("FLUSHALL SYNC")
    info.close()


def python_of(checkout: Path) -> Path:
    return checkout / ".venv/bin/python"


def tell(
    number: int, rounds: int, load: str, kept: dict[str, list[float]], others: float = 0.0
) -> None:
    """Show where the measurement is."""
    latest = ", ".join(f"{side} {kept[side][-1]:.3f}" for side in ("old", "new"))
    noise = f"   (others used {others:.1f} cores)" if others > 0.25 else ""
    line = f"round {number + 1}/{rounds}  {load:<12} {latest}{noise}"
    print(line, file=sys.stderr, flush=True)


# ── Instructions ────────────────────────────────────────────────────────────────────────────────


def count(server: Server, sides: dict[str, Path], loads: list[str]) -> Found:
    """Thousands of instructions of the client per job; of an import, millions. What a worker runs
    is added by the same process, in bulk, and counts as well."""
    found: Found = {}
    for load in loads:
        what = "client M instr" if load == IMPORT else "client k instr/job"
        kept = found.setdefault(load, {}).setdefault(what, {})
        for side, checkout in sides.items():
            if load == IMPORT:
                kept[side] = [instructions(checkout, "-c", "import chasqui") / 1e6]
                continue
            counted = []
            for n in (FEW, MORE):
                flush(server)
                counted.append(instructions(checkout, *load_of(checkout, server.url, load, n)))
            kept[side] = [(counted[1] - counted[0]) / (MORE - FEW) / 1e3]
        tell(0, 1, load, kept)
    return found


def instructions(checkout: Path, *program: str) -> int:
    """How many instructions a Python program takes, in user mode."""
    options = ("--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")
    told = run(checkout, *program, before=("valgrind", *options)).stderr
    counted = re.search(r"I\s+refs:\s+([\d,]+)", told)
    if counted is None:
        sys.exit(f"valgrind counted nothing:\n{told}")
    return int(counted[1].replace(",", ""))


# ── The table ───────────────────────────────────────────────────────────────────────────────────


def table(found: Found) -> str:
    """Best and median of each, and new divided by old."""
    rows = [("load", "", "old best", "new best", "ratio", "old median", "new median", "ratio")]
    for load, kinds in found.items():
        for what, sides in kinds.items():
            row = [load, what]
            for of in (min, statistics.median):
                old, new = of(sides["old"]), of(sides["new"])
                row += (f"{old:.3f}", f"{new:.3f}", f"{new / old:.3f}" if old else "")
            rows.append(tuple(row))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        rest = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join([*first, *rest]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
