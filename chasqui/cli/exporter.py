"""`chasqui exporter`: serves the sizes of queues to Prometheus."""

import asyncio
from typing import Annotated

import typer

from chasqui.cli import logs
from chasqui.cli.options import Group, QueueNames, RedisUrl, number
from chasqui.cli.output import tell_url
from chasqui.cli.run import until_signal
from chasqui.errors import NotSupportedError
from chasqui.model.keys import DEFAULT_GROUP


def exporter(
    queues: QueueNames,
    port: Annotated[int, number("PORT", "The port to listen on.", min=0, max=65535)] = 9465,
    address: Annotated[
        str, typer.Option(metavar="HOST", help="0.0.0.0 for all interfaces. There is no password.")
    ] = "127.0.0.1",
    group: Group = DEFAULT_GROUP,
    redis_url: RedisUrl = None,
    log_format: logs.LogFormat = logs.Format.text,
    log_level: logs.LogLevel = None,
    as_json: logs.JsonLog = False,
) -> None:
    """Serve the sizes of queues to Prometheus, until SIGTERM or SIGINT.

    Each scrape looks at the queues again. Metrics about the work come from the
    workers themselves, through PrometheusSink.

    Example: chasqui exporter emails invoices --port 9465 --address 0.0.0.0
    """
    try:
        from chasqui.exporter import Exporter
    except ImportError:
        raise NotSupportedError(
            "the exporter needs prometheus-client: pip install 'chasqui[prometheus]'"
        ) from None
    logs.configure(log_format, log_level, as_json)

    async def serve() -> None:
        with Exporter(queues, redis_url=redis_url, group=group) as running:
            host = f"[{address}]" if ":" in address else address
            tell_url(f"http://{host}:{running.serve(port, address)}/metrics", as_json=as_json)
            await asyncio.Event().wait()

    until_signal(serve)
