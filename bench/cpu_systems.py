"""What `throughput.py` and `versions.py` compare: our engine, bare torch, transformers, PEFT; one small model.

All of them take the same requests: a prompt, and how many tokens to answer with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peers import PeerRequest, quiet
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from manylora.core.clock import WallClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.costs.step_log import LoadRecord, LoggedExecutor, StepRecord
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.types import Output, Request, SamplingParams
from manylora.execution.build import build_parts
from manylora.execution.executor import TorchExecutor
from manylora.execution.kernels.linear import linear, pack

RANKS = (8, 16, 32, 64, 128)
VOCAB = 7296
LAYERS, HEADS, HIDDEN, INTERMEDIATE = 10, 12, 768, 2048


def make_model(path: Path) -> int:
    """Save the base, with random weights; return its number of parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with quiet():
        model = LlamaForCausalLM(config)
        model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def make_adapters(
    base: Path,
    path: Path,
    ranks: Sequence[int],
    dtype: torch.dtype = torch.float32,
    targets: str | list[str] = "all-linear",
    **settings: Any,
) -> list[Path]:
    """Save an adapter on ``targets`` for each rank, with weights of ``dtype`` and further settings of PEFT."""
    folders = []
    with quiet():
        model = LlamaForCausalLM.from_pretrained(base)
    for index, rank in enumerate(ranks):
        torch.manual_seed(1 + index)
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, init_lora_weights=False, **settings)
        folder = path / f"adapter-{index}"
        with quiet():
            adapted = get_peft_model(model, config)
            adapted.save_pretrained(folder)
            model = adapted.unload()
        file = folder / "adapter_model.safetensors"
        save_file({key: tensor.to(dtype) for key, tensor in load_file(file).items()}, file)
        folders.append(folder)
    return folders


class Ours:
    """The engine; nothing of a run is remembered in the next but which adapters are resident.

    Args:
        model: The base.
        sets: Lists of adapter folders, by a name for each list.
        clock: Times ``forward_s``.
        device: Where it runs.
        log: Takes every step and load.
    """

    def __init__(
        self,
        model: Path,
        sets: dict[str, list[Path]],
        clock: Callable[[], float] = time.perf_counter,
        *,
        device: str = "cpu",
        log: Callable[[StepRecord | LoadRecord], None] | None = None,
    ) -> None:
        self._seconds = clock
        self._clock = WallClock()
        config = EngineConfig(
            model=ModelConfig(model=str(model), device=device),
            memory=MemoryConfig(memory_bytes=3 * 2**30, prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=64),
            adapters=AdapterConfig(),
        )
        self._parts = build_parts(config, self._clock)
        executor = self._parts.executor if log is None else LoggedExecutor(self._parts.executor, log)
        self._core = EngineCore(replace(self._parts, executor=executor), config)
        self.weight_bytes: dict[str, int] = {}
        for name, folders in sets.items():
            versions = [self._parts.reader.read(folder.name, str(folder)) for folder in folders]
            for index, version in enumerate(versions):
                self._core.adapters.register(f"{name}-{index}", version, self._clock.now())
            self.weight_bytes[name] = sum(version.weight_bytes for version in versions)
        self.forward_s = 0.0
        self.answers: list[list[int]] = []
        assert isinstance(self._parts.executor, TorchExecutor)
        self._watch_forward(self._parts.executor.runner.model)

    def run(self, asked: Sequence[PeerRequest], adapters: Sequence[str] | None = None) -> None:
        """Answer everything; request *i* takes ``adapters[i]`` (``set-number``), or the base."""
        start = self._clock.now()
        self.forward_s = 0.0
        arrivals = [
            (
                start,
                Request(
                    request_id=str(index),
                    prompt=one.prompt,
                    sampling=SamplingParams(temperature=0.0, max_tokens=one.num_out, ignore_eos=True),
                    model="base" if adapters is None else adapters[index],
                ),
            )
            for index, one in enumerate(asked)
        ]
        self.answers = [[] for _ in asked]

        def take(outputs: list[Output], now: float) -> None:
            for output in outputs:
                assert output.error is None, output.error
                self.answers[int(output.request_id)].extend(token.token_id for token in output.tokens)

        EngineLoop(self._core, self._clock, on_outputs=take, arrivals=arrivals).run()
        assert [len(answer) for answer in self.answers] == [one.num_out for one in asked]

    def close(self) -> None:
        self._parts.close()

    def _watch_forward(self, model: torch.nn.Module) -> None:
        def before(*_: Any) -> None:
            self.forward_s -= self._seconds()

        def after(*_: Any) -> None:
            self.forward_s += self._seconds()

        model.register_forward_pre_hook(before)
        model.register_forward_hook(after)


class Bare:
    """The same arithmetic without an engine: one static batch, KV in contiguous tensors, no adapters.

    As quick as torch gets without custom kernels: fused q/k/v and gate/up, scaled-dot-product attention, fused norms,
    the head on the last token alone. There is nothing here to admit, to page, to sample or to stop.

    Args:
        model: The checkpoint.
        is_packed: Multiply through oneDNN with packed weights, as our engine does, instead of ``functional.linear``.
    """

    def __init__(self, model: Path, *, is_packed: bool) -> None:
        weights = load_file(model / "model.safetensors")
        self._linear: Callable[..., torch.Tensor] = linear if is_packed else functional.linear
        keep = pack if is_packed else (lambda weight: weight)

        def get(layer: int, *names: str) -> torch.Tensor:
            return torch.cat([weights[f"model.layers.{layer}.{name}.weight"] for name in names])

        attention, mlp = "self_attn", "mlp"
        self._layers = [
            (
                get(i, "input_layernorm"),
                keep(get(i, *(f"{attention}.{part}_proj" for part in "qkv"))),
                keep(get(i, f"{attention}.o_proj")),
                get(i, "post_attention_layernorm"),
                keep(get(i, f"{mlp}.gate_proj", f"{mlp}.up_proj")),
                keep(get(i, f"{mlp}.down_proj")),
            )
            for i in range(LAYERS)
        ]
        self._embedding = weights["model.embed_tokens.weight"]
        self._norm = weights["model.norm.weight"]
        self._head = keep(weights["lm_head.weight"])
        self._eps = float(LlamaConfig.from_pretrained(model).rms_norm_eps)
        self.answers: list[list[int]] = []

    @torch.inference_mode()
    def run(self, asked: Sequence[PeerRequest]) -> None:
        """Answer one batch of prompts of one length and answers of another."""
        prompts = torch.tensor([one.prompt for one in asked])
        num_rows, num_in = prompts.shape
        num_out = asked[0].num_out
        kv = torch.empty(LAYERS, 2, num_rows, HEADS, num_in + num_out, HIDDEN // HEADS)
        cos, sin = _rotations(num_in + num_out)
        token = self._step(prompts, 0, kv, cos, sin)
        tokens = [token]
        for position in range(num_in, num_in + num_out - 1):
            token = self._step(token[:, None], position, kv, cos, sin)
            tokens.append(token)
        self.answers = torch.stack(tokens, 1).tolist()

    def _step(
        self, tokens: torch.Tensor, start: int, kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        num_rows, num_new = tokens.shape
        stop = start + num_new
        cos, sin = cos[start:stop], sin[start:stop]
        x = functional.embedding(tokens, self._embedding)
        for layer, (norm_in, qkv, out, norm_out, gate_up, down) in enumerate(self._layers):
            heads = self._linear(self._normed(x, norm_in), qkv).view(num_rows, num_new, 3 * HEADS, -1).transpose(1, 2)
            query, key, value = heads.chunk(3, 1)
            kv[layer, 0, :, :, start:stop] = _rotated(key, cos, sin)
            kv[layer, 1, :, :, start:stop] = value
            mixed = functional.scaled_dot_product_attention(
                _rotated(query, cos, sin), kv[layer, 0, :, :, :stop], kv[layer, 1, :, :, :stop], is_causal=num_new > 1
            )
            x = x + self._linear(mixed.transpose(1, 2).reshape(num_rows, num_new, HIDDEN), out)
            gate, up = self._linear(self._normed(x, norm_out), gate_up).chunk(2, -1)
            x = x + self._linear(functional.silu(gate) * up, down)
        return self._linear(self._normed(x[:, -1], self._norm), self._head).argmax(-1)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (HIDDEN,), weight, self._eps)


def _rotations(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = HIDDEN // HEADS
    angles = torch.outer(torch.arange(length).float(), 10_000.0 ** (-torch.arange(0, size, 2).float() / size))
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
