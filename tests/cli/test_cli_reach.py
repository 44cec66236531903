"""Every option of a command is read by code that the command reaches: none is accepted and ignored.

The code that a command reaches is that of the functions and classes of its module which its function names, of the
modules which these import or name, and so on. An attribute of a field's name that is read there counts.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import manylora
from manylora.cli.options.fields import Flag
from manylora.cli.options.scenarios import PLACES

ROOT = Path(manylora.__file__).parent


@functools.cache
def tree_of(module: str) -> ast.Module | None:
    if not all(part.isidentifier() for part in module.split(".")):
        return None
    path = ROOT.joinpath(*module.split(".")[1:])
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text())
    return None


def imported_by(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("manylora"):
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("manylora."))
        elif isinstance(node, ast.Constant) and str(node.value).startswith("manylora."):  # of a process, or a builder
            yield str(node.value).partition(":")[0]


def checks_options(method: ast.FunctionDef) -> bool:
    """Whether a method checks the options of its class; with arguments it is given the options of another."""
    return method.name == "__post_init__" and len(method.args.args) == 1


@functools.cache
def facts_of(module: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the modules that a module imports, and the attributes that it reads."""
    tree = tree_of(module)
    assert tree is not None
    imported = tuple(dict.fromkeys(one for one in imported_by(tree) if tree_of(one) is not None))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and checks_options(node):
            node.body = []
    read = {one.attr for one in ast.walk(tree) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Load)}
    return imported, frozenset(read)


def read_from(trees: Iterable[ast.AST]) -> set[str]:
    """Return the attributes that are read in all modules which parts of a command's module reach."""
    waiting = [one for tree in trees for one in imported_by(tree) if tree_of(one) is not None]
    seen, read = set(waiting), set[str]()
    while waiting:
        module = waiting.pop()
        if module.startswith("manylora.cli."):  # it shows options
            continue
        imported, attributes = facts_of(module)
        read |= attributes
        new = [one for one in imported if one not in seen]
        seen.update(new)
        waiting += new
    return read


def used_by(tree: ast.Module, name: str) -> list[ast.AST]:
    """Return a function of a module, and the functions and classes of the module that it names, and these name."""
    parts = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    reached = [name]
    for one in reached:  # it grows meanwhile
        found = {node.id for node in ast.walk(parts[one]) if isinstance(node, ast.Name)}
        reached += [other for other in parts if other in found and other not in reached]
    for part in reached:
        for method in parts[part].body:
            if isinstance(method, ast.FunctionDef) and checks_options(method):
                method.body = []
    return [parts[one] for one in reached]


def commands() -> Iterator[tuple[str, str]]:
    """Return the functions of commands with options of configurations, with their modules."""
    for file in sorted((ROOT / "cli" / "commands").glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(one, ast.Call) and getattr(one.func, "id", "") == "with_flags" for one in node.decorator_list
            ):
                yield f"manylora.cli.commands.{file.stem}", node.name


def field_of(flag: Flag) -> str:
    """Return the name of the field that a flag sets: its own, or that of a scenario."""
    keys = PLACES.get(flag.owner)
    return flag.field.name if keys is None or isinstance(keys, str) else keys[flag.field.name].rpartition(".")[2]


@pytest.mark.parametrize(("module", "name"), list(commands()))
def test_no_option_is_accepted_and_ignored(module: str, name: str) -> None:
    command = getattr(importlib.import_module(module), name)
    flags: tuple[Flag, ...] = command.flags
    tree = tree_of(module)
    assert tree is not None
    reached = used_by(tree, name)
    own = {one.attr for part in reached for one in ast.walk(part) if isinstance(one, ast.Attribute)}
    read = own | read_from([*reached, *(one for one in tree.body if isinstance(one, ast.ImportFrom))])
    assert flags
    assert not [
        f"{flag.spelled} ({flag.owner.__name__}.{flag.field.name})" for flag in flags if field_of(flag) not in read
    ]
