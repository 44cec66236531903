"""The size of the house: walks, functions, classes and constructors have ceilings that only go down.

A change that makes one of these numbers smaller lowers its ceiling here; none may raise it.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "manylora"

MOST_FILES = {"chat": 57, "adapter": 28, "simulated": 48, "routed": 15}
"""Files of ``src`` that a walk of ``bench/walks.py`` enters."""

LONGEST_FUNCTION = 60
LONGEST_CLASS = 300
MOST_ARGUMENTS = 8

LONG_FUNCTIONS: dict[str, int] = {
    "execution/kernels/triton/attention.py:attend": 103,  # a kernel: half is its arguments and their shapes
}
"""Lines of the functions that are longer, until they are cut."""

LONG_CLASSES: dict[str, int] = {}
MANY_ARGUMENTS: dict[str, int] = {}


class Definition(NamedTuple):
    """A class or function."""

    place: str  # its file and name
    name: str
    is_class: bool
    is_top: bool  # it stands at the top of its file
    num_lines: int
    num_arguments: int  # of a class: of its constructor


@cache
def definitions() -> list[Definition]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                is_class = isinstance(node, ast.ClassDef)
                inits = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
                arguments = [one.args.args + one.args.kwonlyargs for one in inits if is_class]
                found.append(
                    Definition(
                        place=f"{path.relative_to(SOURCE)}:{node.name}",
                        name=node.name,
                        is_class=is_class,
                        is_top=node in tree.body,
                        num_lines=node.end_lineno - node.lineno + 1,
                        num_arguments=max(map(len, arguments), default=1) - 1,
                    )
                )
    return found


def test_every_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for one in definitions():
        if one.is_top and one.is_class:  # a nested one, as a policy's Options, is named by its class
            places[one.name].append(one.place)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_functions_are_short() -> None:
    lengths = {one.place: one.num_lines for one in definitions() if not one.is_class}
    assert {place: n for place, n in lengths.items() if n > LONG_FUNCTIONS.get(place, LONGEST_FUNCTION)} == {}


def test_classes_are_short() -> None:
    lengths = {one.place: one.num_lines for one in definitions() if one.is_class}
    assert {place: n for place, n in lengths.items() if n > LONG_CLASSES.get(place, LONGEST_CLASS)} == {}


def test_constructors_take_few_arguments() -> None:
    counts = {one.place: one.num_arguments for one in definitions() if one.is_class}
    assert {place: n for place, n in counts.items() if n > MANY_ARGUMENTS.get(place, MOST_ARGUMENTS)} == {}


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Return the calls of each walk by file, of a process of their own: they count those of every thread."""
    report = tmp_path_factory.mktemp("walks") / "walks.json"
    command = [sys.executable, "walks.py", "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT / "bench", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(report.read_text())
    return found


@pytest.mark.parametrize("walk", MOST_FILES)
def test_walks_are_short(walked: dict[str, dict[str, int]], walk: str) -> None:
    assert 0 < len(walked[walk]) <= MOST_FILES[walk]
