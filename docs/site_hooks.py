"""Hooks of the site that ``mkdocs.yml`` describes: its navigation, and the files outside ``docs`` that pages link to.

Pages are written to be read in a checkout, so they link to READMEs, results and code beside ``docs``. A site has the
folder ``docs`` alone. Here every file that a page links to, and that such a file links to in turn, becomes a part of
the site below ``repo/``: Markdown as a page, others as they are. A link to a folder becomes plain text.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
INDEX = "docs/index.md"


def place_on_site(path: str) -> str:
    """Return the place on the site of a file of the repository, both relative and with ``/``."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repo/{path}"


def target_of(link: str, page: str) -> str:
    """Return the file of the repository that a link on a page leads to."""
    return os.path.normpath(os.path.join(os.path.dirname(page), link))


def links_of(page: str) -> list[str]:
    """Return the files of the repository that a page links to, in order."""
    text = FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return [target_of(match[3], page) for match in LINK.finditer(text)]


def files_outside() -> list[str]:
    """Return the files outside ``docs`` that pages of the site link to, directly or over each other."""
    waiting = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
    seen = set(waiting)
    while waiting:
        for target in links_of(waiting.pop()):
            if target not in seen and not target.startswith("..") and (ROOT / target).is_file():
                seen.add(target)
                if target.endswith(".md"):
                    waiting.append(target)
    return sorted(target for target in seen if not target.startswith("docs/"))


def rewrite_links(text: str, page: str) -> str:
    """Return a page's text with each link relative to the page's place on the site."""

    def rewrite(match: re.Match[str]) -> str:
        target = target_of(match[3], page)
        if (ROOT / target).is_dir():
            return match[2]
        place = os.path.relpath(place_on_site(target), os.path.dirname(place_on_site(page)))
        return f"{match[1]}[{match[2]}]({place}{match[4] or ''})"

    blocks = FENCED.split(text)
    return "".join(block if block.startswith("```") else LINK.sub(rewrite, block) for block in blocks)


def navigation() -> list[Any]:
    """Return the site's navigation: the sections of the index, each with the pages that it links to."""
    sections: list[Any] = ["index.md"]
    for section in re.split(r"^## ", (ROOT / INDEX).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        targets = dict.fromkeys(target_of(match[3], INDEX) for match in LINK.finditer(section))
        sections.append({title: [place_on_site(target) for target in targets if target.endswith(".md")]})
    return sections


def on_config(config: Any) -> Any:
    """Set the navigation, and make anchors of headings as GitHub does."""
    config.nav = navigation()
    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda text, separator: re.sub(
        r"[^\w -]", "", text.lower()
    ).replace(" ", separator)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside ``docs``."""
    from mkdocs.structure.files import File

    for path in files_outside():
        files.append(File.generated(config, place_on_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page."""
    place = page.file.src_uri
    return rewrite_links(markdown, place.removeprefix("repo/") if place.startswith("repo/") else f"docs/{place}")
