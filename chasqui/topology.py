"""Finding the node that owns a queue: Sentinel and Cluster through redis-py, embedded by starting it.

Blocking, and rarely asked: the asyncio side calls it in a thread.
"""

import threading
from pathlib import Path
from typing import Any

from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import RedisError
from redis.sentinel import Sentinel

from chasqui import embedded
from chasqui.config import Endpoint
from chasqui.errors import UnreachableError

#: How long one node may take to answer where another is.
_LOOKUP_TIMEOUT_S = 2.0


class Directory:
    """Knows where an endpoint's servers are; keeps what it learned until told to forget it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._cluster: RedisCluster | None = None
        self._is_stale = False
        self._server: embedded.EmbeddedServer | None = None

    def locate(self, key: bytes) -> Endpoint:
        """The single server that has `key` now. Raises UnreachableError."""
        kind = self._endpoint.kind
        with self._lock:
            if self._is_stale:
                self._drop_cluster()
            try:
                if kind == "sentinel":
                    return self._endpoint.at(*self._ask_sentinels())
                if kind == "cluster":
                    return self._endpoint.at(*self._ask_cluster(key))
            except (RedisError, OSError) as error:
                raise UnreachableError(
                    f"no primary found through {self._endpoint}: {error}"
                ) from None
            if kind == "embedded":
                return Endpoint.parse(self._embedded().url)
            return self._endpoint

    def forget(self) -> None:
        """The server was not there: look anew next time. Never blocks."""
        self._is_stale = True

    def close(self) -> None:
        """Let go of whatever was opened or started."""
        with self._lock:
            self._drop_cluster()
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def _drop_cluster(self) -> None:
        cluster, self._cluster = self._cluster, None
        self._is_stale = False
        if cluster is not None:
            cluster.close()

    def _ask_sentinels(self) -> tuple[str, int]:
        endpoint = self._endpoint
        assert endpoint.service is not None
        sentinels = Sentinel(endpoint.hosts, sentinel_kwargs=self._options(with_password=False))
        try:
            host, port = sentinels.discover_master(endpoint.service)
        finally:
            for sentinel in sentinels.sentinels:
                sentinel.close()
        return str(host), int(port)

    def _ask_cluster(self, key: bytes) -> tuple[str, int]:
        if self._cluster is None:
            nodes = [ClusterNode(host, port) for host, port in self._endpoint.hosts]
            self._cluster = RedisCluster(startup_nodes=nodes, **self._options(with_password=True))
        node: Any = self._cluster.get_node_from_key(key.decode())
        if node is None:
            raise UnreachableError(f"no node of {self._endpoint} owns the queue's slot")
        return str(node.host), int(node.port)

    def _options(self, *, with_password: bool) -> dict[str, Any]:
        endpoint = self._endpoint
        options: dict[str, Any] = {
            "socket_timeout": _LOOKUP_TIMEOUT_S,
            "socket_connect_timeout": _LOOKUP_TIMEOUT_S,
        }
        if with_password and endpoint.password is not None:
            options["username"] = endpoint.username
            options["password"] = endpoint.password.reveal()
        return options

    def _embedded(self) -> embedded.EmbeddedServer:
        if self._endpoint.path is None:
            return _temporary()
        if self._server is None:
            self._server = embedded.start(Path(self._endpoint.path))
        return self._server


_temporary_lock = threading.Lock()
_temporary_server: embedded.EmbeddedServer | None = None


def _temporary() -> embedded.EmbeddedServer:
    """The server behind a bare `embedded://`: one for the whole process, so that its queues and
    workers meet. It ends with the process."""
    global _temporary_server
    with _temporary_lock:
        if _temporary_server is None:
            _temporary_server = embedded.start()
        return _temporary_server
