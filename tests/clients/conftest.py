"""A live server of the demo models for clients of other projects, each in an environment of its own.

Those environments hold no manylora: the server runs on the interpreter that ``MANYLORA_PYTHON`` names, and this folder
imports pytest and the client alone. `bench/clients.py` runs each file in its client's environment; in any other, a file
whose client is missing is skipped.

Answers are certain: the adapter ``upper`` answers ``hello world`` with ``HELLO WORLD``, and a grammar forces calls and
objects, whose fields have few values.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the demo base and its twelve adapters, without ``/v1``."""
    command = [os.environ.get("MANYLORA_PYTHON", sys.executable), "-m", "manylora", "serve", "demo", "--port", "0"]
    command += ["--tool-call-parser", "hermes", "--chat-template", str(Path(__file__).with_name("chat_template.jinja"))]
    log = tmp_path_factory.mktemp("server") / "log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with (
        log.open("w") as written,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=written, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            found = re.search(r"http://[\w.]+:\d+", process.stdout.readline())
            assert found is not None, log.read_text()[-3000:]
            yield found.group()
        finally:
            process.terminate()
