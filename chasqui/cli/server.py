"""`chasqui server`: runs an embedded server in the foreground."""

import os
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn
from urllib.parse import unquote, urlsplit

import typer

from chasqui.cli import logs
from chasqui.cli.output import tell_url
from chasqui.errors import EmbeddedServerError
from chasqui.model.config import Endpoint
from chasqui.transport import embedded


class _Stop(BaseException):
    """SIGINT or SIGTERM came."""


def server(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Where it keeps its data. Default: a directory that is deleted at the end.",
        ),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="embedded:///DIR, the same as --dir DIR."),
    ] = None,
    log_format: logs.LogFormat = logs.Format.text,
    log_level: logs.LogLevel = None,
    as_json: logs.JsonLog = False,
) -> None:
    """Run an embedded server until interrupted, and print its URL.

    Processes of the same user reach it at that URL, or at embedded:///DIR.

    Example: chasqui server --dir ./jobs
    """
    logs.configure(log_format, log_level, as_json)
    if redis_url is not None:
        directory = _directory(redis_url, directory)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        with embedded.start(directory) as running, socket.socket(socket.AF_UNIX) as line:
            line.connect(os.fsencode(unquote(urlsplit(running.url).path)))
            tell_url(running.url, as_json=as_json)
            line.recv(1)  # the server closes this only when it ends
            log = running.directory / "server.log"
            raise EmbeddedServerError(f"the server ended; its log is {log}")
    except _Stop:
        pass


def _directory(redis_url: str, directory: Path | None) -> Path | None:
    """The directory that the URL names."""
    endpoint = Endpoint.parse(redis_url)
    if endpoint.kind != "embedded":
        raise ValueError("chasqui server runs embedded servers: the URL must be embedded:///DIR")
    if directory is not None:
        raise ValueError("either --dir or --redis-url, not both")
    return None if endpoint.path is None else Path(endpoint.path)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stop
