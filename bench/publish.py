"""Writes docs/performance.md from a run: its tables, its plots, its raw results."""

import json
import shutil
from pathlib import Path

from bench.document import Block, Code, Heading, Image, Table, Text, markdown
from bench.environments import ROOT
from bench.flames import GRAPHS
from bench.libraries import LIBRARIES
from bench.lines import all_checks
from bench.report import growth, machine, table_of, targets, troubles
from bench.results import Results, Row
from bench.scenarios import SCENARIOS

DOCS = ROOT / "docs"
FOLDER = DOCS / "performance"

HOW = """\
make bench                                    # everything, 3 rounds
python -m bench --quick                       # few jobs, few peers, under 5 minutes
python -m bench --only 4,6 --peers chasquimq  # two of the targets, one peer
python -m bench --full --publish              # 5 rounds, up to 1M jobs; writes this page
make bench-check                              # did a hot path get slower?"""

READ_IT = """\
Every measurement is a fresh process against a server that was just emptied; libraries take turns
within a round, in an order that the seed decides. A rate is the best of the rounds, the spread goes
from the worst to the best. CPU seconds are user and system time of the whole client process, all
its threads, and of the server process by its own account, per 100,000 jobs. While a measurement
runs, CPU that other processes use is watched; a measurement that lost more than a quarter of a core
to them is repeated. Payloads are `{"to": "user@example.com", "n": 123}`; handlers count and return.
A drain checks that each job ran once. "The limit" is no library: a plain socket that sends the same
frames, built before, or that reads 1000 entries, parses and acknowledges them, one step after the
other; whoever reads ahead may pass it."""

NOT_MEASURED = """\
- Networks: client and server share one machine, so a round trip costs microseconds.
- Servers that write to disk (`appendonly yes`) or have replicas.
- Several workers or producers at once, and machines with more cores.
- Handlers that do something: these numbers are the cost of the queue alone.
- Clusters, TLS, and managed services."""


#: What holds a line that is short, and what was tried: shown while it is.
HOLDS = {
    3: """\
One call is one round trip, and most of it is two processes that wake each other; the raw socket has
that too, but no event loop around it. What is left is the caller's list of dicts, packing, and one
turn of the loop. Tried: packing all entries in one C call (kept, by far the most), making the `Job`
objects all at once and not by a call each (kept, an eighth of the client's CPU), writing at once
instead of at the end of the loop's turn (kept), no plan and no generators for a call that is one
chunk (kept, a third of the client's CPU), several chunk sizes (no difference).""",
    4: """\
Before the first byte leaves, every entry is checked and packed: one bad entry, and nothing is sent.
The server idles meanwhile, and again while the caller builds the next list of dicts. Then each
chunk is written as it is made, and the server works while the client does; but the two processors
here are halves of one core, and what both do at once takes each twice as long. So nearly all of the
client's time counts, and a third of it is the caller's list and the garbage collector, which both
lists of 1000 objects set going. "Any library at best" is what would be left without a library: the
caller's list, the jobs that he gets back, and the prebuilt bytes between them, nothing checked or
packed (`bench/peers/floor.py`); how far below the limit that is, its row of the scenario's table
tells. Tried: chunks of 125, 250, 500 and 1000 jobs (no difference), packing in one C call (kept),
`Job` objects all at once and not by a call each (kept, a fifth of the client's CPU), a name that
all jobs of a chunk share sent once (kept, 7 % of the server's; it makes the yardstick faster as
well), ids counted up in their text (kept), one packed argument for all jobs of a chunk (0.90 to
0.96 of the rate, not kept), no garbage collection (1.05 to 1.14 of the rate: not ours to switch
off).""",
    5: """\
What is left is the caller's list, packing, frames with several keys for a job, and the `Job`
objects. Tried: a backoff that many share encoded once (kept), packing the plain part in C (kept),
options read and keys made in C, and one by one in Python only what is unusual, so that errors can
name it (kept: it leaves a third of what the client takes besides the caller's list).""",
    6: """\
What a job costs is its entry, its payload, a `Job`, and the handler's own coroutine. Tried:
decoding the payload in the core straight from the envelope (kept), one look at an entry instead of
four (kept), acks that the garbage collector need not find (kept), a compiled `Job` (hardly faster,
not kept).""",
    7: """\
As without events, and two more commands a job, built in the core. The server is busy all the time,
so this is CPU and not rate. Tried: writing events without a Python object on the way (kept), one
write for the events of many jobs (kept), decoding in the core (kept).""",
    8: """\
A failed run is a move to the delayed set and one back, and the server's time in the two scripts is
most of it. Tried: acknowledging what moved in one command a batch (kept), removing what was
promoted in one command a batch (kept), locals instead of globals in Lua (kept), asking for the
current task only where a run was cancelled (kept).""",
    9: """\
Three processes wake each other, which is nearly all of the time; the slowest hundredth is what the
machine does. Tried: handing entries out in the turn of the loop in which they arrive (kept, a tenth
of the median), sending a single add at once instead of at the end of the turn (no gain, not kept),
uvloop (in use).""",
}


def publish(results: Results, out: Path, drawn: dict[str, str]) -> Path:
    """Write the page, its images and the raw rows; the page's path."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for before in FOLDER.glob("*.png"):
        before.unlink()
    images = {}
    for name, image in drawn.items():
        shutil.copy(out / image, FOLDER / image)
        images[name] = f"performance/{image}"
    rows = [{"packages": results.packages()}, *map(_small, results.every)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (FOLDER / "raw.jsonl").write_text(text)
    page = DOCS / "performance.md"
    page.write_text(markdown(blocks(results, images, out)))
    return page


def blocks(results: Results, images: dict[str, str], out: Path) -> list[Block]:
    made: list[Block] = [
        Heading("Performance", 1),
        Text(
            "Written by `python -m bench --publish`; no number in a table was typed. The rows "
            "behind them are in [performance/raw.jsonl](performance/raw.jsonl)."
        ),
        *machine(results),
        Text(READ_IT.replace("\n", " ")),
    ]
    if "overview" in images:
        made += [Heading("At a glance"), Image("chasqui against each library", images["overview"])]
    made += [Heading("Against the targets"), *targets(results), *holds(results)]
    made.append(Heading("Scenario by scenario"))
    for scenario in SCENARIOS:
        table = table_of(results, scenario.name)
        if table is None:
            continue
        made += [Heading(f"{scenario.title[0].upper()}{scenario.title[1:]}", 3), table]
        if scenario.name in images:
            made.append(Image(scenario.title, images[scenario.name]))
    if grown := growth(results, images):
        made.append(Heading("How cost grows"))
        made += [Heading(each.text, 3) if isinstance(each, Heading) else each for each in grown]
    made += [*core(results), *where_time_goes(out), *troubles(results)]
    made += [Heading("What was not measured"), Text(NOT_MEASURED)]
    made += [Heading("How to repeat it"), Code(HOW)]
    peers = ", ".join(each.title for each in LIBRARIES.values() if each.name != "chasqui")
    made.append(
        Text(
            f"A run needs this repository, the package registries and, for BullMQ, Node. It makes "
            f"an environment for each set of peers that agree ({peers}) and starts its own servers."
        )
    )
    return made


def holds(results: Results) -> list[Block]:
    """For each line that is short, what holds it."""
    short = {check.line for check in all_checks() if check.verdict(results) == "SHORT"}
    found = [(line, HOLDS[line]) for line in sorted(short) if line in HOLDS]
    if not found:
        return []
    made: list[Block] = [Heading("What holds the lines that are short", 3)]
    return made + [Text(f"**Line {line}.** " + text.replace("\n", " ")) for line, text in found]


def core(results: Results) -> list[Block]:
    rows = [row for row in results.rows if row["scenario"] == "core"]
    if not rows:
        return []
    lines = [
        [
            row["library"],
            f"{row['ours_ns']:,.0f}",
            f"{row['theirs_ns']:,.0f}",
            f"{row['ratio']:.1f}",
        ]
        for row in rows
    ]
    head = ["work", "core ns", "Python ns", "ratio"]
    return [Heading("The compiled core alone"), Table(head, lines)]


def where_time_goes(out: Path) -> list[Block]:
    """The flame graphs, where they were recorded."""
    made: list[Block] = []
    for name, (title, _) in GRAPHS.items():
        graph = out / f"{name}.png"
        if graph.exists():
            shutil.copy(graph, FOLDER / graph.name)
            made += [Text(f"{title}:"), Image(title, f"performance/{graph.name}")]
    return [Heading("Where the time goes"), *made] if made else []


def _small(row: Row) -> Row:
    """A row without what the page does not show, at the precision that it deserves."""
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in row.items()
        if key not in ("quantiles_ms", "packages")
    }
