"""The project as a whole: its public names, and whether its documents are true; `make check` holds its layers."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from cli_runs import app
from options_page import options_page

import manylora
from manylora.cli.options.vllm_flag_table import TRANSLATED, VLLM_FLAGS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "manylora"
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".cfg", ".jinja", ""}
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])
FLAGS_OF_OTHERS = {"--enable-metrics", "--hypothesis-profile", "--prefetch"}
"""Options of SGLang, pytest and S-LoRA that documents name."""
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__main__.py")


def tracked_files() -> Iterator[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    names = listed.stdout.decode().split("\0")[:-1] if listed.returncode == 0 else None
    for path in ROOT.rglob("*") if names is None else map(ROOT.joinpath, names):
        if path.is_file() and ".venv" not in path.parts and path.suffix in TEXT_SUFFIXES:
            yield path


@cache
def public_names(path: Path) -> list[str] | None:
    """Return a module's ``__all__``, ``None`` if it has none."""
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                names: list[str] = ast.literal_eval(value)
                return names
    return None


def names_of(nodes: list[ast.stmt]) -> Iterator[str]:
    """Yield what a module binds at its top level, but for the type checker."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((alias.asname or alias.name).partition(".")[0] for alias in names)
            case ast.Assign() | ast.AnnAssign():
                leaves = (leaf for leaf in ast.walk(node) if isinstance(leaf, ast.Name))
                yield from (leaf.id for leaf in leaves if isinstance(leaf.ctx, ast.Store))
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.If() | ast.Try() | ast.With():
                inner = [*node.body, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())]
                yield from names_of(inner)
                yield from names_of([part for handler in getattr(node, "handlers", ()) for part in handler.body])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_names_that_modules_share_are_public(path: Path) -> None:
    """A module lists its public names, each once, which exist, and imports from others only what they list."""
    tree, listed = ast.parse(path.read_text()), public_names(path)
    assert listed is not None or path.name == "__init__.py", "no __all__"
    assert listed is None or len(listed) == len(set(listed)), "a name twice in __all__"
    names = set(names_of(tree.body))
    if "__getattr__" in names:  # names are made when asked for
        module = importlib.import_module(".".join(path.parent.relative_to(SOURCE.parent).parts))
        names |= {name for name in listed or () if hasattr(module, name)}
    assert set(listed or ()) <= names
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("manylora"):
            continue
        place = SOURCE.parent.joinpath(*str(node.module).split("."))
        origin = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        assert origin.exists(), f"{node.module} does not exist"
        modules = {other.stem for other in place.glob("*")} if place.is_dir() else set()
        private = {alias.name for alias in node.names} - modules - set(public_names(origin) or ())
        assert not private, f"{private} of {node.module} is not in its __all__"


def test_nothing_of_one_machine_or_left_over_is_in_the_tree() -> None:
    patterns = {
        "an absolute path of one machine": r"(?<![\w.~])/(?:work|root|home/\w+|Users/\w+)/\w",
        "something left to do": r"\b(?:TODO|FIXME|XXX)\b",
        "a stub": r"raise NotImplementedError",
    }
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {what}: {match.group()}"
        for path in tracked_files()
        if path != Path(__file__)
        for text in [path.read_text(encoding="utf-8")]
        for what, pattern in patterns.items()
        for match in re.finditer(pattern, text)
    ]
    assert not found, "\n".join(found)


def test_the_page_of_options_is_that_of_the_fields() -> None:
    assert (ROOT / "docs" / "options.md").read_text() == options_page(), "run `make docs`"


def test_no_two_test_files_share_a_name() -> None:
    """Outside packages pytest imports test files by their bare names, so the second of two would not be collected."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]

    assert sorted(names) == sorted(set(names))


def test_the_package_has_every_file_that_its_code_reads() -> None:
    """A wheel holds modules, and those other files that a pattern of the package's data names."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["manylora"]
    named = {pattern: {path for path in SOURCE.glob(pattern) if path.is_file()} for pattern in data}
    assert [pattern for pattern, paths in named.items() if not paths] == [], "a pattern of no file"
    others = {path for path in tracked_files() if path.is_relative_to(SOURCE) and path.suffix not in (".py", ".md")}
    assert others - set().union(*named.values()) == set()


def test_one_version() -> None:
    assert version("manylora") == manylora.__version__


def test_importing_needs_no_torch() -> None:
    """The command line answers at once, and the package can be asked for its names."""
    code = "import manylora, manylora.cli.app, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@cache
def command_options() -> dict[str, set[str]]:
    """Return the options of every command of the program, by command."""
    group = typer.main.get_command(app)
    options: dict[str, set[str]] = {}

    def visit(command: object, path: str) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            visit(inner, f"{path} {name}".strip())
        options[path] = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}  # type: ignore[attr-defined]

    visit(group, "")
    return options


@cache
def all_flags() -> set[str]:
    """Return the options of every command, of vLLM's server and of the scripts in bench."""
    scripts = "".join(path.read_text() for path in (ROOT / "bench").glob("*.py"))
    ours = set().union(*command_options().values())
    vllm = VLLM_FLAGS.keys() | TRANSLATED.keys()
    return ours | vllm | FLAGS_OF_OTHERS | set(re.findall(r'"(--[a-z][a-z0-9-]*)"', scripts))


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_are_true(path: Path) -> None:
    """Links and their headings lead somewhere, commands exist, and so do their options."""
    text = path.read_text()
    links = (found.partition("#") for found in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text))
    for link, _, heading in links:
        assert (path.parent / link).exists(), f"broken link: {link}"
        page = path.parent / link if link else path
        assert not heading or page.suffix != ".md" or heading in anchors_of(page), f"no such heading: {link}#{heading}"

    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    options = command_options()
    # A command is what stands on its own line in a block of code, or alone in backticks.
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *re.findall(r"`([^`\n]+)`", text)]:
        words = line.split("#")[0].removeprefix("$ ").split()
        if words[:1] == ["make"] and len(words) > 1:
            assert {word for word in words[1:] if re.fullmatch("[a-z]+", word)} & targets, f"no such target: {line}"
        if words[:1] == ["manylora"] and len(words) > 1 and not words[1].startswith(("-", "0", "1")):
            command = " ".join(words[1:3]) if " ".join(words[1:3]) in options else words[1]
            assert command in options, f"no such command: {line}"
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert given <= options[command], f"no such option: {given - options[command]}"
    flags = set(re.findall(r"`(--[a-z][a-z0-9-]*)", text))
    is_generated = path.name == "options.md"
    assert is_generated or flags <= all_flags(), f"no such option: {flags - all_flags()}"
