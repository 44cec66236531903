"""Requests drawn from the server's own description of its API: no answer is a failure of the server.

Schemathesis draws them from ``/openapi.json``: bodies that fit the schemas, and bodies that almost do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from reciter import engine_config
from serving import PATIENCE_S

from manylora.core.config import ServerConfig
from manylora.serving.server import BackgroundServer, LoraModule

NUM_EXAMPLES = 2
REFUSED_BY_DESIGN = ("/v1/load_lora_adapter", "/adapters")
"""Routes on which a folder that holds no valid adapter is answered with 500, as vLLM does."""


@pytest.fixture(scope="module")
def url(tokenizer: Path, lora_dir: Path) -> Iterator[str]:
    config = ServerConfig(port=0, in_process=True, lora_dirs=(str(lora_dir),), max_body_bytes=100_000)
    modules = [LoraModule("m", str(lora_dir / "m"))]
    with BackgroundServer(engine_config(tokenizer), config, modules, builder="reciter:reciter_parts") as server:
        yield server.url


def test_no_request_of_the_description_fails_the_server(url: str) -> None:
    schemathesis = pytest.importorskip("schemathesis")  # here: it takes half a second of each process that collects
    description = httpx.get(f"{url}/openapi.json")
    if description.status_code == 404:
        pytest.skip("this server does not describe its API")
    schema = schemathesis.openapi.from_dict(description.json())
    operations = [found.ok() for found in schema.get_all_operations()]
    assert operations
    for operation in operations:
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

            @settings(max_examples=NUM_EXAMPLES, suppress_health_check=list(HealthCheck))
            @given(operation.as_strategy(generation_mode=mode))
            def answers(case: Any) -> None:
                answer = case.call(base_url=url, timeout=PATIENCE_S)
                assert answer.status_code < 500 or case.path in REFUSED_BY_DESIGN, answer.text
                assert httpx.get(f"{url}/health").status_code == 200

            with contextlib.suppress(Unsatisfiable):  # a route without arguments has no wrong ones
                answers()
