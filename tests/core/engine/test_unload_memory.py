"""Unloading gives memory back: pages at once, with the KV that an adapter computed, and host memory to the system."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from statistics import median

import psutil
import pytest
import torch
from bad_adapters import write_good_adapter
from harness import make_rig, request
from text_tokenizers import make_huggingface
from transformers import LlamaConfig, LlamaForCausalLM

from manylora import Engine, SamplingParams
from manylora.core.adapters.shape import BaseShape
from manylora.core.clock import Clock
from manylora.core.config import EngineConfig
from manylora.core.memory import Owner
from manylora.core.ports import EngineParts
from manylora.execution.build import build_parts

NUM_ADAPTERS = 12
NUM_CYCLES = 3
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    hf = make_huggingface("byte_level")
    hf.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(hf),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        eos_token_id=hf.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_versions_that_are_gone_leave_no_kv_behind() -> None:
    """A name is published a hundred times: the pool's pages that are ever used are those of the first three."""
    rig = make_rig(num_pages=500)
    touched, used_early = set[int](), 0
    for number in range(100):
        rig.register(f"a{number}", key=f"key-{number}")
        rig.add(*(request(f"{number}-{at}", 20 + at, 6, f"a{number}") for at in range(3)))
        rig.turn()
        while rig.core.has_pending_work:
            touched |= {page for page in range(500) if rig.core.page_cache.allocator.owner(page) is not Owner.FREE}
            rig.step()
        rig.core.check_integrity()
        if number >= 2:
            rig.core.adapters.unregister(f"a{number - 2}", rig.now)
            rig.core.check_integrity()
        if number == 2:
            used_early = len(touched)
    assert len(touched) == used_early
    assert rig.core.stats().num_prefix_pages == len(rig.core.page_cache.prefix) == 2 * 3 * 6


def test_kv_of_an_unloaded_adapter_in_use_goes_with_its_last_sequence() -> None:
    rig = make_rig()
    rig.register("a")
    rig.add(request("first", 20, 2, "a"))
    rig.drain()
    num_free = rig.core.stats().num_free_pages
    rig.add(request("second", 20, 6, "a"))
    rig.turn()
    rig.core.adapters.unregister("a", rig.now)
    assert rig.core.stats().num_free_pages < num_free
    rig.drain()
    assert rig.core.stats().num_free_pages == 64
    rig.core.check_integrity()


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.slow
def test_unload_frees_pages_and_host_memory(model_path: Path, tmp_path: Path) -> None:
    bases: list[BaseShape] = []

    def build(config: EngineConfig, clock: Clock) -> EngineParts:
        parts = build_parts(config, clock)
        bases.append(parts.base)
        return parts

    with Engine(model_path, adapters={}, memory_bytes=256 << 20, build=build) as engine:
        (base,) = bases
        paths = [
            write_good_adapter(tmp_path / f"a{i}", base, rank=128, targets=TARGETS, seed=i) for i in range(NUM_ADAPTERS)
        ]
        before = engine.stats()
        names = [path.name for path in paths]
        in_use, after = [], []
        for _ in range(NUM_CYCLES):
            for path in paths:
                engine.load_adapter(path.name, path)
            engine.generate(["x"] * NUM_ADAPTERS, adapter=names, sampling=ONE_TOKEN)
            while (loaded := engine.stats()).num_loading:  # answers came from the host copies
                time.sleep(0.01)
            in_use.append(resident_bytes())
            for name in names:
                engine.unload_adapter(name)
            unloaded = engine.stats()
            host_bytes = loaded.host_bytes
            late_at = time.monotonic() + 5.0  # threads that have read it let go of it in a moment
            while in_use[-1] - (empty := resident_bytes()) <= 0.8 * host_bytes and time.monotonic() < late_at:
                time.sleep(0.01)
            after.append(empty)
            assert (loaded.num_resident, loaded.num_host) == (NUM_ADAPTERS, NUM_ADAPTERS)
            assert host_bytes > NUM_ADAPTERS * 8_000_000
            assert (unloaded.num_adapter_pages, unloaded.num_host, unloaded.host_bytes) == (0, 0, 0)
            assert unloaded.num_free_pages == before.num_free_pages
        # What the host tier held is the system's again (device pages are the pool's for good) ...
        freed = median(full - empty for full, empty in zip(in_use, after, strict=True))
        assert freed > 0.8 * host_bytes
        # ... and cycles leave nothing behind (other threads come and go, so the least of the later ones counts).
        assert min(after[1:]) - after[0] < 0.1 * host_bytes
