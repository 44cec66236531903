"""The request log: a line per finished request, sizes and no text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from reciter import engine_config

from manylora.core.config import ServerConfig
from manylora.core.errors import ConfigError
from manylora.core.scheduling.prediction.request_log import LoggedRequest
from manylora.serving.server import BackgroundServer, LoraModule

CONFIG = ServerConfig(port=0, in_process=True)
BUILDER = "reciter:reciter_parts"


def test_finished_requests_are_logged_by_size(tokenizer: Path, lora_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    engine = replace(engine_config(tokenizer), request_log=str(log))
    with BackgroundServer(engine, CONFIG, [LoraModule("m", str(lora_dir / "m"))], builder=BUILDER) as server:
        for model, num_tokens in ((engine.model.served_model_name, 3), ("m", 5)):
            body = {"model": model, "prompt": "secret", "max_tokens": num_tokens, "ignore_eos": True}
            assert httpx.post(server.url + "/v1/completions", json=body, timeout=30).status_code == 200
        refused = httpx.post(server.url + "/v1/completions", json={"model": "nobody", "prompt": "x"}, timeout=30)
        assert refused.status_code == 404
    records = [LoggedRequest(**json.loads(line)) for line in log.read_text().splitlines()]
    assert [(one.adapter, one.prompt_tokens, one.output_tokens, one.finish) for one in records] == [
        ("", 6, 3, "length"),
        ("m", 6, 5, "length"),
    ]
    assert "secret" not in log.read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_logs_and_not_the_engine(tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also while an engine starts: an engine that is lost comes back on a full disk."""
    engine = replace(engine_config(tokenizer), request_log="/dev/full", step_log="/dev/full")
    with BackgroundServer(engine, CONFIG, builder=BUILDER) as server:
        for _ in range(3):
            body = {"model": "base", "prompt": "x", "max_tokens": 2}
            assert httpx.post(server.url + "/v1/completions", json=body, timeout=30).status_code == 200
        assert "manylora_engine_restarts_total 0.0" in httpx.get(server.url + "/metrics").text
    assert caplog.text.count("request_log_ended") == caplog.text.count("step_log_ended") == 1


def test_a_log_that_cannot_be_written_is_refused_at_start(tokenizer: Path, tmp_path: Path) -> None:
    engine = replace(engine_config(tokenizer), request_log=str(tmp_path / "missing" / "requests.jsonl"))
    with (
        pytest.raises(ConfigError, match=r"request_log = .*cannot be written"),
        BackgroundServer(engine, CONFIG, builder=BUILDER),
    ):
        pytest.fail("it started")
