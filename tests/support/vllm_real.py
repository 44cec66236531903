"""A vLLM of its own process around the demo's base model, and adapters for it; run as a script, it answers offline.

python vllm_real.py FOLDER [OPTIONS]    # OPTIONS: those of the plug-in, in JSON; without them, vLLM as it comes
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import manylora.demo

BASE = Path(manylora.demo.__file__).parent / "assets" / "base"
ENVIRONMENT = {
    **os.environ,
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(Path(__file__).parent),
}
LIMITS = {"max_loras": 8, "max_cpu_loras": 16, "max_lora_rank": 8, "max_num_seqs": 16, "max_model_len": 512}
NUM_ADAPTERS = 64
START_S = 180.0


def write_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter of random weights; a file that is there is replaced, not written over."""
    config = json.loads((BASE / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    chosen, rank = list(shapes)[: 7 if seed % 2 else 4], 8 if seed % 3 else 4
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name in chosen:
            num_in, num_out = shapes[name]
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, num_in, generator=rng) * 0.1
            weights[f"{prefix}.lora_B.weight"] = torch.randn(num_out, rank, generator=rng) * 0.1
    folder.mkdir(exist_ok=True)
    modules = [name.partition(".")[2] for name in chosen]
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    save_file(weights, folder / ".new")
    (folder / ".new").rename(folder / "adapter_model.safetensors")
    return folder


def transfer_config(options: dict[str, Any]) -> dict[str, Any]:
    """Return the value of ``--kv-transfer-config`` that switches the plug-in on, alone or ``beside`` another one."""
    options = dict(options)
    is_beside = options.pop("beside", False)
    own = {"kv_connector": "Manylora", "kv_role": "kv_both", "kv_connector_extra_config": options}
    if not is_beside:
        return own
    other = {"kv_connector": "OtherConnector", "kv_role": "kv_both", "kv_connector_module_path": "vllm_other_connector"}
    extra = {"connectors": [own, other]}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def answer_offline(folder: Path, options: dict[str, Any] | None) -> list[list[int]]:
    """Return the tokens of three requests for each adapter, greedy and drawn by seed, from an engine of its own."""
    given = [str(folder), *([] if options is None else [json.dumps(options)])]
    ran = subprocess.run(
        [sys.executable, __file__, *given], env=ENVIRONMENT, capture_output=True, text=True, timeout=400, check=False
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    answers: list[list[int]] = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("[[")))
    return answers


class RealServer:
    """A running ``vllm serve``, with all its processes in a group of their own."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.url, self.process = f"http://127.0.0.1:{port}", process

    def call(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """Return the status and the text of a reply."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def complete(self, model: str, **fields: Any) -> str:
        """Return the text of an answer."""
        body = {"model": model, "prompt": "what is the sum", "max_tokens": 8, "temperature": 0, **fields}
        status, text = self.call("/v1/completions", body)
        assert status == 200, text
        answer: str = json.loads(text)["choices"][0]["text"]
        return answer

    def metrics(self) -> dict[str, float]:
        """Return the plug-in's metrics: by name, and an adapter's by name and level."""
        found = {}
        for line in self.call("/metrics")[1].splitlines():
            if line.startswith("manylora:"):
                name, _, labels = line.rpartition(" ")[0].partition("{")
                told = dict(one.split("=", 1) for one in labels.rstrip("}").split(",") if "=" in one)
                key = name.removeprefix("manylora:").removesuffix("_total")
                if key == "lora_adapter_loaded":
                    key = f"{told['adapter_name']} {told['level']}".replace('"', "")
                found[key] = float(line.rpartition(" ")[2])
        return found


@contextmanager
def registry(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder over HTTP; yield its URL, and the paths that are asked for."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_request(self, *args: Any) -> None:
            asked.append(self.path)

        def log_error(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def serving(
    folders: dict[str, Path], options: dict[str, Any], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[RealServer]:
    """Run ``vllm serve`` with the plug-in, with further variables in its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(BASE), "--served-model-name=base"]
    command += [f"--port={port}", "--dtype=float32", "--enforce-eager", "--enable-lora", *flags]
    command += ["--kv-transfer-config", json.dumps(transfer_config(options)), "--lora-modules"]
    command += [f"{name}={path}" for name, path in folders.items()]
    with log.open("w") as output:
        given = {**ENVIRONMENT, **(environment or {})}
        process = subprocess.Popen(command, env=given, stdout=output, stderr=output, start_new_session=True)
        try:
            server, until = RealServer(port, process), time.monotonic() + START_S
            while True:
                assert process.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
                try:
                    if server.call("/health")[0] == 200:
                        break
                except OSError:
                    time.sleep(0.5)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main(folder: str, options: str | None = None) -> None:
    """Print the tokens that an offline engine answers."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    chosen = {} if options is None else {"kv_transfer_config": transfer_config(json.loads(options))}
    llm = LLM(str(BASE), enable_lora=True, dtype="float32", enforce_eager=True, **LIMITS, **chosen)
    asked = [(number * 7 % NUM_ADAPTERS, number) for number in range(3 * NUM_ADAPTERS)]
    outputs = llm.generate(
        [f"question {number % 5}: what is" for _, number in asked],
        [
            SamplingParams(max_tokens=12, temperature=0.9 * (number % 2), seed=number, ignore_eos=True)
            for _, number in asked
        ],
        lora_request=[LoRARequest(f"a{one}", one + 1, f"{folder}/a{one}") for one, _ in asked],
        use_tqdm=False,
    )
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
