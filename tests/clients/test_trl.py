"""TRL's asynchronous GRPO: its own client asks what the server can do, and publishes policies as adapters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl peft requests")

import requests
import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from trl.experimental.async_grpo.async_grpo_trainer import select_adapter_sync
from trl.experimental.async_grpo.vllm_client import VLLMClient


def test_policies_are_published_as_adapters(url: str) -> None:
    PartialState()  # its log asks for it
    client = VLLMClient(url, server_timeout=60.0)
    client.wait_for_server_ready()
    assert client.get_max_model_len() > 0
    layer = torch.nn.Sequential()
    layer.add_module("q_proj", torch.nn.Linear(4, 4))
    model: Any = get_peft_model(layer, LoraConfig(r=64, target_modules=["q_proj"]))
    assert select_adapter_sync(client.get_server_info(), model, SimpleNamespace(max_staleness=4))  # type: ignore[arg-type]

    models = requests.get(f"{url}/v1/models", timeout=60).json()["data"]
    (folder,) = (one["root"] for one in models if one["id"] == "upper")
    for version in (1, 2):  # as the trainer's `_sync_weight_lora` does
        client.pause()
        client.load_lora_adapter(f"trl-policy-v{version}", folder)
        client.resume()
    client.unload_lora_adapter("trl-policy-v1")
    prompt = requests.post(f"{url}/tokenize", json={"prompt": "hello world"}, timeout=60).json()["tokens"]
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "n": 1}
    body |= {"repetition_penalty": 1.0, "return_token_ids": True, "logprobs": 0, "seed": 2**62 + 1}
    answers = [
        requests.post(f"{url}/v1/completions", json={**body, "model": f"trl-policy-v{version}"}, timeout=60)
        for version in (1, 2)
    ]
    assert [one.status_code for one in answers] == [404, 200]
    (choice,) = answers[1].json()["choices"]  # as its rollouts read it
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
