"""Clients for node: each test of a ``.mjs`` file here, run by node's own runner."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CLIENT = os.environ.get(
    "MANYLORA_NODE_CLIENT", ""
)  # name of the client's file; its packages are in MANYLORA_NODE_MODULES

pytestmark = pytest.mark.skipif(not CLIENT, reason="bench/clients.py names the file, and installs its packages")


def cases() -> list[str]:
    return re.findall(r'^test\("(.+?)"', (HERE / CLIENT).read_text(), re.MULTILINE) if CLIENT else []


@pytest.mark.parametrize("case", cases())
def test_node(url: str, case: str, tmp_path: Path) -> None:
    # node looks for packages beside the file, not in the current folder.
    shutil.copy(HERE / CLIENT, tmp_path)
    (tmp_path / "node_modules").symlink_to(os.environ["MANYLORA_NODE_MODULES"])
    command = ["node", "--test", f"--test-name-pattern=^{re.escape(case)}$", str(tmp_path / CLIENT)]
    done = subprocess.run(command, env={**os.environ, "URL": url}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "# pass 1" in done.stdout, done.stdout[-2000:]
