"""The size of the house: walks, functions, classes and constructors have ceilings that only go down.

A change that makes one of these numbers smaller lowers its ceiling here; none may raise it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

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


def definitions() -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Yield each class and function with its file and name, and whether it stands at the top of its file."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(SOURCE)}:{node.name}", node, node in tree.body


def num_lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a definition."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_every_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for place, node, is_top in definitions():
        if is_top and isinstance(node, ast.ClassDef):  # a nested one, as a policy's Options, is named by its class
            places[node.name].append(place)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_functions_are_short() -> None:
    lengths = {place: num_lines(node) for place, node, _ in definitions() if not isinstance(node, ast.ClassDef)}
    assert {place: n for place, n in lengths.items() if n > LONG_FUNCTIONS.get(place, LONGEST_FUNCTION)} == {}


def test_classes_are_short() -> None:
    lengths = {place: num_lines(node) for place, node, _ in definitions() if isinstance(node, ast.ClassDef)}
    assert {place: n for place, n in lengths.items() if n > LONG_CLASSES.get(place, LONGEST_CLASS)} == {}


def test_constructors_take_few_arguments() -> None:
    counts: dict[str, int] = {}
    for place, node, _ in definitions():
        if not isinstance(node, ast.ClassDef):
            continue
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                counts[place] = len(inner.args.args) + len(inner.args.kwonlyargs) - 1
    assert {place: n for place, n in counts.items() if n > MANY_ARGUMENTS.get(place, MOST_ARGUMENTS)} == {}


@pytest.mark.parametrize("walk", MOST_FILES)
def test_walks_are_short(walk: str) -> None:
    """In a process of its own: the walk counts the calls of every thread."""
    program = f"import walks; print(len(walks.WALKS[{walk!r}]()))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT / "bench", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) <= MOST_FILES[walk]
