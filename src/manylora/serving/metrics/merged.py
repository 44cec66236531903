"""Metrics of several engines, backbones or workers as one: their series are told apart by a label."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

__all__ = ["Scraped", "merge_family", "merged_text"]


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


def merged_text(texts: Mapping[str, bytes], label: str, is_shared: Callable[[Metric], bool]) -> bytes:
    """Return texts of metrics, by name, as one: their series get the name as a label.

    Families that are the same in all texts (``is_shared``) are those of the first, and have no such label.
    """
    families: dict[str, Metric] = {}
    for number, (name, text) in enumerate(texts.items()):
        for family in text_string_to_metric_families(text.decode()):
            if not is_shared(family):
                merge_family(families, family, {label: name})
            elif not number:
                merge_family(families, family, {})
    return generate_latest(Scraped(families.values()))
