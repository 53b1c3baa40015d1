"""`GET /healthz` for whoever watches over processes: 200 while work can be done, else 503."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from chasqui.running.supervisor import Supervisor
from chasqui.worker import Worker

logger = logging.getLogger(__name__)

#: What there is to say, with a `status`: anything but `ok` is a 503.
Check: TypeAlias = Callable[[], dict[str, Any]]

OK = "ok"


@contextmanager
def serving(port: int | None, check: Check) -> Iterator[None]:
    """Answer on all interfaces of this machine, from a thread, so that a busy loop does not matter.

    None: no port, nothing is answered. 0: a free one; the log says which.
    """
    if port is None:
        yield
        return
    try:
        server = ThreadingHTTPServer(("", port), _handler(check))
    except OSError as error:
        raise OSError(f"no health on port {port}: {error.strerror}") from None
    server.daemon_threads = True
    fields = {"port": server.server_port}
    logger.info("health is answered on port %d", server.server_port, extra=fields)
    thread = threading.Thread(target=server.serve_forever, name="chasqui-health", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def of_worker(worker: Worker) -> Check:
    """How one worker is: starting, ok, disconnected, draining; and all of its `Health`."""

    def check() -> dict[str, Any]:
        health = worker.health()
        if health is None:
            return {"status": "starting"}
        status = OK if health.is_connected else "disconnected"
        if worker.is_closed:
            status = "draining"
        return {"status": status, "queue": worker.name, **asdict(health)}

    return check


def of_supervisor(supervisor: Supervisor) -> Check:
    """How many of the processes have their worker running: starting, ok, draining."""

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
            """Probes come every few seconds: nothing to write home about."""

    return Handler
