"""Seven architectures, twelve kinds of adapter, one mixed batch: the same logits as transformers + PEFT."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from threading import Condition

import pytest
import torch
from parity_cases import (
    ARCHITECTURES,
    FURTHER_ARCHITECTURES,
    NUM_TOKENS,
    OTHER_ARCHITECTURES,
    SLOW_LINK,
    make_adapters,
    run_oracle,
)
from shared_model import build_shared
from transformers import LlamaConfig

from manylora.execution.storage.page_tensor import Link

make_half = partial(make_adapters, names=("plain", "patterns", "all-linear", "both-ends", "mlp", "regex"))
"""Makes half of the adapters: attention, MLP and both ends of the base, several ranks, and some layers without one."""


class Turns:
    """A page's copy waits for a step that comes to a group, and that group for the page."""

    PATIENCE_S = 0.02  # no step may run, and no copy

    def __init__(self) -> None:
        self._changed = Condition()
        self._num_waiting = self._num_given = self._num_over = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The copy of a page."""
        with self._changed:
            before, self._num_waiting = self._num_given, self._num_waiting + 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_given > before, self.PATIENCE_S)
            self._num_waiting -= 1
        yield
        with self._changed:
            self._num_over += 1
            self._changed.notify_all()

    def give(self) -> None:
        """Let the page that waits be copied, and return when it is."""
        with self._changed:
            if not self._num_waiting:
                return
            before, self._num_given = self._num_over, self._num_given + 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_over > before, self.PATIENCE_S)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *FURTHER_ARCHITECTURES, *OTHER_ARCHITECTURES])
def test_logits_and_greedy_tokens_equal_peft(architecture: str, tmp_path: Path) -> None:
    # On some processors float32 costs PEFT itself as much as the bound leaves.
    result = run_oracle(
        architecture, tmp_path, reference_dtype=torch.float64 if architecture == "granite" else torch.float32
    )
    assert result.num_rows == 16 * NUM_TOKENS
    assert result.max_error <= 2e-5 * max(1.0, result.logit_std)
    assert result.num_wrong_tokens == 0
    # A comparison that cannot fail is worth nothing: the logits spread, every adapter changes them ...
    assert result.logit_std > 0.3
    assert result.smallest_effect > 0.05
    # ... and the engine did what makes it hard.
    assert result.num_preemptions > 0
    assert result.num_cached_tokens > 0
    assert result.num_chunked_prompts > 0
    assert result.num_mixed_steps > 0
    assert result.num_narrow >= 6


@pytest.mark.parametrize(
    ("architecture", "bound"),
    # The last two divide a recurrence's output by its length, which may be small: 5e-5 is what float32 leaves of that
    # in transformers too, between a whole prompt and token by token.
    [("lfm2", 2e-5), ("falcon_h1", 2e-5), ("bamba", 1e-4), ("qwen3_next", 1e-4)],
)
def test_layers_with_states_equal_peft(architecture: str, bound: float, tmp_path: Path) -> None:
    """Chunks carry the states; sequences that were pre-empted begin anew, in pages that held others'."""
    result = run_oracle(architecture, tmp_path, make=make_half, reference_dtype=torch.float64)
    assert result.max_error <= bound * max(1.0, result.logit_std)
    assert result.num_wrong_tokens == 0
    assert result.smallest_effect > 0.05
    assert result.num_preemptions > 0
    assert result.num_chunked_prompts > 0
    assert result.num_mixed_steps > 0
    assert result.num_cached_tokens == 0


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_reference_kernels_equal_peft_too(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readable LoRA kernel, and attention and products without what is compiled or special to a processor."""
    monkeypatch.setattr("manylora.execution.attention.kv.find_compiled", lambda: None)
    monkeypatch.setattr("manylora.execution.kernels.linear.has_onednn", lambda: False)
    result = run_oracle(architecture, tmp_path, lora_kernel="reference")
    assert result.max_error <= 1e-4
    assert result.num_wrong_tokens == 0


@pytest.mark.parametrize(("architecture", "stored"), [("llama", "int8"), ("qwen3_moe", None)])
def test_workers_that_share_a_model_equal_peft(architecture: str, stored: str | None, tmp_path: Path) -> None:
    """Codes and experts over two workers; ``bench/tensor_parallel.py`` has all families, and four workers."""
    configs = ARCHITECTURES | FURTHER_ARCHITECTURES
    if stored is not None:  # whole groups of codes for each worker
        configs = {architecture: LlamaConfig(**{**configs[architecture].to_dict(), "intermediate_size": 128})}
    build = partial(build_shared, size=2)
    result = run_oracle(architecture, tmp_path, num_tokens=6, stored=stored, configs=configs, build=build)
    assert result.max_error <= 1e-4
    assert result.num_wrong_tokens == 0
    assert result.smallest_effect > 0.05
    assert result.num_chunked_prompts > 0


def test_grouped_kernel_without_compiled_equals_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora.execution.lora.kernels.find_compiled", lambda: None)
    result = run_oracle("llama", tmp_path)
    assert result.max_error <= 1e-4
    assert result.num_wrong_tokens == 0


@pytest.mark.parametrize(
    ("architecture", "lora_kernel"),
    [("llama", "grouped"), ("gemma3", "naive"), ("phi3", "grouped"), ("mixtral", "reference")],
)
def test_cold_requests_equal_peft(architecture: str, lora_kernel: str, tmp_path: Path) -> None:
    """They run from the host copy, and move to the device on the way; a busy machine takes some steps before, too."""
    result = run_oracle(architecture, tmp_path, lora_kernel=lora_kernel, cold_start="assist", link_bytes_per_s=300_000)
    assert result.max_error <= 1e-4
    assert result.num_wrong_tokens == 0
    assert result.num_rows == 16 * NUM_TOKENS
    assert result.num_in_host > 16
    assert result.num_cancelled_cold > 0
    assert result.num_preemptions > 0
    assert result.num_chunked_prompts > 0
    assert result.stats is not None
    assert result.stats.num_disk_loads > 0


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3", "gptj", "mixtral", "qwen3_moe"])
def test_requests_that_wait_layer_by_layer_equal_peft(architecture: str, tmp_path: Path) -> None:
    """Steps begin with the load, from host memory and from disk; how far the weights are then is up to the machine."""
    result = run_oracle(architecture, tmp_path, cold_start="layers")
    assert result.max_error <= 1e-4
    assert result.num_wrong_tokens == 0
    assert result.num_rows == 16 * NUM_TOKENS
    assert result.num_arriving >= 3
    assert result.num_in_host == 0
    assert result.num_cancelled_cold > 0
    assert result.num_preemptions > 0
    assert result.num_chunked_prompts > 0
    assert result.stats is not None
    assert result.stats.num_disk_loads > 0


@pytest.mark.parametrize(("architecture", "mode"), [("llama", "auto"), ("qwen3_moe", "auto"), ("phi3", "wait")])
def test_requests_that_start_as_predicted_equal_peft(architecture: str, mode: str, tmp_path: Path) -> None:
    result = run_oracle(architecture, tmp_path, cold_start=mode)
    assert result.max_error <= 1e-4
    assert result.num_wrong_tokens == 0
    assert result.num_rows == 16 * NUM_TOKENS
    assert result.stats is not None
    assert result.stats.num_disk_loads > 0


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3", "qwen3_moe", "gptj"])
def test_assisted_requests_equal_peft(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers compute adapters in host memory, on the path of a GPU whose stream is a thread."""
    pytest.importorskip("numba")
    from thread_stream import ThreadStream

    from manylora.execution.assist.exchange import Assistant

    monkeypatch.setattr("manylora.execution.assist.shares.HANDOFF_S", 0.0)  # else a toy's rows go to one worker
    result = run_oracle(
        architecture,
        tmp_path,
        cold_start="assist",
        open_assistant=lambda device, base: Assistant(ThreadStream(), base, num_workers=2),
        num_tokens=24,
        link_bytes_per_s=SLOW_LINK,
    )
    assert result.max_error <= 1e-4
    assert result.num_wrong_tokens == 0
    assert result.num_rows == 16 * 24
    assert result.num_in_host > 16
    assert result.num_chunked_prompts > 0
    assert result.stats is not None
    assert result.stats.num_disk_loads > 0


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
def test_requests_whose_layers_arrive_within_assisted_steps_equal_peft(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device takes over group by group: a page arrives as a step comes to a group, whatever the machine's speed."""
    pytest.importorskip("numba")
    from thread_stream import ThreadStream

    from manylora.execution.assist.exchange import Assistant
    from manylora.execution.assist.take_over import TakeOver

    turns = Turns()

    def copy(link: Link, pages: Sequence[int], image: torch.Tensor, announce: Callable[[int], None]) -> None:
        for number in range(len(pages)):
            with turns.turn():
                link.pages.write(pages[number : number + 1], image[number : number + 1])
                announce(number + 1)

    shares: list[float] = []
    share_of, decide = TakeOver.cpu_share.fget, TakeOver._decide
    assert share_of is not None

    def decide_after_a_turn(step: TakeOver, group: str) -> tuple[int, ...]:
        if group not in step._taken:
            turns.give()
        return decide(step, group)

    monkeypatch.setattr(Link, "copy", copy)
    monkeypatch.setattr(TakeOver, "_decide", decide_after_a_turn)
    monkeypatch.setattr(TakeOver, "cpu_share", property(lambda step: shares.append(share_of(step)) or shares[-1]))
    result = run_oracle(
        architecture,
        tmp_path,
        cold_start="assist",
        open_assistant=lambda device, base: Assistant(ThreadStream(), base, num_workers=2),
        num_tokens=16,
    )
    assert result.max_error <= 1e-4
    assert result.num_wrong_tokens == 0
    assert result.num_rows == 16 * 16
    assert any(0.0 < share < 1.0 for share in shares)


@pytest.mark.parametrize(
    ("architecture", "stored"),
    [
        *product(["llama", "qwen2", "gemma3", "phi3", "gptj"], ["bfloat16", "int8", "int4"]),
        ("gpt_oss", "int8"),
        ("deepseek_v3", "bfloat16"),
    ],
)
def test_bases_in_fewer_bits_equal_peft_over_the_same_weights(architecture: str, stored: str, tmp_path: Path) -> None:
    """Biases, a head that is tied to the embedding, fused projections, k before q; a tied weight has one copy."""
    pytest.importorskip("numba")
    if architecture not in ARCHITECTURES | FURTHER_ARCHITECTURES | OTHER_ARCHITECTURES:
        pytest.skip("not in this release of transformers")
    result = run_oracle(architecture, tmp_path, stored=stored, num_tokens=24, make=make_half)
    assert result.max_error <= 1e-4
    assert result.num_wrong_tokens == 0
    assert result.num_preemptions > 0
    assert result.num_cached_tokens > 0


@pytest.mark.parametrize(
    ("architecture", "kv_cache_dtype", "error"),
    [
        ("llama", "bfloat16", 0.1),
        ("llama", "float16", 0.0125),
        ("llama", "int8", 0.2),
        ("gemma2", "bfloat16", 0.1),
        ("gemma2", "int8", 0.2),
        ("gpt_oss", "bfloat16", 0.1),
        ("deepseek_v3", "int8", 0.2),
    ],
)
def test_narrow_kv_is_near(architecture: str, kv_cache_dtype: str, error: float, tmp_path: Path) -> None:
    """KV rounded in pages, in prompts that go on, in decoding and in prefixes; softcaps, windows and sinks too."""
    result = run_oracle(architecture, tmp_path, num_tokens=24, kv_cache_dtype=kv_cache_dtype)
    assert 1e-4 < result.max_error <= error  # of logits that spread by 1
    assert result.num_cached_tokens > 0
