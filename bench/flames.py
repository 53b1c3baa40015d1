"""Where the time goes: flame graphs of a worker and of a producer, by py-spy."""

import json
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from bench.environments import ROOT
from bench.icicles import draw_flames
from bench.libraries import LIBRARIES
from bench.stage import Stage
from tests.servers import Server

#: What each graph shows, and the scenario that is profiled for it.
GRAPHS = {
    "worker": ("A worker that drains 500k jobs", {"scenario": "drain", "n": 500_000}),
    "producer": (
        "A producer that adds 1M jobs, 1000 a call",
        {"scenario": "bulk", "n": 1_000_000, "size": 1000},
    ),
}


def record(out: Path) -> dict[str, Path]:
    """Draw each graph; none where py-spy is missing or may not look."""
    spy = Path(sys.executable).with_name("py-spy")
    if not spy.exists() and not shutil.which("py-spy"):
        return {}
    made = {}
    with Server("redis-8.6") as server, closing(Stage(server, 0)) as stage:
        for name, (title, asked) in GRAPHS.items():
            stage.clear()
            if asked["scenario"] == "drain":
                stage.call(LIBRARIES["chasqui"], "fill", n=asked["n"])
            stacks = out / f"{name}.stacks"
            child = json.dumps({**asked, "url": server.url})
            argv = [str(spy), "record", "--native", "--rate", "200", "--format", "raw"]
            argv += ["--output", str(stacks), "--", sys.executable, "-m", "bench.peers.chasqui"]
            done = subprocess.run([*argv, child], cwd=ROOT, capture_output=True, text=True)
            if stacks.exists() and not done.returncode:
                made[name] = draw_flames(stacks.read_text(), title, out / f"{name}.png")
    return made
