"""The step log of a server: a disk that is full ends it alone, and one that cannot be written stops the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from reciter import engine_config

from manylora.core.config import ServerConfig
from manylora.core.errors import ConfigError
from manylora.serving.server import BackgroundServer

CONFIG = ServerConfig(port=0, in_process=True)
BUILDER = "reciter:reciter_parts"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_log_and_not_the_engine(tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also while an engine starts: an engine that is lost comes back on a full disk."""
    engine = replace(engine_config(tokenizer), step_log="/dev/full")
    with BackgroundServer(engine, CONFIG, builder=BUILDER) as server:
        for _ in range(3):
            body = {"model": "base", "prompt": "x", "max_tokens": 2}
            assert httpx.post(server.url + "/v1/completions", json=body, timeout=30).status_code == 200
        assert "manylora_engine_restarts_total 0.0" in httpx.get(server.url + "/metrics").text
    assert caplog.text.count("step_log_ended") == 1


def test_a_log_that_cannot_be_written_is_refused_at_start(tokenizer: Path, tmp_path: Path) -> None:
    engine = replace(engine_config(tokenizer), step_log=str(tmp_path / "missing" / "steps.jsonl"))
    with (
        pytest.raises(ConfigError, match=r"step_log = .*cannot be written"),
        BackgroundServer(engine, CONFIG, builder=BUILDER),
    ):
        pytest.fail("it started")
