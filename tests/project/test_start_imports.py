"""The processes of a server import at the start what they use at once: libraries take most of the time of a start."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

IN_NONE = [
    "IPython",
    "aiohttp",
    "grpc",
    "httpx",
    "llguidance",
    "matplotlib",
    "openai",
    "pandas",
    "ray",
    "requests",
    "scipy.stats",
    "sklearn",
]
"""Libraries that no process of a server needs before a request asks for them, if at all."""

API = """
from manylora.cli.app import make_app
make_app(("serve",))
import manylora.serving.server.serve, manylora.serving.server.http_server
from manylora.demo import demo_model_path
from manylora.serving.text import Tokenizer
Tokenizer.load(demo_model_path()).render_chat([{"role": "user", "content": "x"}])
"""
ENGINE = """
import manylora.serving.hosting.engine.process
from manylora.serving.hosting.engine.startup import TORCH_BUILDER
from manylora.serving.hosting.engine.service import load_builder
load_builder(TORCH_BUILDER, is_alone=True)
"""
READER = "import manylora.execution.storage.reader_service"
HELP = "from manylora.cli.app import make_app; make_app()"
ROUTER = "from manylora.cli.app import make_app; make_app(('route',)); import manylora.route.serve"
OTHERS: dict[str, tuple[str, list[str]]] = {
    "api": (
        API,
        ["accelerate", "numba", "scipy", "sympy", "torch", "triton", "manylora.lab.sim", "manylora.lab.planning"],
    ),
    "engine": (
        ENGINE,
        [
            *["PIL", "accelerate", "numba", "scipy", "sympy", "triton"],
            *["torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor"],
            *["prometheus_client", "rich", "starlette", "typer", "uvicorn", "manylora.serving.server"],
        ],
    ),
    "help": (HELP, ["torch", "transformers", "scipy", "numba", "starlette", "uvicorn", "zmq"]),
    "router": (
        ROUTER,
        *(
            [
                "torch",
                "transformers",
                "scipy",
                "numba",
                "zmq",
                "manylora.lab",
                "manylora.execution",
                "manylora.functions",
            ],
        ),
    ),
    "reader": (READER, ["huggingface_hub", "numba", "torch", "transformers", "zmq", "manylora.serving.hosting"]),
}


@pytest.mark.parametrize("process", OTHERS)
def test_a_process_imports_no_library_that_it_does_not_use(process: str) -> None:
    code, others = OTHERS[process]
    code += "\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    imported = set(json.loads(found.splitlines()[-1]))
    assert imported
    assert not imported & {*IN_NONE, *others}
