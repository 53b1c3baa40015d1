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
        with embedded.start(directory) as running, socket.socket(socket.AF_UNIX) as line:
            line.connect(os.fsencode(unquote(urlsplit(running.url).path)))
            print(running.url, flush=True)
            line.recv(1)  # the server hangs up only when it ends
            log = running.directory / "server.log"
            raise EmbeddedServerError(f"the server ended; its log is {log}")
    except _Stop:
        pass


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stop
