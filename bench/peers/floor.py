"""What any library takes for a bulk: the caller's list of dicts, and the jobs that he gets for it.

The bytes are prebuilt and go over a plain socket, as in limit.py; nothing is checked, packed or
encoded, there is no event loop, and the jobs are made while the server works. What a library with
this interface can reach at most is this, not the limit.
"""

import json
import sys

from bench.peers import harness
from bench.peers.harness import PAYLOAD, Data
from bench.peers.limit import Limit, Wire, frames
from bench.peers.meter import Meter
from chasqui.model.job import Job, job_factory
from chasqui.producing.new_jobs import ulids
from chasqui.scripts.adding import ADD


def bulk(url: str, n: int, size: int, body_bytes: int = 0) -> Data:
    wire = Wire(url)
    wire.command("SCRIPT", "LOAD", ADD.source)
    calls = list(frames(n, size, body_bytes))
    data = harness.payloads(1, body_bytes)[0] if body_bytes else PAYLOAD
    every, ids = [data] * size, [ulids.next(1) for _ in range(size)]

    def add_bulk(jobs: list[Data], frame: bytes, count: int) -> list[Job]:
        wire.send(frame)
        made = job_factory.make(len(jobs), ids, "welcome", every, 0, 1, True, None, None)
        wire.receive(count)
        return made

    meter = Meter(url)
    for frame, count in calls:
        add_bulk([{"name": "welcome", "data": one} for one in every], frame, count)
    return meter.spent(n // size * size)


def main() -> None:
    asked = json.loads(sys.argv[1])
    peer = Limit(asked["url"], False, False)
    if asked.pop("scenario") == "bulk":
        asked.pop("limit_s", None)
        harness.tell(peer, bulk(**asked))
    else:
        harness.tell(peer, {"unsupported": "bulks only"})


if __name__ == "__main__":
    main()
