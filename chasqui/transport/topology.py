"""Finding the server that owns a queue: Sentinel and Cluster by redis-py, embedded by starting it.

It blocks and is rarely asked: the asyncio side calls it in a thread. redis-py is imported when
first needed, since it takes as long to import as the rest of the package.
"""

import os
import random
import ssl
import threading
from pathlib import Path
from typing import Any

from chasqui.errors import AuthenticationError, UnreachableError
from chasqui.model.config import Endpoint
from chasqui.transport import embedded
from chasqui.transport.server import without_arguments

#: How long one node may take to answer where another is.
_LOOKUP_TIMEOUT_S = 2.0


class Directory:
    """Finds the server of an endpoint, and holds an embedded one while it is in use."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._path = endpoint.path
        self._lock = threading.Lock()
        self._server: embedded.EmbeddedServer | None = None

    def locate(self, endpoint: Endpoint, key: bytes) -> Endpoint:
        """The single server that has `key` now. Raises UnreachableError, AuthenticationError,
        EmbeddedServerError."""
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
            self._server = _started(Path(self._path), self._server)
            return self._server


def _ask(endpoint: Endpoint, key: bytes) -> tuple[str, int]:
    """The primary, by the first node that knows it. Nodes are asked in random order: one of them
    may be out of date."""
    from redis import Redis
    from redis.exceptions import AuthenticationError as WrongPasswordError
    from redis.exceptions import NoPermissionError, RedisError

    refusal: Exception | None = None
    failure = ""
    has_answered = False
    for host, port in random.sample(endpoint.hosts, len(endpoint.hosts)):
        node = Redis(host=host, port=port, **_options(endpoint))
        try:
            if endpoint.kind == "sentinel":
                found = _ask_sentinel(node, endpoint.service)
            else:
                found = _ask_node(node, host, key)
        except (WrongPasswordError, NoPermissionError) as error:
            refusal = error
        except (RedisError, OSError) as error:
            # Not final: this node may be up again soon, and know better.
            failure = f": {without_arguments(str(error))}"
        else:
            has_answered = True
            if found is not None:
                return found
        finally:
            node.close()
    if refusal is not None and not has_answered and not failure:
        told = f"{endpoint} refused the credentials: {without_arguments(str(refusal))}"
        if endpoint.kind == "sentinel":
            told += " (those for sentinels are sentinel_username and sentinel_password in the URL)"
        raise AuthenticationError(told)
    told = "no node owns the queue's slot"
    if endpoint.kind == "sentinel":
        told = "no sentinel answered that knows one"
    elif not has_answered:
        told = "no node answered"
    raise UnreachableError(f"no primary found through {endpoint}: {told}{failure}")


def _ask_sentinel(sentinel: Any, service: str | None) -> tuple[str, int] | None:
    state = sentinel.sentinel_masters().get(service)
    if not state or not state["is_master"] or state["is_sdown"] or state["is_odown"]:
        return None
    return str(state["ip"]), int(state["port"])


def _ask_node(node: Any, host: str, key: bytes) -> tuple[str, int] | None:
    from redis.crc import key_slot

    slot = key_slot(key)
    for first, last, (owner, port, *_), *_ in node.execute_command("CLUSTER SLOTS"):
        if first <= slot <= last:
            # A node that does not know its own address is where we asked it.
            return (owner.decode() if owner else host), int(port)
    return None


def _options(endpoint: Endpoint) -> dict[str, Any]:
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    options: dict[str, Any] = {
        "protocol": 2,  # newer versions of redis-py begin with HELLO, which old servers do not know
        "socket_timeout": _LOOKUP_TIMEOUT_S,
        "socket_connect_timeout": _LOOKUP_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),  # a dead node is skipped; the next dial asks again
    }
    username, password = endpoint.username, endpoint.password
    if endpoint.kind == "sentinel":
        # `username` and `password` are for the servers that the sentinels watch.
        username, password = endpoint.sentinel_username, endpoint.sentinel_password
    if username or password is not None:
        options |= {"username": username, "password": password.reveal() if password else ""}
    if endpoint.tls:
        # Explicit, because the defaults of redis-py were not always as strict.
        strict = {"ssl_check_hostname": True, "ssl_min_version": ssl.TLSVersion.TLSv1_2}
        options |= {"ssl": True, "ssl_cert_reqs": "required", **strict, **endpoint.tls_files}
    return options


def _started(
    directory: Path | None, held: embedded.EmbeddedServer | None
) -> embedded.EmbeddedServer:
    """The server of a directory. If the server that we hold has crashed, this starts it again."""
    server = embedded.start(directory)
    if held is not None:
        held.close()
    return server


_temporary_lock = threading.Lock()
_temporary_server: embedded.EmbeddedServer | None = None


def _temporary() -> embedded.EmbeddedServer:
    """The server behind a bare `embedded://`: one for the whole process, so that its queues and
    workers meet. It ends with the process."""
    global _temporary_server
    with _temporary_lock:
        directory = None if _temporary_server is None else _temporary_server.directory
        _temporary_server = _started(directory, _temporary_server)
        return _temporary_server


def _forget_lock() -> None:
    """For a forked child: nothing there would release a lock that a thread of the parent held."""
    global _temporary_lock
    _temporary_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)
