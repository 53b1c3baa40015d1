"""Finding the server that owns a queue: Sentinel and Cluster by redis-py, embedded by starting it.

Blocking, and rarely asked: the asyncio side calls it in a thread. redis-py is imported by who asks,
since loading it takes as long as all the rest of us together.
"""

import threading
from pathlib import Path
from typing import Any

from chasqui import embedded
from chasqui.config import Endpoint
from chasqui.errors import UnreachableError

#: How long one node may take to answer where another is.
_LOOKUP_TIMEOUT_S = 2.0


class Directory:
    """Tells where the server of an endpoint is, and holds an embedded one while it is in use."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._path = endpoint.path
        self._lock = threading.Lock()
        self._server: embedded.EmbeddedServer | None = None

    def locate(self, endpoint: Endpoint, key: bytes) -> Endpoint:
        """The single server that has `key` now. Raises UnreachableError, EmbeddedServerError."""
        if endpoint.kind in ("sentinel", "cluster"):
            return endpoint.at(*_ask(endpoint, key))
        if endpoint.kind == "embedded":
            return Endpoint.parse(self._embedded().url)
        return endpoint

    def close(self) -> None:
        """Let go of the embedded server."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def _embedded(self) -> embedded.EmbeddedServer:
        if self._path is None:
            return _temporary()
        with self._lock:
            if self._server is None:
                self._server = embedded.start(Path(self._path))
            return self._server


def _ask(endpoint: Endpoint, key: bytes) -> tuple[str, int]:
    from redis.exceptions import RedisClusterException, RedisError
    from redis.sentinel import MasterNotFoundError

    try:
        if endpoint.kind == "sentinel":
            return _ask_sentinels(endpoint)
        return _ask_cluster(endpoint, key)
    except MasterNotFoundError:
        # Its own message is a list of redis-py's objects.
        told = "no sentinel answered that knows one"
        raise UnreachableError(f"no primary found through {endpoint}: {told}") from None
    except (RedisError, RedisClusterException, OSError) as error:
        raise UnreachableError(f"no primary found through {endpoint}: {error}") from None


def _ask_sentinels(endpoint: Endpoint) -> tuple[str, int]:
    from redis.sentinel import Sentinel

    assert endpoint.service is not None
    # The credentials are for the servers that the sentinels watch, not for themselves.
    sentinels = Sentinel(endpoint.hosts, sentinel_kwargs=_options(endpoint))  # type: ignore[no-untyped-call]
    try:
        host, port = sentinels.discover_master(endpoint.service)  # type: ignore[no-untyped-call]
    finally:
        for sentinel in sentinels.sentinels:
            sentinel.close()
    return str(host), int(port)


def _ask_cluster(endpoint: Endpoint, key: bytes) -> tuple[str, int]:
    from redis.cluster import ClusterNode, RedisCluster

    options = _options(endpoint)
    if endpoint.username or endpoint.password is not None:
        password = "" if endpoint.password is None else endpoint.password.reveal()
        options |= {"username": endpoint.username, "password": password}
    nodes = [ClusterNode(*place) for place in endpoint.hosts]  # type: ignore[no-untyped-call]
    # A slot that nobody serves is no concern of a queue in another one.
    cluster = RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options)
    try:
        node: Any = cluster.get_node_from_key(key.decode())  # type: ignore[no-untyped-call]
    finally:
        cluster.close()
    if node is None:
        raise UnreachableError(f"no node of {endpoint} owns the queue's slot")
    return str(node.host), int(node.port)


def _options(endpoint: Endpoint) -> dict[str, Any]:
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    options: dict[str, Any] = {
        "socket_timeout": _LOOKUP_TIMEOUT_S,
        "socket_connect_timeout": _LOOKUP_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),  # a dead node is skipped, and we ask again ourselves
    }
    return options | {"ssl": True, **endpoint.tls_files} if endpoint.tls else options


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
