"""`manylora demo`, end to end: two processes, HTTP, twelve adapters, and every answer right."""

from __future__ import annotations

import subprocess
import sys

import pytest
from demo_tasks import is_held_out

from manylora.cli.commands.demo import PROMPTS
from manylora.demo import TASKS


@pytest.mark.slow
def test_the_demo_without_a_terminal_answers_rightly_and_ends() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "manylora", "demo"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("✓") == 3 * len(TASKS) == 36
    assert all(is_held_out(prompt) for prompt in PROMPTS), "answers that were learned by heart prove nothing"
    assert "✗" not in result.stdout
    assert "39 requests in flight at once over 12 adapters and the base" in result.stdout
    assert "no terminal here" in result.stderr
