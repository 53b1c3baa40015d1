"""Real servers for tests and benchmarks: their kinds, their binaries, one process of each.

Standard library only, and nothing of chasqui: it must run before chasqui is built.
"""

from tests.servers.binaries import MissingServerError, find, tool
from tests.servers.fetch import get
from tests.servers.kinds import KINDS, Kind
from tests.servers.process import Server, ServerStartError
from tests.servers.remote import RemoteServer, remote_servers

__all__ = [
    "KINDS",
    "Kind",
    "MissingServerError",
    "RemoteServer",
    "Server",
    "ServerStartError",
    "find",
    "get",
    "remote_servers",
    "tool",
]
