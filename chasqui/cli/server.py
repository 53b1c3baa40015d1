"""`chasqui server`: the embedded server in the foreground."""

import os
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn
from urllib.parse import unquote, urlsplit

import typer

from chasqui import embedded
from chasqui.cli import logs
from chasqui.errors import EmbeddedServerError


class _Stop(BaseException):
    """A signal asked us to end."""


def server(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where it keeps its data. Default: nowhere, it is temporary."),
    ] = None,
    log_format: logs.LogFormat = logs.Format.text,
    log_level: logs.LogLevel = logs.Level.info,
) -> None:
    """Run an embedded server until interrupted, and print its URL.

    Processes of the same user reach it under that URL, or under embedded:///DIR.

    Example: chasqui server --dir ./jobs
    """
    logs.configure(log_format, log_level)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        with embedded.start(directory) as running:
            print(running.url, flush=True)
            _wait_for_end(running)
    except _Stop:
        pass


def _wait_for_end(running: embedded.EmbeddedServer) -> NoReturn:
    """Stay on a connection that the server hangs up only when it ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.fsencode(unquote(urlsplit(running.url).path)))
        connection.recv(1)
    raise EmbeddedServerError(f"the server ended; its log is {running.directory / 'server.log'}")


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stop
