"""The server that tests run on: an embedded one for each process, or that of CHASQUI_TEST_URL.

The embedded one is emptied before each test. A server of yours never is: it must hold no queue when
a test begins, so all queues that it holds at the end are those of the test, and they are deleted.
"""

import atexit
import os
import re
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.model.words import some
from chasqui.transport import embedded
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect

#: The variable that names a server to use instead of an embedded one.
TEST_URL: Final = "CHASQUI_TEST_URL"
#: Every key of every queue.
_PATTERN: Final = b"{chasqui:*"
_QUEUE: Final = re.compile(rb"\{chasqui:([^}]*)\}")


class ServerOfTests:
    """A running server, and a connection that needs no event loop."""

    def __init__(self, url: str, holder: embedded.EmbeddedServer | None) -> None:
        self.url = url
        #: Keeps an embedded server alive until this process ends; None for one of the user's.
        self._holder = holder
        endpoint = Endpoint.parse(url)
        if endpoint.kind != "single":
            raise ValueError(f"{TEST_URL} must name a single server, not a {endpoint.kind}")
        self.connection = BlockingConnection(endpoint, key=b"", client_name="chasqui-testing")
        atexit.register(self.connection.close)
        if holder is not None:
            # Nobody needs its data after the tests, and a clock that moves writes much.
            self.connection.execute("CONFIG", "SET", "appendonly", "no", effect=Effect.IDEMPOTENT)

    def begin(self) -> None:
        """Make sure that it holds no queue."""
        if self._holder is not None:
            self.connection.execute("FLUSHALL", effect=Effect.IDEMPOTENT)
        elif found := self.queues():
            raise RuntimeError(
                f"the server of {TEST_URL} holds queues that are not of this test: {some(found)}. "
                "Give the tests a database of their own, or delete the queues if an earlier run "
                "left them"
            )

    def end(self) -> None:
        """Delete the queues of a test from a server of the user's."""
        if self._holder is None:
            for name in self.queues():
                self._delete(Keys(name).pattern)

    def queues(self) -> list[str]:
        """The names of all queues that it holds anything of."""
        found = {match[1] for key in self._keys(_PATTERN) if (match := _QUEUE.match(key))}
        return sorted(name.decode() for name in found)

    def _keys(self, pattern: bytes) -> set[bytes]:
        cursor, found = b"0", set[bytes]()
        while True:
            scan = ("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            cursor, page = self.connection.execute(*scan, effect=Effect.READ)
            found.update(page)
            if cursor == b"0":
                return found

    def _delete(self, pattern: bytes) -> None:
        if keys := self._keys(pattern):
            self.connection.execute("UNLINK", *keys, effect=Effect.IDEMPOTENT)


_shared: dict[str, ServerOfTests] = {}


def shared() -> ServerOfTests:
    """The server of this process, started when first asked for."""
    given = os.environ.get(TEST_URL, "")
    if given not in _shared:
        if given:
            _shared[given] = ServerOfTests(_own_database(given), None)
        else:
            holder = embedded.start()
            _shared[given] = ServerOfTests(holder.url, holder)
    return _shared[given]


def _own_database(url: str) -> str:
    """The same server with a database for each process of pytest-xdist: that of the URL for the
    first one, the next for the second."""
    worker = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
    if worker is None or worker[1] == "0":
        return url
    db = Endpoint.parse(url).db + int(worker[1])
    parts = urlsplit(url)
    options = [pair for pair in parse_qsl(parts.query) if pair[0] != "db"]
    if parts.scheme == "unix":
        return f"{url.partition('?')[0]}?{urlencode([*options, ('db', db)])}"
    return parts._replace(path=f"/{db}", query=urlencode(options)).geturl()
