"""Cells of `manylora top`, for wide and for narrow terminals."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from rich.text import Text

from manylora.core.engine.status import EngineStats
from manylora.serving.metrics.status_report import Latency, Percentiles

__all__ = ["STATE_STYLES", "as_seconds", "as_size", "as_span", "known", "memory_lines", "p99s"]

BAR_WIDTH = 60
OWNERS = (("KV", "█", "cyan"), ("prefix", "▓", "blue"), ("adapters", "▒", "magenta"), ("free", "·", "dim"))
STATE_STYLES = {"serving": "bold green", "active": "green", "loading": "yellow", "evicting": "red"}


def memory_lines(stats: EngineStats) -> tuple[Text, Text]:
    """Return a bar of the pages by owner, and its legend."""
    pages = (stats.num_kv_pages, stats.num_prefix_pages, stats.num_adapter_pages, stats.num_free_pages)
    bar, legend = Text(), Text()
    for (name, mark, style), cells, count in zip(OWNERS, _shares(pages, BAR_WIDTH), pages, strict=True):
        bar.append(mark * cells, style)
        legend.append(f"{mark} ", style)
        legend.append(f"{name} {count:,} ({count / stats.num_pages:.0%})  ")
    return bar, legend


def p99s(latency: Latency) -> tuple[str, str]:
    """Return the P99 of the time to first token and between tokens; empty without a measurement."""

    def p99(durations: Percentiles | None) -> str:
        return "" if durations is None else as_seconds(durations.p99)

    return p99(latency.ttft_s), p99(latency.inter_token_s)


def _shares(parts: Sequence[int], width: int) -> list[int]:
    """Divide ``width`` cells in proportion to ``parts``; the largest remainders round up."""
    total = sum(parts)
    exact = [part * width / total for part in parts]
    cells = [floor(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: cells[index] - exact[index])
    for index in by_remainder[: width - sum(cells)]:
        cells[index] += 1
    return cells


def known(value: int | None) -> str:
    """Return a number, or a dash."""
    return "-" if value is None else f"{value:,}"


def as_seconds(value_s: float) -> str:
    """Return a duration in its unit."""
    if value_s < 1e-3:
        return f"{value_s * 1e6:.0f} µs"
    if value_s < 1.0:
        value_ms = value_s * 1e3
        return f"{value_ms:.{2 if value_ms < 10 else 1 if value_ms < 100 else 0}f} ms"
    return f"{value_s:.2f} s" if value_s < 100 else as_span(value_s)


def as_span(seconds: float) -> str:
    """Return a duration in its two largest units."""
    left = max(0, int(seconds))
    days, hours, minutes = left // 86400, left // 3600 % 24, left // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left % 60} s" if minutes else f"{left} s"


def as_size(num_bytes: int) -> str:
    """Return bytes in their unit."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"
