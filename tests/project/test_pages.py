"""The code on the pages of ``docs`` runs: files are written to an empty folder, and commands print what a page shows.

On a page, a block of Python with a title is a file::

    ```python title="mine.py"

and a block of ``console`` holds commands after ``$``, each with lines that its output contains, in this order. Runs of
spaces count as one space, and ``...`` stands for any text within a line.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from manylora.cli.app import main

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/manylora/*/README.md")])
MOST_LINES = 150
LONGEST_EXAMPLE = 10
GENERATED = {"docs/options.md", "docs/api-fields.md"}
"""Pages that are made from the code, or are a table that a test holds against it."""


class Command(NamedTuple):
    """A command of a page, the lines of its output, and the files that the page has shown before it."""

    words: list[str]
    expected: list[str]
    files: dict[str, str]


def blocks_of(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yield language, title (or an empty text) and content of each block of code."""
    for match in BLOCK.finditer(page.read_text()):
        yield match[1], match[2] or "", match[3]


def commands_of(page: Path) -> list[Command]:
    """Return the commands in the ``console`` blocks of a page, in order."""
    files: dict[str, str] = {}
    commands: list[Command] = []
    for language, title, content in blocks_of(page):
        if language == "python" and title:
            files = files | {title: content}
        elif language == "console":
            for line in content.splitlines():
                if line.startswith("$ "):
                    commands.append(Command(shlex.split(line.removeprefix("$ ")), [], files))
                else:
                    commands[-1].expected.append(line)
    return commands


def is_shown(expected: list[str], output: str) -> bool:
    """Return whether the lines stand in the output, in this order."""
    parts = [re.escape(" ".join(part.split())) for line in expected for part in line.split("...")]
    return re.search(".*?".join(parts), " ".join(output.split())) is not None


COMMANDS = [(page, command) for page in PAGES for command in commands_of(page)]


@pytest.mark.parametrize(
    ("page", "command"), COMMANDS, ids=[f"{page.stem}-{index}" for index, (page, _) in enumerate(COMMANDS)]
)
def test_commands_print_what_their_page_shows(
    page: Path,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wide_terminal: None,
) -> None:
    for name, content in command.files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", command.words)
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    assert is_shown(command.expected, printed.out + printed.err), printed.out + printed.err
    assert ("error:" in printed.err) == any(line.startswith("error:") for line in command.expected)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_that_code_imports_exist(page: Path) -> None:
    for language, _, content in blocks_of(page):
        if language == "python":
            for node in ast.walk(ast.parse(content)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("manylora"):
                    module = importlib.import_module(str(node.module))
                    assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize(
    "page", [ROOT / "docs" / f"own-{kind}.md" for kind in ("policy", "eviction", "router")], ids=lambda page: page.stem
)
def test_the_first_example_of_ones_own_is_short(page: Path) -> None:
    first = next(content for language, title, content in blocks_of(page) if language == "python" and title)
    assert len([line for line in first.splitlines() if line.strip()]) <= LONGEST_EXAMPLE


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_short(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    assert name in GENERATED or len(page.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", sorted(ROOT.glob("bench/results/*.md")), ids=lambda page: page.stem)
def test_results_name_their_command(page: Path) -> None:
    assert re.search(r"bench/\w+\.(py|sh)|`make [a-z]+|`manylora [a-z]+|`pytest ", page.read_text())


@cache
def tree() -> frozenset[str]:
    """Return every file and folder below the places that pages name files from, as they may be written there."""
    found: set[str] = set()
    for base in (ROOT, ROOT / "src" / "manylora"):
        for folder in (
            "src",
            "tests",
            "bench",
            "docs",
            "examples",
            "deploy",
            "core",
            "execution",
            "serving",
            "route",
            "vllm",
        ):
            found.update(str(path.relative_to(base)) for path in (base / folder).rglob("*"))
        for folder in ("functions", "lab", "cli", "demo"):
            found.update(str(path.relative_to(base)) for path in (base / folder).rglob("*"))
    return frozenset(found | {path.rpartition("/")[2] for path in found})


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_files_that_pages_name_exist(page: Path) -> None:
    """A file of code in backticks, from the root, from ``src/manylora`` or by its bare name, or a folder."""
    named = re.findall(r"`((?:[\w.-]+/)*[\w-]+\.py|(?:[\w-]+/){2,})`", page.read_text())
    known = tree() | {title for _, title, _ in blocks_of(page)}
    if page.name == "README.md":
        known |= {str(path.relative_to(page.parent)) for path in page.parent.rglob("*")}
    assert {name for name in named if name.rstrip("/") not in known} == set()


def test_the_page_of_packages_has_a_line_for_each_part() -> None:
    page = (ROOT / "docs" / "packages.md").read_text()
    for room in ("core", "execution", "serving", "route", "vllm", "functions", "lab"):
        section = page.partition(f"\n## `{room}`\n")[2].partition("\n## ")[0]
        inside = (ROOT / "src" / "manylora" / room).iterdir()
        parts = {path.stem for path in inside if not path.name.startswith("_") and path.suffix != ".md"}
        assert parts - set(re.findall(r"`([\w]+)`", section)) == set(), room


@pytest.mark.parametrize("room", ["core", "execution", "serving", "route", "vllm", "functions", "lab"])
def test_the_picture_in_a_readme_has_each_part_of_the_room(room: str) -> None:
    folder = ROOT / "src" / "manylora" / room
    picture = (folder / "README.md").read_text().split("```")[1]
    parts = {path.stem for path in folder.iterdir() if not path.name.startswith("_") and path.suffix != ".md"}
    assert parts - set(re.findall(r"\w+", picture)) == set()
