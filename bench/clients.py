"""Clients of other projects against a live server, each in a virtual environment of its own: `make clients`.

    python bench/clients.py [--quick] [--only NAME,NAME] [--environments DIR]

An environment is made and filled by pip the first time (minutes; lm-eval is the large one), with the newest version
that pip finds, and is used again afterwards. Nothing is installed into `.venv`, on whose interpreter the server runs.
Each client then runs its file of `tests/clients`. Writes `results/clients.json` and `.md`: each client, its version,
each test by its name, and the result. The exit code is 1 if a test fails; a run of some clients writes nothing.
"""

from __future__ import annotations

import os
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
}
"""The packages of each client; the first one's version is shown."""


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


def try_client(name: str, python: Path) -> list[Tried]:
    """Run the tests of a client."""
    package = CLIENTS[name][0].partition("[")[0]
    asked = f"from importlib.metadata import version; print(version({package!r}))"
    version = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()
    tests = ROOT / "tests" / "clients"
    # The project's own pytest settings and fixtures need packages that the environment does not have.
    options = ["-q", "-c", os.devnull, f"--rootdir={tests}", f"--confcutdir={tests}", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [str(python), "-m", "pytest", *options, f"--junitxml={report}"]
        subprocess.run(
            [*command, tests / f"test_{name.replace('-', '_')}.py"],
            env={**os.environ, "MANYLORA_PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=ROOT,
            check=False,
        )
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return [Tried(package, version, _words(case.get("name", "")), _result(case)) for case in cases]


def _words(test: str) -> str:
    name, bracket, parameters = test.removeprefix("test_").partition("[")
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
        "`make clients`: each client in a virtual environment of its own, with the newest version that pip finds, "
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
    names = options.only.split(",") if options.only else ["openai"] if options.quick else list(CLIENTS)
    if unknown := sorted({*names} - {*CLIENTS}):
        parser.error(f"Got --only {unknown[0]!r}, expected some of {', '.join(CLIENTS)}")
    rows: list[Tried] = []
    for name in names:
        print(f"== {name}", flush=True)
        rows += try_client(name, environment(options.environments / name, CLIENTS[name]))
    publish("clients", [asdict(row) for row in rows], page(rows), is_kept=len(names) == len(CLIENTS))
    return 0 if all(row.result == "works" for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
