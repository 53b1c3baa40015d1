"""redis-benchmark: one plain XADD a job, with fields as long as ours, over one connection.

It sends neither ids nor what keeps a repeated call from adding a job twice.
"""

import json
import subprocess
import sys
from urllib.parse import urlsplit

from bench.peers.meter import Meter, ServerInfo
from bench.peers.tasks import Data
from chasqui.model.keys import Keys
from tests.servers import tool

#: As long as the envelope of a job with the usual payload: arguments cannot hold its zero bytes.
ENVELOPE = "x" * 75


def bulk(url: str, n: int, size: int) -> Data:
    parts = urlsplit(url)
    server = ["-h", str(parts.hostname), "-p", str(parts.port)]
    amount = ["-n", str(n), "-P", str(size), "-c", "1", "-q"]
    command = ["XADD", Keys("bench").stream.decode(), "*", "d", ENVELOPE, "n", "welcome"]
    meter = Meter(url)
    subprocess.run(
        [tool("redis-8.6", "redis-benchmark"), *server, *amount, *command],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return meter.spent(n)


def main() -> None:
    asked = json.loads(sys.argv[1])
    assert asked.pop("scenario") == "bulk"
    version = ServerInfo(asked["url"]).ask("server")["redis_version"]
    told = {**bulk(**asked), "packages": {"redis-benchmark": version}}
    print("RESULT " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
