"""The contents of an adapter's folder for a terminal, and its size on a base."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from manylora.cli.views.terminal import out
from manylora.core.adapters.report import AdapterReport
from manylora.core.adapters.request_files import is_same_base, names_of_base
from manylora.core.adapters.shape import BaseShape

__all__ = ["show_report"]


def show_report(report: AdapterReport, base: BaseShape | None) -> None:
    """Print the report of a folder; with a base, whether it fits and its size there."""
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="cyan")
    facts.add_column(overflow="fold")

    facts.add_row("folder", report.path)
    facts.add_row("trained on", report.base_model or "unknown")
    if base is not None and report.base_model and not is_same_base(report.base_model, names_of_base(base.name)):
        facts.add_row("", Text("not the name of this model: check that it is the same one", "yellow"))
    facts.add_row("rank", _ranks(report))
    facts.add_row(
        "scale", _range([module.scale for module in report.modules]) + (" (rsLoRA)" if report.use_rslora else "")
    )
    facts.add_row("modules", f"{len(report.modules)}: {', '.join(report.target_modules)}")
    dtypes = ", ".join(sorted({module.dtype for module in report.modules}))
    facts.add_row("weights", f"{sum(module.num_elements for module in report.modules):,} {dtypes}")
    facts.add_row("on disk", _size(report.disk_bytes))
    for title, text in _extras(report):
        facts.add_row(title, text)
    if report.version is not None and base is not None:
        version, page = report.version, base.page
        facts.add_row("in host memory", f"{_size(version.host_bytes)} as {page.dtype}")
        facts.add_row("on the device", f"{version.num_pages} pages of {_size(page.num_bytes)}")
        facts.add_row("version", version.key)
    if base is not None:
        fits = Text("yes", "bold green") if report.fits else Text.assemble(("no: ", "bold red"), str(report.problem))
        facts.add_row(f"fits {Path(base.name).name}", fits)
    out.print(facts)
    if report.modules:
        _show_modules(report)


def _extras(report: AdapterReport) -> Iterator[tuple[str, str]]:
    """Yield the settings of requests in the folder, and those that have no effect."""
    extras = report.request_files
    if given := extras.defaults.given():
        yield "request defaults", ", ".join(f"{name} {value:g}" for name, value in given.items())
    if extras.chat_template is not None:
        yield "chat template", "its own; served with --trust-adapter-templates if it is not the base's"
    if extras.tokens:
        yield "tokens", f"its tokenizer adds {len(extras.tokens)}; those that the base's lacks are not served"
    for problem in extras.problems:
        yield "not served", problem


def _show_modules(report: AdapterReport) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("module", style="cyan")
    for title in ("how many", "rank", "scale", "weights"):
        table.add_column(title, justify="right")
    for target in report.target_modules:
        modules = [module for module in report.modules if module.name.rpartition(".")[2] == target]
        ranks = _range([module.rank for module in modules])
        scales = _range([module.scale for module in modules])
        weights = sum(module.num_elements for module in modules)
        table.add_row(target, str(len(modules)), ranks, scales, f"{weights:,}")
    out.print(table)


def _ranks(report: AdapterReport) -> str:
    counts = Counter(module.rank for module in report.modules)
    if len(counts) == 1:
        return str(report.rank)
    return ", ".join(f"{rank} ({count} modules)" for rank, count in sorted(counts.items()))


def _range(values: list[int] | list[float]) -> str:
    least, most = min(values), max(values)
    return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**10:,.1f} KiB" if num_bytes < 2**20 else f"{num_bytes / 2**20:,.1f} MiB"
