"""GGUF files that lie or are damaged: refused from the header, before anything of the size that they state is made."""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_cases import SIZES, build
from gguf import GGMLQuantizationType as Kind
from gguf_cases import write_gguf
from transformers import LlamaConfig

from manylora.core.errors import ConfigError
from manylora.execution.checkpoint.open import open_checkpoint

CONFIG = LlamaConfig(**SIZES | {"hidden_size": 96, "num_attention_heads": 4})
UP = b"blk.1.ffn_up.weight"
Damage = Callable[[bytes], bytes]


def kind_of(name: str, shape: tuple[int, ...]) -> Kind:
    return Kind.Q4_0 if len(shape) == 2 and shape[1] % 32 == 0 else Kind.F32


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, build(CONFIG), "llama", kind_of)
    return path.read_bytes()


@contextmanager
def little_memory() -> Iterator[None]:
    """Let the process have a gigabyte more, so that a size that is believed fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def at(place: int, code: str, *values: Any) -> Damage:
    """Return a change of numbers at a place."""

    def change(content: bytes) -> bytes:
        packed = struct.pack(f"<{code}", *values)
        return content[:place] + packed + content[place + len(packed) :]

    return change


def after(name: bytes, offset: int, code: str, *values: Any) -> Damage:
    """Return a change of numbers so many bytes after a name: of a field its type and value, of a tensor its sizes."""
    return lambda content: at(content.index(name) + len(name) + offset, code, *values)(content)


def swap(old: bytes, new: bytes) -> Damage:
    return lambda content: content.replace(old, new, 1)


HUGE = 1 << 60
HOSTILE: dict[str, tuple[Damage, str]] = {
    "nothing": (lambda content: b"", "cannot be read"),
    "another file": (lambda content: b"PK" + content, "it does not begin with GGUF"),
    "four bytes": (lambda content: content[:4], "its header has 4 bytes at 4, expected at most 0"),
    "a cut field": (lambda content: content[:60], "its header has .* bytes at"),
    "a cut list": (lambda content: content[:600], "its header has .* bytes at .*, expected at most"),
    "a cut list of tensors": (lambda content: content[: content.index(UP) + 30], "its header has 8 bytes at"),
    "cut weights": (
        lambda content: content[:-64],
        "tensor 'output.weight' of 3456 bytes begins at .*, and the file has",
    ),
    "the first version": (at(4, "I", 1), "it is of version 1, expected 2 or 3"),
    "bytes in another order": (at(4, "I", 3 << 24), "it is of version 50331648, expected 2 or 3"),
    "more tensors than a file can have": (at(8, "Q", HUGE), f"its header has {HUGE} tensors, expected at most"),
    "more tensors than there are": (at(8, "Q", 4000), "is damaged or is no GGUF file"),
    "more fields than a file can have": (at(16, "Q", HUGE), f"its header has {HUGE} fields, expected at most"),
    "a name beyond the file": (at(24, "Q", HUGE), f"its header has {HUGE} bytes at 32"),
    "a text beyond the file": (after(b"general.architecture", 4, "Q", HUGE), f"its header has {HUGE} bytes"),
    "no architecture": (swap(b"general.architecture", b"general.architectura"), "it has no general.architecture"),
    "a type of no value": (after(b"llama.block_count", 0, "I", 77), "field 'llama.block_count' is of type 77"),
    "a list of lists": (after(b"tokenizer.ggml.tokens", 4, "I", 9), "tokenizer.ggml.tokens' is a list of type 9"),
    "a list beyond the file": (
        after(b"tokenizer.ggml.token_type", 8, "Q", HUGE),
        r"its header has 11\d+ items of lists, expected at most",
    ),
    "a list longer than the file": (
        after(b"tokenizer.ggml.token_type", 8, "Q", 1 << 20),
        "its header has 4194304 bytes at",
    ),
    "texts beyond the file": (after(b"tokenizer.ggml.tokens", 8, "Q", 1 << 20), "is damaged or is no GGUF file"),
    "a name that is no text": (swap(b"llama.block_count", b"llama.block\xff\xffcount"[:17]), "is no UTF-8"),
    "two fields of a name": (
        swap(b"llama.attention.head_count_kv", b"llama.feed_forward_length" + b"_len"),
        "llama.feed_forward_length_len = 2, which is not supported",
    ),
    "a tensor of no axes": (after(UP, 0, "I", 0), f"tensor '{UP.decode()}' has 0 axes, expected 1 to 4"),
    "a tensor of many axes": (after(UP, 0, "I", 1 << 31), "axes, expected 1 to 4"),
    "a tensor larger than memory": (after(UP, 4, "QQ", 1 << 39, 1 << 39), "begins at .*, and the file has"),
    "a tensor of sizes beyond 64 bits": (after(UP, 4, "QQ", HUGE, HUGE), "is of shape"),
    "a tensor of size 0": (after(UP, 4, "Q", 0), r"is of shape \[96, 0\]"),
    "rows that end inside a block": (after(UP, 4, "Q", 80), r"has rows of 80, expected blocks of 32 \(Q4_0\)"),
    "an unknown type": (after(UP, 20, "I", 99), f"tensor '{UP.decode()}' is of type 99, which the gguf library"),
    "a type that is not supported": (
        after(UP, 20, "I", Kind.IQ4_NL),
        f"has tensor '{UP.decode()}' of type IQ4_NL, expected one of F32, F16, BF16, Q8_0, Q4_0, Q4_K",
    ),
    "a place beyond the file": (after(UP, 24, "Q", 1 << 40), "and the file has"),
    "a place that is not aligned": (after(UP, 24, "Q", 33), f"tensor '{UP.decode()}' of .* bytes begins at"),
    "a place that another has": (after(UP, 24, "Q", 0), "before the end of another at"),
    "two tensors of a name": (
        swap(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"),
        "tensor 'blk.0.ffn_up.weight' is there twice",
    ),
    "a tensor of no model": (
        swap(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"),
        "lacks tensor 'model.layers.1.mlp.up_proj.weight'",
    ),
    "another shape": (after(UP, 4, "QQ", 128, 72), r"up_proj.weight' of shape \[72, 128\], expected \[96, 96\]"),
    "an architecture of experts": (
        lambda content: content.replace(b"llama", b"bloom"),
        "is of architecture 'bloom', expected one of llama, qwen2",
    ),
    "a million layers": (
        after(b"llama.block_count", 4, "I", 1_000_000),
        "of 1000000 layers by its configuration, and its files hold 21 tensors",
    ),
    "no heads": (after(b"llama.attention.head_count", 4, "I", 0), "cannot be|fields of wrong"),
    "an architecture's text": (
        swap(b"llama.rope.freq_base\x06\0\0\0", b"llama.rope.fred_base\x06\0\0\0"),
        "llama.rope.fred_base = 10000.0, which is not supported",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(tmp_path: Path, base: bytes, case: str) -> None:
    damage, message = HOSTILE[case]
    path = tmp_path / "model.gguf"
    changed = damage(base)
    assert changed != base
    path.write_bytes(changed)
    with little_memory(), pytest.raises(ConfigError, match=message) as raised:
        open_checkpoint(str(path))
    assert "model.gguf" in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert_count": 8}, r"has llama\.expert_count = 8, which is not supported"),
        ({"attention.sliding_window": 16}, r"llama\.attention\.sliding_window = 16, which is not supported"),
        ({"rope.scaling.type": "longrope"}, r"llama\.rope\.scaling\.type = 'longrope', which is not supported"),
        ({"rope.dimension_count": 10}, "which is not supported|cannot be built|expected"),
        ({"attention.head_count": [4, 4]}, "cannot be read|which is not supported"),
        ({"embedding_length": "wide"}, "cannot be read|cannot be built|fields of wrong"),
        ({"logit_scale": 2.0}, r"llama\.logit_scale = 2\.0, which is not supported"),
    ],
)
def test_fields_that_the_model_cannot_follow(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, build(CONFIG), "llama", fields=fields)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(str(path))


@pytest.mark.parametrize("name", ["rope_factors_long.weight", "blk.0.attn_q.bias"])
def test_tensors_that_the_model_lacks(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, build(CONFIG), "llama", extra={name: np.ones(8, np.float32)})
    with pytest.raises(ConfigError, match=rf"model\.gguf has tensor '{name}', which no part of LlamaForCausalLM takes"):
        open_checkpoint(str(path))


def test_a_scale_that_is_no_number(tmp_path: Path, base: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(base[:-18] + b"\xff\xff" + base[-16:])
    checkpoint = open_checkpoint(str(path))
    with pytest.raises(ConfigError, match=r"model\.gguf has tensor '.*' of a weight with a scale of nan at"):
        for name in checkpoint.names:
            checkpoint.linear(name)


def test_parts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, build(CONFIG), "llama")
    content = path.read_bytes()
    field = b"split.count"
    count = struct.pack("<Q", int.from_bytes(content[16:24], "little") + 1)
    entry = struct.pack("<Q", len(field)) + field + struct.pack("<IH", 2, 3)
    path.write_bytes(content[:16] + count + entry + content[24:])
    with pytest.raises(ConfigError, match="it is one of 3 parts, which is not supported"):
        open_checkpoint(str(path))
