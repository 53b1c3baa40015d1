"""What is in deploy/ can be read, names metrics that exist, and calls commands that exist."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from typer.main import get_command

from chasqui.cli import COMMANDS, app
from chasqui.consuming.config import SHUTDOWN_DEADLINE_S
from chasqui.consuming.engine import Health
from chasqui.metrics import DlqRouted, JobOutcome, OutcomeKind, RetryScheduled
from chasqui.metrics.prometheus import (
    PrometheusSink,
    QueueCollector,
    QueueReading,
    ReaderReading,
)
from chasqui.running.process import DRAIN_SLACK_S

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"\bchasqui(?:mq)?_[a-z0-9_]+")


class Worker:
    loop = None
    is_running, is_closed = True, False

    def health(self) -> Health:
        return Health(True, 0.0, 0, 0, 0.0, 0, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def samples() -> set[str]:
    """The name of every sample that can be scraped."""

    async def make() -> CollectorRegistry:
        registry = CollectorRegistry()
        sink = PrometheusSink(registry=registry)
        sink.watch(Worker())
        for kind in (OutcomeKind.OK, OutcomeKind.ERR):
            sink.job_outcome(JobOutcome(kind, 1, 1, "mail"))
        sink.retry_scheduled(RetryScheduled(2, 1, "mail"))
        sink.dlq_routed(DlqRouted("malformed", 0, "mail"))
        readers = (ReaderReading("archive lake", 0, 0.0, True),)
        reading = QueueReading("emails", 0, 0, 0, 0, 0, False, 0.0, 0.0, readers=readers)
        registry.register(QueueCollector(lambda: [reading]))
        return registry

    registry = asyncio.run(make())
    return {sample.name for family in registry.collect() for sample in family.samples}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    return found


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def queries() -> Iterator[tuple[str, str]]:
    """Every query, with where it stands."""
    board = dashboard()
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]["query"]
    for group in manifests("prometheus-rules.yaml")[0]["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]
    for trigger in manifests("keda-scaledobject.yaml")[0]["spec"]["triggers"]:
        yield "keda", trigger["metadata"]["query"]


@pytest.mark.parametrize(("place", "query"), list(queries()))
def test_every_query_names_metrics_that_exist(place: str, query: str, samples: set[str]) -> None:
    named = METRIC.findall(query)
    assert named, f"{place} names no metric"
    assert set(named) <= samples, place
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}")


def test_every_metric_is_explained_and_shown(samples: set[str]) -> None:
    families = {re.sub(r"_(total|created|bucket|sum|count)$", "", name) for name in samples}
    explained = (ROOT / "docs" / "operations.md").read_text()
    shown = " ".join(query for _, query in queries())
    for family in families:
        assert re.search(rf"`{family}(_total)?`", explained), family
        # How many specs there are is nothing to watch.
        assert family in shown or family == "chasqui_queue_repeatables", family


def test_the_documentation_names_metrics_that_exist(samples: set[str]) -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    for name in re.findall(r"`(chasqui(?:mq)?_[a-z_]+)`", text):
        assert {name, f"{name}_bucket"} & samples, name


def test_the_dashboard_holds_together() -> None:
    board = dashboard()
    assert board["title"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(places) == len(set(places))
    variables = {variable["name"] for variable in board["templating"]["list"]}
    for _, query in queries():
        own = set(re.findall(r"\$(\w+)", query)) - {"labels", "value"}
        assert own <= variables | {"__rate_interval"}


def test_keda_scales_a_deployment_that_is_there() -> None:
    (scaled,) = manifests("keda-scaledobject.yaml")
    deployments = [one for one in manifests("kubernetes.yaml") if one["kind"] == "Deployment"]
    target = scaled["spec"]["scaleTargetRef"]["name"]
    assert target in [one["metadata"]["name"] for one in deployments]
    assert scaled["spec"]["cooldownPeriod"] > 60


def _check_probe(container: dict[str, Any], arguments: list[str]) -> None:
    """Whoever has a port is asked there, at a path that it serves."""
    for name, path in (("--health-port", "/healthz"), ("--port", "/metrics")):
        if name in arguments:
            (port,) = container["ports"]
            assert arguments[arguments.index(name) + 1] == str(port["containerPort"])
            asked = container["readinessProbe"]["httpGet"]
            assert asked == {"path": path, "port": port["name"]}
            break
    else:
        assert "ports" not in container
        assert "readinessProbe" not in container


def test_the_manifest_holds_together() -> None:
    objects = manifests("kubernetes.yaml")
    secrets = {
        (one["metadata"]["name"], key)
        for one in objects
        if one["kind"] == "Secret"
        for key in one["stringData"]
    }
    labels = []
    for one in objects:
        if one["kind"] == "Deployment":
            template = one["spec"]["template"]
            labels.append(template["metadata"]["labels"])
            assert one["spec"]["selector"]["matchLabels"] == labels[-1]
            for container in template["spec"]["containers"]:
                program, command, *arguments = container["args"]
                assert program == "chasqui"
                assert command in COMMANDS
                parsed = get_command(app).get_command(None, command)
                parsed.make_context(command, list(arguments))  # SystemExit if it is refused
                _check_probe(container, arguments)
                (variable,) = container["env"]
                assert variable["name"] == "CHASQUI_URL"
                source = variable["valueFrom"]["secretKeyRef"]
                assert (source["name"], source["key"]) in secrets
                if command == "worker":
                    assert "--health-port" in arguments
                    grace_s = template["spec"]["terminationGracePeriodSeconds"]
                    assert grace_s > SHUTDOWN_DEADLINE_S + DRAIN_SLACK_S
    for one in objects:
        if one["kind"] in ("PodDisruptionBudget", "Service"):
            selector = one["spec"]["selector"]
            assert selector.get("matchLabels", selector) in labels
