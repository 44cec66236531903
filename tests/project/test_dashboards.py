"""The Grafana dashboard and the alert rules: every metric in them is exported, and Prometheus accepts the rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from manylora.route.metrics import ProxyMetrics
from manylora.serving.metrics.scrape import function_metrics
from manylora.serving.metrics.status_report import FunctionState
from manylora.serving.server import BackgroundServer

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "manylora.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
NAME = re.compile(r"\b(?:manylora_|vllm:|http_requests)\w+")
SERIES = re.compile(r"^# TYPE (\S+) (\w+)", re.M)


class OneFunction(Collector):
    def collect(self) -> Iterator[Metric]:
        return function_metrics([FunctionState(name="one", state="awake")], (0, 0))


@pytest.fixture(scope="module")
def exported(server: BackgroundServer) -> set[str]:
    """The names of all series of a server, a router and a node of functions."""
    registry = CollectorRegistry()
    registry.register(OneFunction())
    texts = [
        httpx.get(server.url + "/metrics").text,
        ProxyMetrics().render(()).decode(),
        generate_latest(registry).decode(),
    ]
    found = set()
    for name, kind in SERIES.findall("\n".join(texts)):
        parts = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        found.update(name + part for part in parts)
    return found


def expressions() -> dict[str, str]:
    """Return the expressions of all panels and rules, by title."""
    panels = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    }
    return panels | {rule["alert"]: rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]}


def test_every_metric_of_the_dashboard_and_the_alerts_is_exported(exported: set[str]) -> None:
    asked = {title: set(NAME.findall(text)) for title, text in expressions().items()}
    assert all(asked.values())
    assert {title: names - exported for title, names in asked.items() if names - exported} == {}
    variables = NAME.findall(DASHBOARD["templating"]["list"][1]["query"]["query"])
    assert set(variables) <= exported
    told = {
        name
        for rule in (rule for group in ALERTS["groups"] for rule in group["rules"])
        for name in NAME.findall(json.dumps(rule["annotations"]))
    }
    assert told <= exported


def test_every_metric_of_our_own_is_documented(exported: set[str]) -> None:
    """By its name, or by its end behind a name of the same beginning: `manylora_adapters_registered`, `_resident`."""
    text = "\n".join(path.read_text() for path in (DEPLOY.parent / "docs").glob("*.md"))
    names = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exported if name.startswith("manylora_")}
    ends = {name: [name[at:] for at, char in enumerate(name) if char == "_"] for name in names}
    missing = {name for name in names if name not in text and not any(f"`{end}" in text for end in ends[name])}
    assert missing == set()


def test_panels_have_numbers_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"] and x < 24


def test_prometheus_accepts_the_rules_and_they_fire_when_they_should() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: apt-get install prometheus")
    for words in (("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")):
        done = subprocess.run(
            [promtool, *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    filled = [text.replace("$__rate_interval", "5m").replace("$job", ".*") for text in expressions().values()]
    rules = [{"record": f"number_{number}", "expr": text} for number, text in enumerate(filled)]
    written = yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]})
    words = [promtool, "check", "rules", "/dev/stdin"]
    done = subprocess.run(words, input=written, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
