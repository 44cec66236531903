"""Prometheus' own parsers, of its text format and of OpenMetrics, over scrapes of a server that has served."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT = "text/plain; version=0.0.4; charset=utf-8"


def send(url: str, body: bytes | None = None, **headers: str) -> tuple[str, str]:
    request = urllib.request.Request(url, body, {name.replace("_", "-"): value for name, value in headers.items()})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.headers["content-type"], response.read().decode()


@pytest.fixture(scope="module")
def served(url: str) -> Iterator[str]:
    for model in ("demo", "upper", "rot13"):
        body = f'{{"model": "{model}", "prompt": "hello", "max_tokens": 4}}'.encode()
        send(f"{url}/v1/completions", body, content_type="application/json")
    yield url


def check(families: list[Any]) -> dict[str, Any]:
    """Check what parsers let pass: names of families that repeat, and histograms that do not add up."""
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for family in families:
        assert family.documentation, family.name
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in seen, key
            seen.add(key)
        if family.type != "histogram":
            continue
        series: dict[tuple[tuple[str, str], ...], list[float]] = {}
        counts: dict[tuple[tuple[str, str], ...], float] = {}
        for sample in family.samples:
            own = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "le"))
            if sample.name.endswith("_bucket"):
                series.setdefault(own, []).append(sample.value)
            elif sample.name.endswith("_count"):
                counts[own] = sample.value
        assert series.keys() == counts.keys()
        assert all(values == sorted(values) and values[-1] == counts[own] for own, values in series.items())
    return {family.name: family for family in families}


def test_the_text_format(served: str) -> None:
    kind, text = send(f"{served}/metrics", accept=TEXT)
    assert kind.startswith("text/plain")
    found = check(list(parse_text(text)))
    [running] = found["vllm:num_requests_running"].samples
    assert running.value >= 0
    assert sum(sample.value for sample in found["vllm:prompt_tokens"].samples) > 0


def test_openmetrics(served: str) -> None:
    kind, text = send(f"{served}/metrics", accept=OPEN)
    assert kind.startswith("application/openmetrics-text"), kind
    assert text.endswith("# EOF\n")
    found = check(list(parse_open(text)))
    assert sum(sample.value for sample in found["vllm:generation_tokens"].samples) > 0


def test_a_scraper_that_prefers_openmetrics(served: str) -> None:
    """Prometheus asks for several formats, with weights."""
    accept = "application/openmetrics-text;version=1.0.0;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,"
    kind, text = send(f"{served}/metrics", accept=f"{accept}text/plain;version=0.0.4;q=0.4,*/*;q=0.1")
    check(list((parse_open if kind.startswith("application/openmetrics") else parse_text)(text)))
