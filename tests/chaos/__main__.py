"""`python -m tests.chaos`: N jobs, seeded faults, a table; 1 if anything is wrong."""

import argparse
import json
import random
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.chaos.conduct import DEFAULT_REST_S, PER_FAULT_S, REST_S, Conductor
from tests.chaos.figure import commit
from tests.chaos.judge import Result, Tally
from tests.chaos.schedule import draw, kinds_of
from tests.chaos.stage import Stage
from tests.chaos.subjects import PEERS, SUBJECTS, InstallError, Subject
from tests.chaos.table import quantiles, show
from tests.servers import KINDS, find
from tests.servers.kinds import version_of

WORKERS, PRODUCERS = 4, 3
LEASE_MS = 3000


def run(
    subject: Subject,
    server: str,
    *,
    jobs: int,
    faults: int,
    seed: int,
    lease_ms: int = LEASE_MS,
    is_general: bool = False,
    only: list[str] | None = None,
    per_fault_s: float = PER_FAULT_S,
    console: Console | None = None,
) -> Result:
    """One run, from the first process to the verdict."""
    console = console or Console(stderr=True)
    kinds = kinds_of(is_general=is_general, only=only)
    schedule = draw(seed, faults, kinds)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn(), TextColumn("{task.fields[now]}", style="yellow"))  # fmt: skip
    sizes = {"jobs": jobs, "workers": WORKERS, "producers": PRODUCERS, "lease_ms": lease_ms}
    with Stage(subject, server, **sizes) as stage, Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{subject.title} on {server}", total=jobs, now="")

        def report(tally: Tally, struck: int, now: str) -> None:
            done = f"fault {struck} of {faults} {now}"
            progress.update(task, completed=tally.settled, now=done)

        return Conductor(stage, schedule, kinds, report, per_fault_s).run()


def main() -> int:
    arguments = _parse()
    if arguments.report:
        from tests.chaos.report import write

        write()
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
    console = Console()
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    subjects = [SUBJECTS[arguments.subject]]
    if arguments.peer:
        subjects = [PEERS[each][name] for name in arguments.peer for each in arguments.settings]
    many = len(subjects) > 1
    code = 0
    for subject in subjects:
        told = _told(arguments, subject, seed)
        console.print(f"seed {seed}: repeat with [bold]{told['command']}[/]", soft_wrap=True)
        try:
            subject.prepare(console.print)
        except InstallError as error:
            console.print(f"[red]{subject.name} could not be set up: {error}[/]")
            _save(arguments.json, {**told, "missing": str(error)}, many=many)
            continue
        result = run(
            subject, arguments.server, jobs=arguments.jobs, faults=arguments.faults, seed=seed,
            lease_ms=arguments.lease_ms, only=arguments.only, console=console,
            per_fault_s=arguments.per_fault_s, is_general=bool(arguments.peer),
        )  # fmt: skip
        show(console, result, told)
        told["versions"] = subject.versions() | _server_version(arguments.server)
        _save(arguments.json, {**told, **_summary(result)}, many=many)
        if result.violations and not arguments.peer:
            code = 1
    return code


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, help="the schedule; a random one unless given")
    parser.add_argument("--server", choices=list(KINDS), default="redis-8.6")
    parser.add_argument("--lease-ms", type=int, default=LEASE_MS)
    parser.add_argument(
        "--per-fault-s", type=float, default=PER_FAULT_S, metavar="S",
        help="jobs come so slowly that they last this long for each fault: more where faults do, "
             "or the last of them strike an empty queue",
    )  # fmt: skip
    parser.add_argument("--only", action="append", metavar="FAULT", help="this kind, and no other")
    parser.add_argument("--subject", choices=["chasqui", "broken"], default="chasqui")
    parser.add_argument(
        "--peer", action="append", choices=list(PEERS["safe"]), help="another queue instead"
    )
    parser.add_argument("--peers", action="store_true", help="all other queues, or those of --peer")
    parser.add_argument(
        "--settings", action="append", choices=list(PEERS),
        help="of other queues: what is safe, their defaults, or, unless given, first one and then "
             "the other",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--report", action="store_true", help="write docs/reliability.md")
    arguments = parser.parse_args()
    arguments.settings = arguments.settings or list(PEERS)
    if arguments.peers and not arguments.peer:
        arguments.peer = list(PEERS["safe"])
    return arguments


def _told(arguments: argparse.Namespace, subject: Subject, seed: int) -> dict[str, Any]:
    words = ["python -m tests.chaos", f"--jobs {arguments.jobs}", f"--faults {arguments.faults}",
             f"--seed {seed}", f"--server {arguments.server}"]  # fmt: skip
    if arguments.lease_ms != LEASE_MS:
        words.append(f"--lease-ms {arguments.lease_ms}")
    if arguments.per_fault_s != PER_FAULT_S:
        words.append(f"--per-fault-s {arguments.per_fault_s:g}")
    if arguments.peer:
        words.append(f"--peer {subject.name} --settings {_settings(subject)}")
    words += [f"--only '{kind}'" for kind in arguments.only or ()]
    peer: dict[str, Any] = {}
    if arguments.peer:
        lease_s = arguments.lease_ms / 1000
        recovers_s = lease_s if subject.recovers_s is None else subject.recovers_s
        peer = {"settings": _settings(subject), "setup": subject.setup, "recovers_s": recovers_s,
                "rest_s": DEFAULT_REST_S if subject.is_default else REST_S}  # fmt: skip
    return {
        "subject": subject.name, "title": subject.title, **peer,
        "server": arguments.server, "seed": seed, "lease_ms": arguments.lease_ms,
        "command": " ".join(words), "commit": commit(),
    }  # fmt: skip


def _settings(subject: Subject) -> str:
    return "default" if subject.is_default else "safe"


def _server_version(name: str) -> dict[str, str]:
    return {"server": version_of(find(KINDS[name])) or "unknown"}


def _summary(result: Result) -> dict[str, Any]:
    told = asdict(result) | {"violations": result.violations}
    for name in ("taken_over_s", "resumed_s"):
        told[name] = quantiles(getattr(result, name))
    return told


def _save(path: Path | None, told: dict[str, Any], *, many: bool) -> None:
    if path is None:
        return
    if many:
        more = "-default" if told.get("settings") == "default" else ""
        path = path.with_name(f"{path.stem}-{told['subject']}{more}{path.suffix}")
    path.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
