"""Clients of other projects against a live server, each in a virtual environment of its own: `make clients`.

    python bench/clients.py [--quick] [--only NAME,NAME] [--environments DIR]

An environment is made and filled by pip, or by npm, the first time (minutes; lm-eval is the large one), with the newest
version found, and is used again afterwards. Nothing is installed into `.venv`, on whose interpreter the server runs.
Clients for node are left out where there is no npm.
Each client then runs its file of `tests/clients`. Writes `results/clients.json` and `.md`: each client, its version,
each test by its name, and the result. The exit code is 1 if a test fails; a run of some clients writes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from publishing import arguments, publish, table

ROOT = Path(__file__).resolve().parent.parent
CLIENTS: Mapping[str, tuple[str, ...]] = {
    "openai": ("openai",),
    "litellm": ("litellm", "mcp"),  # its responses import mcp
    "langchain": ("langchain-openai",),
    "instructor": ("instructor",),
    "pydantic-ai": ("pydantic-ai-slim[openai]",),
    "lm-eval": ("lm-eval[api]", "transformers"),
    "trl": ("trl", "peft", "requests"),
    "litellm-proxy": ("litellm[proxy]", "openai"),
    "llama-index": ("llama-index-llms-openai-like",),
    "openai-agents": ("openai-agents",),
    "smolagents": ("smolagents[openai]",),
    "llm": ("llm",),
    "guidellm": ("guidellm",),
    "prometheus": ("prometheus-client",),
}
"""The packages of each client; the first one's version is shown."""
NODE_CLIENTS: Mapping[str, tuple[str, ...]] = {
    "openai.mjs": ("openai", "zod"),
    "ai_sdk.mjs": ("ai", "@ai-sdk/openai-compatible", "zod"),
}
"""The same of clients for node, by their files."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One test of a client, by its package: the name in words, and ``works`` or the reason why it does not."""

    client: str
    version: str
    tried: str
    result: str


def environment(folder: Path, packages: Sequence[str]) -> Path:
    """Return the interpreter of an environment with the packages, made at the first call."""
    python, mark = folder / "bin" / "python", folder / ".installed"
    wanted = " ".join(packages)
    if not mark.exists() or mark.read_text() != wanted:
        print(f"Installing {wanted} into {folder}", flush=True)
        venv.create(folder, clear=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        subprocess.run([*pip, "pytest", *packages], check=True)
        mark.write_text(wanted)
    return python


def try_client(name: str, environments: Path) -> list[Tried]:
    """Run the tests of a client in its environment, which is made the first time."""
    package = CLIENTS[name][0]
    python = environment(environments / name, CLIENTS[name])
    asked = f"from importlib.metadata import version; print(version({package.partition('[')[0]!r}))"
    version = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()
    return run_tests(python, f"test_{name.replace('-', '_')}.py", package, version)


def try_node_client(file: str, environments: Path) -> list[Tried]:
    """Run the tests of a client for node, whose packages npm installs the first time."""
    python, folder = environment(environments / "node", ()), environments / file.replace(".", "-")
    package, *_ = packages = NODE_CLIENTS[file]
    if not (folder / "node_modules").exists():
        print(f"Installing {' '.join(packages)} into {folder}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(folder)]
        subprocess.run([*npm, *packages], check=True)
    version = json.loads((folder / "node_modules" / package / "package.json").read_text())["version"]
    asked = {"MANYLORA_NODE_CLIENT": file, "MANYLORA_NODE_MODULES": str((folder / "node_modules").resolve())}
    return run_tests(python, "test_node.py", f"{package} for node", version, **asked)


def run_tests(python: Path, file: str, package: str, version: str, **environ: str) -> list[Tried]:
    """Run a file of tests of a client's package."""
    tests = ROOT / "tests" / "clients"
    # The project's own pytest settings and fixtures need packages that the environment does not have.
    options = ["-q", "-c", os.devnull, f"--rootdir={tests}", f"--confcutdir={tests}", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [str(python), "-m", "pytest", *options, f"--junitxml={report}"]
        subprocess.run(
            [*command, tests / file],
            env={**os.environ, **environ, "MANYLORA_PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=ROOT,
            check=False,
        )
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return [Tried(package, version, _words(case.get("name", "")), _result(case)) for case in cases]


def _words(test: str) -> str:
    name, bracket, parameters = test.removeprefix("test_").partition("[")
    if name == "node":
        return parameters[:-1]
    return name.replace("_", " ") + (f" ({parameters[:-1]})" if bracket else "")


def _result(case: ElementTree.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            message = (found.get("message") or "").partition("\n")[0][:200]
            return f"{kind}: {message}".replace("|", "\\|")
    return "works"


def page(rows: Sequence[Tried]) -> str:
    """Return the page of all tests."""
    num_working = sum(row.result == "works" for row in rows)
    lines = [
        "# Clients of other projects",
        "",
        "`make clients`: each client in an environment of its own, with the newest version that pip or npm finds, "
        "against `manylora serve demo`. Calls and objects are forced by a grammar, and texts are those of the demo's "
        "adapters, so that every answer is certain. The tests are in `tests/clients`. "
        f"{num_working} of {len(rows)} work.",
        "",
    ]
    cells = [[f"{row.client} {row.version}", row.tried, row.result] for row in rows]
    return "\n".join([*lines, *table(["client", "tried", "result"], cells, left=3)])


def main() -> int:
    """Try all clients."""
    parser = arguments(__doc__, quick="only openai's client")
    parser.add_argument("--only", metavar="NAME,NAME", help="these alone; writes nothing")
    parser.add_argument("--environments", type=Path, default=ROOT / ".clients", metavar="DIR")
    options = parser.parse_args()
    known = [*CLIENTS, *(NODE_CLIENTS if shutil.which("npm") else ())]
    names = options.only.split(",") if options.only else ["openai"] if options.quick else known
    if unknown := sorted({*names} - {*known}):
        parser.error(f"Got --only {unknown[0]!r}, expected some of {', '.join(known)}")
    rows: list[Tried] = []
    for name in names:
        print(f"== {name}", flush=True)
        attempt = try_node_client if name in NODE_CLIENTS else try_client
        rows += attempt(name, options.environments)
    is_kept = len(names) == len(CLIENTS) + len(NODE_CLIENTS)
    publish("clients", [asdict(row) for row in rows], page(rows), is_kept=is_kept)
    return 0 if all(row.result == "works" for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
