"""The metrics of all backbones as one text, for a Prometheus that asks an agent once."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from manylora.serving.metrics.merged import Scraped, merge_family

__all__ = ["merged_backbones"]


def merged_backbones(texts: Mapping[str, bytes]) -> bytes:
    """Return the texts of backbones, by name, as one: their series get the label ``backbone``.

    Those of the process are the same in all, and have no such label.
    """
    families: dict[str, Metric] = {}
    for number, (backbone, text) in enumerate(texts.items()):
        for family in text_string_to_metric_families(text.decode()):
            is_of_process = family.name.startswith("process_")
            if is_of_process and number:
                continue
            merge_family(families, family, {} if is_of_process else {"backbone": backbone})
    return generate_latest(Scraped(families.values()))
