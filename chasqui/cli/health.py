"""Answers `GET /healthz` for whatever watches a worker: 200 if it can work, else 503."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from chasqui.running.runnable import Runnable
from chasqui.running.supervisor import Supervisor
from chasqui.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

#: Returns the body of the answer. A `status` other than `ok` means 503.
Check: TypeAlias = Callable[[], dict[str, Any]]

OK = "ok"


@contextmanager
def serving(port: int | None, check: Check) -> Iterator[None]:
    """Answer on all interfaces of this machine, from a thread, so that a busy event loop cannot
    delay it. With None as the port there is no server; 0 takes a free port, and the log names it.
    """
    if port is None:
        yield
        return
    try:
        server = ThreadingHTTPServer(("", port), _handler(check))
    except OSError as error:
        raise OSError(f"cannot answer on health port {port}: {error.strerror}") from None
    server.daemon_threads = True
    fields = {"port": server.server_port}
    logger.info("answering /healthz on port %d", server.server_port, extra=fields)
    thread = threading.Thread(target=server.serve_forever, name="chasqui-health", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def of_worker(worker: Runnable) -> Check:
    """The status of a worker or a group: starting, ok, disconnected or draining; its `Health`."""
    whose: dict[str, Any] = {"queue": worker.name}
    if isinstance(worker, WorkerGroup):
        whose = {"group": worker.name, "queues": worker.queues}

    def check() -> dict[str, Any]:
        health = worker.health()
        if health is None:
            return {"status": "starting"}
        status = OK if health.is_connected else "disconnected"
        if worker.is_closed:
            status = "draining"
        return {"status": status, **whose, **asdict(health)}

    return check


def of_supervisor(supervisor: Supervisor) -> Check:
    """The status of many processes: starting, ok or draining; and how many are running."""

    def check() -> dict[str, Any]:
        running, wanted = supervisor.running, supervisor.count
        status = OK if running == wanted else "starting"
        if supervisor.is_stopping:
            status = "draining"
        return {"status": status, "running": running, "processes": wanted}

    return check


def _handler(check: Check) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "chasqui", ""

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/healthz":
                self.send_error(404)
                return
            facts = check()
            body = json.dumps(facts).encode()
            self.send_response(200 if facts["status"] == OK else 503)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Log nothing: probes come every few seconds."""

    return Handler
