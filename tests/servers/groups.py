"""Several servers that work together on one machine: a primary under Sentinel, and a cluster."""

import math
import re
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tests.servers.process import START_TIMEOUT_S, Server, ServerStartError

SLOTS = 16_384


def ask(port: int, command: str) -> str:
    """The raw reply to one command, for what a test does behind the client's back."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(f"{command}\r\n".encode())
        connection.shutdown(socket.SHUT_WR)  # it hangs up when it has answered
        reply = b""
        while data := connection.recv(1 << 16):
            reply += data
    return reply.decode()


def is_primary(member: Server) -> bool:
    """Whether a server takes itself for a primary."""
    return "role:master" in _replication(member)


class _Group:
    """Servers that are closed together."""

    def __init__(self) -> None:
        self.members: list[Server] = []

    def close(self) -> None:
        for member in self.members:
            member.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Sentinel(Server):
    """A sentinel that watches one primary."""

    def __init__(self, kind: str, primary_port: int, quorum: int, down_after_ms: int) -> None:
        self._primary_port = primary_port
        self._quorum = quorum
        self._down_after_ms = down_after_ms
        super().__init__(kind)

    def _command(self, port: int) -> list[str]:
        config = self.directory / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\nunixsocket {self.socket}\ndir {self.directory}\n"
            f"sentinel monitor mymaster 127.0.0.1 {self._primary_port} {self._quorum}\n"
            f"sentinel down-after-milliseconds mymaster {self._down_after_ms}\n"
            f"sentinel failover-timeout mymaster {4 * self._down_after_ms}\n"
        )
        return [str(self.binary), str(config), "--sentinel"]


class Watched(_Group):
    """A primary with replicas, watched by sentinels, to which one is down that is silent for a
    while."""

    def __init__(
        self, kind: str, *, replicas: int = 1, sentinels: int = 1, down_after_ms: int = 500
    ) -> None:
        super().__init__()
        try:
            self.members.append(Server(kind, repl_diskless_sync_delay="0"))
            port = self.members[0].port
            for _ in range(replicas):
                self.members.append(Server(kind, repl_diskless_sync_delay="0"))
                _must(self.members[-1], f"REPLICAOF 127.0.0.1 {port}")
            watch = (port, sentinels // 2 + 1, down_after_ms)
            self._sentinels = [_Sentinel(kind, *watch) for _ in range(sentinels)]
            self.members += self._sentinels
            # Of themselves they look around every 10 s. What a replica said is old to them after
            # five pings, and once a primary is down they ask each second. One that got no time for
            # 2 s trusts itself with nothing for 30.
            periods = "info-period 100 ping-period 300 publish-period 200 tilt-period 1000"
            for sentinel in self._sentinels:
                ask(sentinel.port, f"SENTINEL DEBUG {periods}")
            self.wait_until_whole(replicas)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self._sentinels)
        return f"redis+sentinel://{hosts}/mymaster"

    @property
    def primary(self) -> Server:
        """The server that the sentinels call the primary now."""
        found = re.search(
            r"address=127\.0\.0\.1:(\d+)", ask(self._sentinels[0].port, "INFO sentinel")
        )
        assert found is not None
        return next(member for member in self.members if member.port == int(found[1]))

    def wait_until_whole(self, replicas: int) -> None:
        """Return when every sentinel sees the primary, the other sentinels, and replicas that are
        fit to take over."""
        whole = f"status=ok,.*slaves={replicas},sentinels={len(self._sentinels)}"
        for sentinel in self._sentinels:
            _wait(lambda port=sentinel.port: bool(re.search(whole, ask(port, "INFO sentinel"))))
            _wait(lambda port=sentinel.port: self._fit_replicas(port) == replicas)

    def fail_over(self) -> None:
        """Make a replica the primary; return when the sentinels have begun."""
        sentinel = self._sentinels[0].port
        _wait(lambda: ask(sentinel, "SENTINEL FAILOVER mymaster").startswith("+OK"))

    @staticmethod
    def _fit_replicas(sentinel_port: int) -> int:
        found = ask(sentinel_port, "SENTINEL REPLICAS mymaster")
        return found.count("master-link-status\r\n$2\r\nok\r\n")


class Cluster(_Group):
    """Three primaries that share the slots, with settings of the test's own, and as many replicas
    for each as it wants."""

    def __init__(self, kind: str, *, replicas: int = 0, **settings: str) -> None:
        super().__init__()
        settings = {"cluster_enabled": "yes", "cluster_node_timeout": "2000"} | settings
        try:
            for _ in range(3 + 3 * replicas):
                self.members.append(Server(kind, **settings))
            first, *others = self.members
            primaries = self.members[:3]
            for i, member in enumerate(primaries):
                slots = range(SLOTS * i // 3, SLOTS * (i + 1) // 3)  # 6.2 takes no ranges
                _must(member, f"CLUSTER ADDSLOTS {' '.join(map(str, slots))}")
            # Nodes of the same epoch settle between themselves who gets the higher one. One that
            # gets it while it hands over a slot has that slot back, and its new owner deletes the
            # keys that it was given.
            for i, member in enumerate(self.members, 1):
                _must(member, f"CLUSTER SET-CONFIG-EPOCH {i}")
            for other in others:
                _must(first, f"CLUSTER MEET 127.0.0.1 {other.port}")
            for i, replica in enumerate(self.members[3:]):
                primary_id = self._id(primaries[i % 3])
                _wait(lambda port=replica.port, id=primary_id: id in ask(port, "CLUSTER NODES"))
                _must(replica, f"CLUSTER REPLICATE {primary_id}")
            self.wait_until_whole()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{member.port}" for member in self.members)
        return f"redis+cluster://{hosts}"

    def wait_until_whole(self) -> None:
        """Return when all nodes know each other and all slots."""
        for member in self.members:
            _wait(lambda member=member: "cluster_state:ok" in ask(member.port, "CLUSTER INFO"))
            _wait(lambda member=member: ask(member.port, "CLUSTER NODES").count("master") == 3)
            _wait(lambda member=member: "master_link_status:down" not in _replication(member))

    def slot(self, key: str) -> int:
        return int(ask(self.members[0].port, f"CLUSTER KEYSLOT {key}")[1:])

    def owner(self, key: str) -> Server:
        """The node that serves a key, once one does: on a busy machine they may think for a moment
        that the cluster is down, and then none says whose a slot is."""
        serving: list[Server] = []

        def is_served() -> bool:
            for member in self.members:
                if ask(member.port, f"EXISTS {key}").startswith((":", "-ASK")):
                    serving.append(member)
            return bool(serving)

        _wait(is_served)
        return serving[0]

    def fail_over(self, replica: Server) -> None:
        """Make a replica the primary; return when it is. It gives up after 5 s, for want of votes
        that came too late, and is asked again."""
        asked_s = -math.inf

        def has_taken_over() -> bool:
            nonlocal asked_s
            if is_primary(replica):
                return True
            if time.monotonic() - asked_s > 6.0:
                asked_s = time.monotonic()
                ask(replica.port, "CLUSTER FAILOVER")
            return False

        _wait(has_taken_over)

    def start_move(self, slot: int, source: Server, target: Server) -> None:
        """From now on the source answers ASK for keys of the slot that it does not have."""
        _must(target, f"CLUSTER SETSLOT {slot} IMPORTING {self._id(source)}")
        _must(source, f"CLUSTER SETSLOT {slot} MIGRATING {self._id(target)}")

    def finish_move(self, slot: int, source: Server, target: Server) -> None:
        """Move what is left of the slot; from now on the source answers MOVED."""
        while keys := re.findall(
            r"\$\d+\r\n(.*)\r\n", ask(source.port, f"CLUSTER GETKEYSINSLOT {slot} 100")
        ):
            names = " ".join(keys)
            _must(source, f'MIGRATE 127.0.0.1 {target.port} "" 0 5000 KEYS {names}')
        for member in (target, source, *self.members):
            _must(member, f"CLUSTER SETSLOT {slot} NODE {self._id(target)}")

    def move(self, slot: int, source: Server, target: Server) -> None:
        self.start_move(slot, source, target)
        self.finish_move(slot, source, target)

    def move_at_once(self, key: str, source: Server, target: Server) -> None:
        """Let the nodes move a key's slot as a whole, as Redis 8.4 and Valkey 9 can."""
        slot = self.slot(key)
        if source.name == "valkey-9":
            to = f"SLOTSRANGE {slot} {slot} NODE {self._id(target)}"
            _must(source, f"CLUSTER MIGRATESLOTS {to}")
        else:
            _must(target, f"CLUSTER MIGRATION IMPORT {slot} {slot}")
        _wait(lambda: ask(source.port, f"EXISTS {key}").startswith("-MOVED"))

    @staticmethod
    def _id(member: Server) -> str:
        return ask(member.port, "CLUSTER MYID").split("\r\n")[1]


def _replication(member: Server) -> str:
    return ask(member.port, "INFO replication")


def _must(member: Server, command: str) -> None:
    reply = ask(member.port, command)
    if reply.startswith("-"):
        raise ServerStartError(f"{command}: {reply}")


def _wait(fact: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not fact():
        if time.monotonic() > deadline_s:
            raise ServerStartError("the servers did not come together in time")
        time.sleep(0.02)
