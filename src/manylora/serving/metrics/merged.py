"""Metrics of several engines, backbones or workers as one: their series are told apart by a label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

__all__ = ["Scraped", "merge_family"]


class Scraped(Collector):
    """The metrics of one scrape, as prometheus-client takes them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._families


def merge_family(merged: dict[str, Metric], family: Metric, labels: Mapping[str, str]) -> None:
    """Add a family's samples, each with more labels, to the merged one of its name, which is made if there is none."""
    into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
    for sample in family.samples:
        into.add_sample(sample.name, {**sample.labels, **labels}, sample.value)
