"""`chasqui exporter`: what queues hold, for Prometheus."""

import asyncio
from typing import Annotated

import typer

from chasqui.cli import logs
from chasqui.cli.options import Group, RedisUrl
from chasqui.cli.output import tell_url
from chasqui.cli.run import until_signal
from chasqui.errors import NotSupportedError
from chasqui.model.keys import DEFAULT_GROUP


def exporter(
    queues: Annotated[list[str], typer.Argument(metavar="QUEUE", help="Their names.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Where it listens.")
    ] = 9465,
    address: Annotated[
        str, typer.Option(metavar="HOST", help="0.0.0.0 for all interfaces; there is no password.")
    ] = "127.0.0.1",
    group: Group = DEFAULT_GROUP,
    redis_url: RedisUrl = None,
    log_format: logs.LogFormat = logs.Format.text,
    log_level: logs.LogLevel = None,
    as_json: logs.JsonLog = False,
) -> None:
    """Serve what queues hold to Prometheus, until SIGTERM or SIGINT.

    Each scrape looks at the queues anew; metrics of what workers do come from the
    workers themselves, by PrometheusSink.

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
