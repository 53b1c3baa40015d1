"""What queues hold, for Prometheus, from any process: also for queues that no worker serves now."""

import logging
import time
from collections.abc import Sequence
from threading import Thread
from types import TracebackType
from typing import Any, Final, Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from chasqui import retention
from chasqui.blocking import BlockingConnection
from chasqui.model.config import AnyCredentialProvider, Endpoint
from chasqui.errors import ChasquiError
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.metrics.prometheus import QueueCollector, QueueReading, ReaderReading
from chasqui.plans import Counts, Plans
from chasqui.timed.repeatables import scored
from chasqui.transport.request import Effect, Plan, commands
from chasqui.managing.retention import Log

logger = logging.getLogger(__name__)

#: A scrape that takes longer is of no use: Prometheus itself gives up after ten seconds.
SCRAPE_TIMEOUT_S: Final = 5.0
LOG_EVERY_S: Final = 60.0


class Exporter:
    """Reads queues each time that a registry is scraped, until `close()` or its block's end."""

    def __init__(
        self,
        queues: Sequence[str],
        *,
        redis_url: str | None = None,
        tls: bool = False,
        group: str = DEFAULT_GROUP,
        credential_provider: AnyCredentialProvider | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        if isinstance(queues, str) or not queues:
            raise ValueError("queues must be a list of at least one queue's name")
        queues = list(dict.fromkeys(queues))  # Prometheus takes no series twice
        self._plans = [Plans(Keys(name)) for name in queues]
        self._group = group
        endpoint = Endpoint.parse(redis_url, tls=tls)
        # In a cluster each queue may be on another node.
        self._connections = {
            name: BlockingConnection(
                endpoint,
                key=Keys(name).stream,
                client_name="chasqui-exporter",
                credential_provider=credential_provider,
                request_timeout_s=SCRAPE_TIMEOUT_S,
            )
            for name in (queues if endpoint.kind == "cluster" else queues[:1])
        }
        self._registry = registry
        self._collector = QueueCollector(self.read)
        #: When each queue that cannot be read was last complained of.
        self._logged_s: dict[str, float] = {}
        self._serving: list[tuple[WSGIServer, Thread]] = []
        registry.register(self._collector)

    def serve(self, port: int, address: str = "127.0.0.1") -> int:
        """Answer scrapes over HTTP, in a thread; the port, which 0 leaves to the system."""
        server, thread = start_http_server(port, address, self._registry)
        self._serving.append((server, thread))
        return int(server.server_address[1])

    def read(self) -> list[QueueReading]:
        """The queues as they are now, but for those that cannot be read; raises why if that is so
        of all of them."""
        readings: list[QueueReading] = []
        failure: ChasquiError | None = None
        deadline_s = time.monotonic() + SCRAPE_TIMEOUT_S
        for plans in self._plans:
            try:
                readings.append(self._connection(plans).run(self._reading(plans)))
            except ChasquiError as error:
                failure = error
                self._complain(plans.keys.queue, error)
                if time.monotonic() >= deadline_s:  # the others would only wait as long
                    break
        if failure is not None and not readings:
            raise failure
        return readings

    def _complain(self, queue: str, error: ChasquiError) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s.get(queue, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_s[queue] = now_s
            logger.warning("queue %s cannot be read: %s", queue, error, extra={"queue": queue})

    def close(self) -> None:
        """Leave the registry and close the connections. A second call does nothing."""
        for server, thread in self._serving:
            server.shutdown()
            server.server_close()
            thread.join()
        self._serving = []
        if self._connections:
            self._registry.unregister(self._collector)
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _connection(self, plans: Plans) -> BlockingConnection:
        first = next(iter(self._connections.values()))
        return self._connections.get(plans.keys.queue, first)

    def _reading(self, plans: Plans) -> Plan[QueueReading]:
        counts = Counts.of((yield from plans.counts(self._group)))
        first: Any
        first, (seconds, micros) = yield commands(
            ("ZRANGE", plans.keys.delayed, 0, 0, "WITHSCORES"), ("TIME",), effect=Effect.READ
        )
        now_s = int(seconds) + int(micros) / 1e6
        kept = yield from retention.look(Log.events(plans.keys))
        return QueueReading(
            queue=plans.keys.queue,
            waiting=counts.waiting,
            pending=counts.pending,
            delayed=counts.delayed,
            dlq=counts.dlq,
            repeatables=counts.repeatables,
            is_paused=counts.is_paused,
            oldest_wait_s=counts.oldest_ms / 1000,
            delayed_lag_s=max([0.0, *(now_s - due_ms / 1000 for _, due_ms in scored(first))]),
            events=kept.length,
            events_max_len=kept.max_len,
            readers=tuple(
                ReaderReading(one.name, one.lag, one.lag_ms / 1000, one.is_alive)
                for one in kept.readers
            ),
        )
