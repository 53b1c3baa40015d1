"""What queues hold, for Prometheus, from any process: also for queues without workers."""

import logging
import time
from collections.abc import Sequence
from threading import Thread
from typing import Any, Final, Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from chasqui.errors import ChasquiError
from chasqui.managing import retention, state
from chasqui.managing.retention import Log
from chasqui.metrics.prometheus import QueueCollector, QueueReading, ReaderReading
from chasqui.model.config import AnyCredentialProvider, Endpoint
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.timed.repeatables import scored
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect, Plan, commands
from chasqui.transport.server import time_us

logger = logging.getLogger(__name__)

#: A longer scrape is of no use: Prometheus gives up after ten seconds.
SCRAPE_TIMEOUT_S: Final = 5.0
LOG_EVERY_S: Final = 60.0


class Exporter:
    """Reads queues whenever its registry is scraped, until `close()` or the end of its block."""

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
        queues = list(dict.fromkeys(queues))  # Prometheus refuses a series that comes twice
        self._keys = [Keys(name) for name in queues]
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
        #: When a failed read was last logged, by queue.
        self._logged_s: dict[str, float] = {}
        self._serving: list[tuple[WSGIServer, Thread]] = []
        registry.register(self._collector)

    def serve(self, port: int, address: str = "127.0.0.1") -> int:
        """Serve scrapes over HTTP, in a thread; the port. 0 lets the system choose one."""
        server, thread = start_http_server(port, address, self._registry)
        self._serving.append((server, thread))
        return int(server.server_address[1])

    def read(self) -> list[QueueReading]:
        """What the queues hold now, without those that cannot be read; raises if none can."""
        readings: list[QueueReading] = []
        failure: ChasquiError | None = None
        deadline_s = time.monotonic() + SCRAPE_TIMEOUT_S
        for keys in self._keys:
            try:
                readings.append(self._connection(keys).run(self._reading(keys)))
            except ChasquiError as error:
                failure = error
                self._log_failure(keys.queue, error)
                if time.monotonic() >= deadline_s:  # the other queues would only time out too
                    break
        if failure is not None and not readings:
            raise failure
        return readings

    def _log_failure(self, queue: str, error: ChasquiError) -> None:
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

    def __exit__(self, *error: object) -> None:
        self.close()

    def _connection(self, keys: Keys) -> BlockingConnection:
        first = next(iter(self._connections.values()))
        return self._connections.get(keys.queue, first)

    def _reading(self, keys: Keys) -> Plan[QueueReading]:
        counts = yield from state.counts(keys, self._group)
        first: Any
        first, time_ = yield commands(
            ("ZRANGE", keys.delayed, 0, 0, "WITHSCORES"), ("TIME",), effect=Effect.READ
        )
        now_s = time_us(time_) / 1e6
        kept = yield from retention.look(Log.events(keys))
        return QueueReading(
            queue=keys.queue,
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
