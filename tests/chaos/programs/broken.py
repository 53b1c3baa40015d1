"""The control: a worker that acknowledges before it runs. Whatever kills it loses jobs."""

import time
from collections.abc import Callable

import redis

from chasqui.model.keys import DEFAULT_GROUP, ENVELOPE, Keys
from tests.chaos.programs.common import Told
from tests.ledger import number


def main() -> None:
    told = Told.here()
    ledger, stream = told.ledger(), Keys(told.queue).stream
    while True:
        try:
            with redis.Redis.from_url(told.url, socket_timeout=5) as client:
                work(told, client, ledger.write, stream)
        except redis.RedisError:
            time.sleep(0.1)


def work(
    told: Told, client: redis.Redis, write: Callable[[str, int, str], None], stream: bytes
) -> None:
    try:
        client.xgroup_create(stream, DEFAULT_GROUP, "0", mkstream=True)
    except redis.ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise
    while True:
        found = client.xreadgroup(DEFAULT_GROUP, told.who, {stream: ">"}, count=100, block=1000)
        entries = found[0][1] if found else []
        if entries:
            ids = [entry_id for entry_id, _ in entries]
            client.xack(stream, DEFAULT_GROUP, *ids)
            client.xdel(stream, *ids)
        for _, fields in entries:
            n = number(fields[ENVELOPE])
            write("start", n, told.who)
            time.sleep(told.plan(n).takes_ms / 1000)
            write("end", n, told.who)


if __name__ == "__main__":
    main()
