"""A worker that is broken on purpose, for what the audit must catch."""

from pathlib import Path

import redis

from chasqui.model.keys import DEFAULT_GROUP, ENVELOPE, Keys
from tests.ledger import Ledger, number

LEASE_MS = 50


class BrokenWorker:
    """Reads and runs jobs as a worker does, but for one mistake."""

    def __init__(self, url: str, queue_name: str, folder: Path, who: str) -> None:
        self.keys = Keys(queue_name)
        self.client = redis.Redis.from_url(url)
        self.ledger = Ledger(folder)
        self.who = who
        if not self.client.xinfo_groups(self.keys.stream):
            self.client.xgroup_create(self.keys.stream, DEFAULT_GROUP, "0")

    def take(self, count: int = 100) -> list[tuple[bytes, bytes]]:
        """Entries of its own, and what others have left for a lease."""
        self.client.xautoclaim(self.keys.stream, DEFAULT_GROUP, self.who, LEASE_MS)
        self.client.xreadgroup(DEFAULT_GROUP, self.who, {self.keys.stream: ">"}, count=count)
        found = self.client.xreadgroup(DEFAULT_GROUP, self.who, {self.keys.stream: "0"})
        return [(entry_id, fields[ENVELOPE]) for entry_id, fields in found[0][1]]

    def run(self, envelope: bytes) -> None:
        self.ledger.write("start", number(envelope), self.who)
        self.ledger.write("end", number(envelope), self.who)

    def ack(self, *entry_ids: bytes) -> None:
        self.client.xack(self.keys.stream, DEFAULT_GROUP, *entry_ids)
        self.client.xdel(self.keys.stream, *entry_ids)

    def leave(self) -> None:
        """Tidily, but for what it still has: with the consumer goes what is pending on it."""
        self.client.xgroup_delconsumer(self.keys.stream, DEFAULT_GROUP, self.who)
