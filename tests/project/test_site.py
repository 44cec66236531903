"""The site of the documentation: every page is in its navigation, and links lead to the same files as in a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import site_hooks

ROOT = Path(__file__).parents[2]


def test_the_index_links_every_page() -> None:
    """The navigation is made from the index; decisions are reached from their own index."""
    linked = {page for section in site_hooks.navigation()[1:] for pages in section.values() for page in pages}
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    decisions = {page for page in pages if page.startswith("adr/") and page != "adr/README.md"}
    assert pages - decisions - linked == {"index.md"}, "docs/index.md lacks a link to these pages"


def test_links_lead_to_the_places_of_files_on_the_site() -> None:
    text = "[a](../src/manylora/core/README.md#x) ![b](results/cpu.md) [c](../src) [d](https://e.f)\n```\n[g](../h.md)\n```\n"
    assert site_hooks.rewrite_links(text, "docs/memory.md") == (
        "[a](repo/src/manylora/core/README.md#x) ![b](results/cpu.md) c [d](https://e.f)\n```\n[g](../h.md)\n```\n"
    )
    assert site_hooks.rewrite_links("[a](../docs/api.md)", "bench/README.md") == "[a](../../api.md)"


def test_files_that_pages_link_to_are_on_the_site() -> None:
    files = site_hooks.files_outside()
    assert {"SECURITY.md", "bench/results/paging.md", "src/manylora/core/README.md", "Dockerfile"} <= set(files)
    assert not any(file.startswith("docs/") for file in files)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build = pytest.importorskip("mkdocs.__main__", reason="needs the extra docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.setattr(sys, "argv", ["mkdocs"])
        build.cli(
            ["build", "--strict", "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(tmp_path)],
            standalone_mode=False,
        )
    assert (tmp_path / "repo" / "SECURITY.html").exists()
