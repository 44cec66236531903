"""Names and reasons that tenants write: they forge no line of the log and show no path of the server."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from manylora.core.logs import LineFormatter
from manylora.serving.http.errors import hide_paths


def test_a_logged_value_begins_no_line() -> None:
    record = logging.LogRecord(
        "x", logging.INFO, "", 0, "name=%s", ("a\n2026 INFO api forged\u2028\x1b[2J\ud800",), None
    )
    line = LineFormatter("%(levelname)s %(message)s").format(record)
    assert line == "INFO name=a\\n2026 INFO api forged\\u2028\\x1b[2J\\ud800"


def test_a_traceback_keeps_its_lines() -> None:
    try:
        raise ValueError("x")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "broke", (), (type(error), error, error.__traceback__))
    assert len(LineFormatter("%(message)s").format(record).splitlines()) > 2


def test_a_reader_process_escapes_its_lines() -> None:
    code = """import logging, os, {module} as here
from multiprocessing.connection import Pipe
there, pipe = Pipe()
there.close()
try: here.main(os.dup(pipe.fileno()))
except OSError: pass
logging.getLogger("x").warning("name=%s", "a\\nWARNING forged")
"""
    for module in ("reader_service", "registry_process"):
        program = code.format(module=f"manylora.execution.storage.{module}")
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
        assert done.stderr.count("\n") == 1 and "a\\nWARNING forged" in done.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "[Errno 2] No such file: '/srv/lora/x/adapter_model.safetensors'",
            "[Errno 2] No such file: 'adapter_model.safetensors'",
        ),
        ("adapter 'a/b': 3/4 of /tmp/one/two is missing", "adapter 'a/b': 3/4 of two is missing"),
        ("'/srv/my adapters/t/x' and '/srv/y z' are gone", "'x' and 'y z' are gone"),
        ("see https://host/a/b and/or try again", "see https://host/a/b and/or try again"),
    ],
)
def test_paths_are_hidden(text: str, shown: str) -> None:
    assert hide_paths(text) == shown
