"""Servers that somebody else runs, named in the environment.

CHASQUI_TEST_URLS="redis-7.4=redis://localhost:6379,dragonfly=redis://localhost:6380"
"""

import os
from dataclasses import dataclass

VARIABLE = "CHASQUI_TEST_URLS"


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A running server that is not ours to stop."""

    name: str
    url: str


def remote_servers() -> list[RemoteServer]:
    """The servers that the environment names."""
    servers = []
    for part in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
        name, separator, url = part.partition("=")
        if not (name and separator and url):
            raise ValueError(f"{VARIABLE} wants name=url,name=url and has {part!r}")
        servers.append(RemoteServer(name.strip(), url.strip()))
    return servers
