"""A tiny base, valid adapters for it, and a corpus of everything that can be wrong with one.

Needs neither torch nor PEFT. Unit tests read the corpus directly; server tests upload it.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from manylora.core.adapters.shape import BaseShape, ModuleKind, PageShape, TargetModule
from manylora.core.errors import AdapterError, AdapterNotFound, WeightsMissing

__all__ = ["BAD_ADAPTERS", "BadAdapter", "adapter_config", "adapter_tensors", "tiny_base", "write_good_adapter"]


def tiny_base(
    *,
    num_layers: int = 2,
    hidden: int = 32,
    intermediate: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 64,
    block_size: int = 16,
    dtype: str = "float32",
    max_model_len: int = 128,
    fingerprint: str = "tiny-llama",
    unsupported: tuple[tuple[str, str], ...] = (),
) -> BaseShape:
    """The shape of a small Llama, with the module names its ``transformers`` class has."""
    head_dim = hidden // heads
    modules: list[TargetModule] = []

    def add(
        name: str, ins: int, outs: int, layer: int | None, group: str, offset: int = 0, embed: bool = False
    ) -> None:
        kind = ModuleKind.EMBEDDING if embed else ModuleKind.LINEAR
        modules.append(
            TargetModule(
                name=name, kind=kind, in_features=ins, out_features=outs, layer=layer, group=group, offset=offset
            )
        )

    add("model.embed_tokens", vocab, hidden, None, "model.embed_tokens", embed=True)
    for i in range(num_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        q, kv = heads * head_dim, kv_heads * head_dim
        add(f"{attention}.q_proj", hidden, q, i, f"{attention}.qkv")
        add(f"{attention}.k_proj", hidden, kv, i, f"{attention}.qkv", q)
        add(f"{attention}.v_proj", hidden, kv, i, f"{attention}.qkv", q + kv)
        add(f"{attention}.o_proj", q, hidden, i, f"{attention}.o_proj")
        add(f"{mlp}.gate_proj", hidden, intermediate, i, f"{mlp}.gate_up")
        add(f"{mlp}.up_proj", hidden, intermediate, i, f"{mlp}.gate_up", intermediate)
        add(f"{mlp}.down_proj", intermediate, hidden, i, f"{mlp}.down_proj")
    add("lm_head", hidden, vocab, None, "lm_head")
    return BaseShape(
        name="tiny-llama",
        architecture="llama",
        fingerprint=fingerprint,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=num_layers,
        max_model_len=max_model_len,
        page=PageShape(
            block_size=block_size,
            num_layers=num_layers,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            element_bytes=4 if dtype == "float32" else 2,
            dtype=dtype,
        ),
        modules=tuple(modules),
        all_linear=tuple(m.name for m in modules if m.kind is ModuleKind.LINEAR and m.name != "lm_head"),
        eos_token_ids=(2,),
        unsupported=unsupported,
    )


def adapter_config(
    rank: int = 8, targets: Sequence[str] | str = ("q_proj", "v_proj"), **changes: Any
) -> dict[str, Any]:
    """What PEFT writes into ``adapter_config.json``, with ``changes``."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-llama",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "lora_dropout": 0.05,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "megatron_core": "megatron.core",
        "qalora_group_size": 16,
        "loftq_config": {},
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    return config | changes


def adapter_tensors(
    base: BaseShape, rank: int = 8, targets: Sequence[str] = ("q_proj", "v_proj"), seed: int = 0
) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Random weights for every module whose last name is a target, by PEFT's keys."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
    for module in base.modules:
        if module.name.rpartition(".")[2] not in targets:
            continue
        a = rng.standard_normal((rank, module.in_features)).astype(np.float32) / 8
        b = rng.standard_normal((module.out_features, rank)).astype(np.float32) / 8
        key = f"base_model.model.{module.name}"
        if module.kind is ModuleKind.EMBEDDING:
            tensors[f"{key}.lora_embedding_A"], tensors[f"{key}.lora_embedding_B"] = a, b
        else:
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a, b
    return tensors


def write_good_adapter(
    directory: Path,
    base: BaseShape,
    *,
    rank: int = 8,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write a valid PEFT directory.

    Args:
        directory: Made if it is not there.
        base: The base it is for.
        rank: Rank of every module.
        targets: Last names of the modules.
        seed: Seed of the weights: equal seeds make equal adapters.
        changes: Settings that differ from PEFT's defaults.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(adapter_config(rank, targets, **changes)))
    save_file(adapter_tensors(base, rank, targets, seed), directory / "adapter_model.safetensors")
    return directory


@dataclass(frozen=True, slots=True)
class BadAdapter:
    """One way to be wrong.

    Args:
        slug: Its name, unique in the corpus.
        build: Writes it into an empty directory for a base; it may replace the directory itself.
        words: What the message must say.
        error: Exactly this class is raised.
    """

    slug: str
    build: Callable[[Path, BaseShape], None]
    words: tuple[str, ...]
    error: type[AdapterError] = AdapterError


BAD_ADAPTERS: list[BadAdapter] = []
_Tensors = dict[str, np.ndarray[Any, np.dtype[Any]]]
_Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def _bad(slug: str, *words: str, error: type[AdapterError] = AdapterError) -> Callable[[Any], Any]:
    def register(build: Callable[[Path, BaseShape], None]) -> Callable[[Path, BaseShape], None]:
        BAD_ADAPTERS.append(BadAdapter(slug, build, words, error))
        return build

    return register


def _bad_config(
    slug: str, *words: str, remove: str | None = None, error: type[AdapterError] = AdapterError, **changes: Any
) -> None:
    """A good adapter but for a few settings."""

    def build(directory: Path, base: BaseShape) -> None:
        write_good_adapter(directory, base, **changes)
        if remove is not None:
            config = json.loads((directory / "adapter_config.json").read_text())
            del config[remove]
            (directory / "adapter_config.json").write_text(json.dumps(config))

    BAD_ADAPTERS.append(BadAdapter(slug, build, words, error))


def _bad_config_text(slug: str, text: str | bytes, *words: str) -> None:
    def build(directory: Path, base: BaseShape) -> None:
        write_good_adapter(directory, base)
        (directory / "adapter_config.json").write_bytes(text.encode() if isinstance(text, str) else text)

    BAD_ADAPTERS.append(BadAdapter(slug, build, words))


def _bad_tensors(
    slug: str, change: Callable[[_Tensors], object], *words: str, error: type[AdapterError] = AdapterError
) -> None:
    """A good adapter but for its tensors, which ``change`` alters in place."""

    def build(directory: Path, base: BaseShape) -> None:
        write_good_adapter(directory, base)
        tensors = adapter_tensors(base)
        change(tensors)
        plain = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
        save_file(plain, directory / "adapter_model.safetensors")

    BAD_ADAPTERS.append(BadAdapter(slug, build, words, error))


def _bad_weight_file(slug: str, change: Callable[[bytes], bytes], *words: str) -> None:
    """A good adapter but for the bytes of its weight file."""

    def build(directory: Path, base: BaseShape) -> None:
        file = write_good_adapter(directory, base) / "adapter_model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    BAD_ADAPTERS.append(BadAdapter(slug, build, words))


def _safetensors(header: dict[str, Any], payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


# What is not there, or not a file.


@_bad("no-directory", "no directory", error=AdapterNotFound)
def _no_directory(directory: Path, base: BaseShape) -> None:
    if directory.exists():
        directory.rmdir()


@_bad("file-for-directory", "no directory", error=AdapterNotFound)
def _file_for_directory(directory: Path, base: BaseShape) -> None:
    if directory.exists():
        directory.rmdir()
    directory.write_text("not a directory")


@_bad("no-config", "adapter_config.json", "No such file")
def _no_config(directory: Path, base: BaseShape) -> None:
    write_good_adapter(directory, base)
    (directory / "adapter_config.json").unlink()


@_bad("no-weights", "no weight file")
def _no_weights(directory: Path, base: BaseShape) -> None:
    write_good_adapter(directory, base)
    (directory / "adapter_model.safetensors").unlink()


@_bad("empty-directory", "adapter_config.json")
def _empty(directory: Path, base: BaseShape) -> None:
    directory.mkdir(exist_ok=True)


def _replace(file: str, put: Callable[[Path], object]) -> Callable[[Path, BaseShape], None]:
    def build(directory: Path, base: BaseShape) -> None:
        path = write_good_adapter(directory, base) / file
        path.unlink()
        put(path)

    return build


_bad("fifo-for-weights", "not a regular file")(_replace("adapter_model.safetensors", os.mkfifo))
_bad("fifo-for-config", "not a regular file")(_replace("adapter_config.json", os.mkfifo))
_bad("directory-for-weights", "not a regular file")(_replace("adapter_model.safetensors", Path.mkdir))
_bad("directory-for-config", "not a regular file")(_replace("adapter_config.json", Path.mkdir))
_bad("device-for-weights", "not a regular file")(
    _replace("adapter_model.safetensors", lambda p: p.symlink_to("/dev/zero"))
)
_bad("dangling-weights", "cannot open")(_replace("adapter_model.safetensors", lambda p: p.symlink_to("nowhere")))
_bad("link-to-itself", "cannot open")(_replace("adapter_model.safetensors", lambda p: p.symlink_to(p.name)))

# A configuration that is none.

_bad_config_text("config-empty", "", "not valid JSON")
_bad_config_text("config-not-json", "r: 8", "not valid JSON")
_bad_config_text("config-not-utf8", b"\xff\xfe\x00{", "not valid JSON")
_bad_config_text("config-list", "[]", "list", "expected an object")
_bad_config_text("config-huge", '{"peft_type": "LORA", "x": "' + "a" * 2_000_000 + '"}', "bytes", "at most")
_bad_config_text("config-deep", '{"r":' * 100_000 + "8" + "}" * 100_000, "nested too deeply")
_bad_config_text("config-twice", '{"peft_type": "LORA", "r": 8, "r": 16}', "twice")
_bad_config_text("config-endless-number", '{"r": ' + "9" * 10_000 + "}", "not valid JSON")
_bad_config_text("alpha-nan-word", '{"peft_type": "LORA", "r": 8, "lora_alpha": NaN}', "NaN")
_bad_config_text(
    "alpha-overflow",
    '{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "lora_alpha": 1e999}',
    "lora_alpha",
    "finite",
)

# Settings of the wrong type or size.

_bad_config("r-missing", "r is missing", remove="r")
_bad_config("r-zero", "r is 0", r=0)
_bad_config("r-negative", "r is -1", r=-1)
_bad_config("r-text", "r is '8'", r="8")
_bad_config("r-true", "r is True", r=True)
_bad_config("r-fraction", "r is 8.5", r=8.5)
_bad_config("r-huge", "r is 1000000000", r=10**9)
_bad_config("alpha-missing", "lora_alpha is missing", remove="lora_alpha")
_bad_config("alpha-zero", "lora_alpha is 0", "not 0", lora_alpha=0)
_bad_config("alpha-text", "lora_alpha is '16'", lora_alpha="16")
_bad_config("alpha-huge", "lora_alpha", lora_alpha=10**40)
_bad_config("targets-missing", "target_modules", remove="target_modules")
_bad_config("targets-empty", "target_modules", target_modules=[])
_bad_config("targets-numbers", "target_modules", target_modules=[1, 2])
_bad_config("rslora-text", "use_rslora", use_rslora="yes")
_bad_config("rank-pattern-list", "rank_pattern", rank_pattern=["q_proj"])
_bad_config("rank-pattern-text", "rank_pattern['q_proj']", rank_pattern={"q_proj": "8"})
_bad_config("alpha-pattern-null", "alpha_pattern['q_proj']", alpha_pattern={"q_proj": None})
_bad_config("layers-text", "layers_to_transform", layers_to_transform="first")
_bad_config("layers-pattern-alone", "layers_pattern", layers_pattern=["layers"])
_bad_config("layers-pattern-regex", "layers_pattern", layers_to_transform=[0, 1], layers_pattern="(a+)+")

# Settings that ask for what we do not do.

_bad_config("oft", "OFT", "expected one of LORA", peft_type="OFT")
_bad_config("prefix-tuning", "PREFIX_TUNING", peft_type="PREFIX_TUNING")
_bad_config("type-missing", "peft_type is None", remove="peft_type")
_bad_config("dora-without-magnitudes", "no lora_magnitude_vector", use_dora=True)
_bad_config("bias-unknown", "bias is 'some'", bias="some")
_bad_config("dora-text", "use_dora is 'yes'", use_dora="yes")
_bad_config("dora-and-lora-bias", "use_dora and lora_bias", use_dora=True, lora_bias=True)
_bad_config("modules-to-save", "modules_to_save names 'lm_head'", modules_to_save=["lm_head"], error=WeightsMissing)
_bad_config("tokens-absent", "tokens are not in its weight file", trainable_token_indices=[1, 2], error=WeightsMissing)
_bad_config("tokens-twice", "expected a list of different token ids", trainable_token_indices=[1, 1])
_bad_config("tokens-text", "expected a list of different token ids", trainable_token_indices={"embed_tokens": "1"})
_bad_config("target-parameters", "target_parameters names 'experts.down", target_parameters=["experts.down_proj"])
_bad_config("layer-replication", "layer_replication", layer_replication=[[0, 2], [1, 2]])
_bad_config("pissa", "init_lora_weights is 'pissa_niter_4'", "base", init_lora_weights="pissa_niter_4")
_bad_config("olora", "init_lora_weights is 'olora'", init_lora_weights="olora")
_bad_config("loftq", "init_lora_weights is 'loftq'", init_lora_weights="loftq", loftq_config={"loftq_bits": 4})
_bad_config("init-list", "init_lora_weights is ['gaussian']", init_lora_weights=["gaussian"])
_bad_config("alora-text", "expected a list of 1 to 128 token ids", alora_invocation_tokens="<|call|>")
_bad_config("alora-long", "expected a list of 1 to 128 token ids", alora_invocation_tokens=[5] * 129)
_bad_config("alora-dora", "use_dora are both set", alora_invocation_tokens=[5], use_dora=True)
_bad_config("alora-saved", "modules_to_save are both set", alora_invocation_tokens=[5], modules_to_save=["lm_head"])
_bad_config("alora-bias", "a trained bias is not activated", alora_invocation_tokens=[5], bias="all")
_bad_config("alora-vocabulary", "outside the base's [0,", alora_invocation_tokens=[5, 1_000_000])
_bad_config("qalora", "use_qalora", use_qalora=True)
_bad_config("arrow", "arrow_config", arrow_config={"top_k": 3})
_bad_config("setting-of-tomorrow", "'use_hyperlora'", "might change", use_hyperlora=True)

# Regular expressions.

_bad_config("regex-malformed", "no regular expression", target_modules="(q_proj")
_bad_config("regex-long", "characters", target_modules="q_proj|" * 5000)
_bad_config("regex-back-reference", "no target", target_modules=r"(.*)\1")
_bad_config("regex-bomb", "no target", target_modules=r"(.*)*(.*)*(.*)*x" + "(a|aa)+$" * 3)
_bad_config("regex-exponential", "no target", target_modules=r"((\w|\.)+)+!")
_bad_config("regex-quadrillion", "no target", target_modules=r"((.{0,99999}){0,99999}){0,99999}!")
_bad_config("regex-deep", "nested too deeply", target_modules="(" * 2000 + "q" + ")" * 2000)
_bad_config("regex-slow", "too long to match", target_modules=r"(.|..|...)+[!?]")
_bad_config("rank-pattern-malformed", "no regular expression", rank_pattern={"q_proj(": 4})

# A weight file that is none.

_bad_weight_file("weights-empty", lambda data: b"", "damaged")
_bad_weight_file("weights-garbage", lambda data: b"\x93" * 4096, "damaged")
_bad_weight_file("weights-truncated", lambda data: data[:-100], "damaged")
_bad_weight_file("weights-cut-in-header", lambda data: data[:40], "damaged")
_bad_weight_file("weights-trailing", lambda data: data + b"\0" * 8, "damaged")
_bad_weight_file("header-length-lies", lambda data: struct.pack("<Q", 2**60) + data[8:], "damaged", "longer")
_bad_weight_file("header-not-json", lambda data: struct.pack("<Q", 64) + b"x" * 1000, "damaged")
_bad_weight_file("header-large", lambda data: struct.pack("<Q", 9 << 20) + b" " * (9 << 20), "header of more")
_bad_weight_file(
    "offsets-overlap",
    lambda data: _safetensors(
        {
            f"{_Q0}.lora_A.weight": {"dtype": "F32", "shape": [8, 32], "data_offsets": [0, 1024]},
            f"{_Q0}.lora_B.weight": {"dtype": "F32", "shape": [32, 8], "data_offsets": [512, 1536]},
        },
        b"\0" * 1536,
    ),
    "damaged",
)
_bad_weight_file(
    "shape-overflows",
    lambda data: _safetensors(
        {f"{_Q0}.lora_A.weight": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}, b"\0" * 8
    ),
    "damaged",
)
_bad_weight_file("weights-of-nothing", lambda data: _safetensors({}, b""), "no LoRA weights")

# Tensors that do not fit.


def _set(key: str, value: Callable[[Any], Any]) -> Callable[[_Tensors], object]:
    def change(tensors: _Tensors) -> None:
        tensors[key] = value(tensors[key])

    return change


def _poison(value: float) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array = array.copy()
        array[-1, -1] = value
        return array

    return change


def _rename(old: str, new: str) -> Callable[[_Tensors], object]:
    def change(tensors: _Tensors) -> None:
        for key in [key for key in tensors if old in key]:
            tensors[key.replace(old, new)] = tensors.pop(key)

    return change


def _add(key: str, *shape: int) -> Callable[[_Tensors], object]:
    return lambda tensors: tensors.update({key: np.ones(shape, np.float32)})


_A, _B = f"{_Q0}.lora_A.weight", f"{_Q0}.lora_B.weight"
_bad_tensors("nan", _set(_A, _poison(np.nan)), "lora_A", "layers.0.self_attn.q_proj", "not finite")
_bad_tensors("infinity", _set(_B, _poison(np.inf)), "lora_B", "not finite")
_bad_tensors("double-overflow", _set(_B, lambda b: b.astype(np.float64) * 1e300), "lora_B", "not finite")
_bad_tensors("int8", _set(_A, lambda a: (a * 100).astype(np.int8)), "I8", "lora_A")
_bad_tensors("bool", _set(_B, lambda b: b > 0), "BOOL", "lora_B")
_bad_tensors("a-too-wide", _set(_A, lambda a: np.ones((8, 33), np.float32)), "lora_A", "[8, 33]", "[8, 32]")
_bad_tensors("b-too-high", _set(_B, lambda b: np.ones((31, 8), np.float32)), "lora_B", "[31, 8]", "[32, 8]")
_bad_tensors("a-transposed", _set(_A, lambda a: a.T), "lora_A", "transposed")
_bad_tensors("a-flat", _set(_A, lambda a: a.reshape(-1)), "lora_A", "[256]")
_bad_tensors("a-empty", _set(_A, lambda a: a[:0]), "rank 0", "rank 8")
_bad_tensors("b-other-rank", _set(_B, lambda b: b[:, :4]), "lora_B", "[32, 4]")
_bad_tensors("pair-other-rank", lambda t: (_set(_A, lambda a: a[:4])(t), _set(_B, lambda b: b[:, :4])(t)), "rank 4")
_bad_tensors("other-base", _rename("model.layers", "transformer.h"), "none of the modules", "tiny-llama")
_bad_tensors("one-layer-too-many", _rename("layers.1.", "layers.7."), "layers.7.", "does not exist")
_bad_tensors("no-prefix", _rename("base_model.model.", ""), "not understood")
_bad_tensors("a-without-b", lambda t: t.pop(_B), "lora_A but no lora_B")
_bad_tensors("b-without-a", lambda t: t.pop(_A), "lora_B but no lora_A")
_bad_tensors(
    "half-the-layers",
    lambda t: [t.pop(k) for k in list(t) if "layers.1." in k],
    "no weights for it",
    error=WeightsMissing,
)
_bad_tensors("twice", lambda t: t.update({f"{_Q0}.lora_A.default.weight": t[_A]}), "stored twice")
_bad_tensors("untargeted", _rename("layers.0.self_attn.v_proj", "layers.0.self_attn.o_proj"), "is no target")
_bad_tensors("embedding-keys-on-linear", _rename(f"{_Q0}.lora_A.weight", f"{_Q0}.lora_embedding_A"), "stored twice")
_bad_tensors("unknown-tensor", _add("base_model.model.model.extra", 3), "'base_model.model.model.extra'")
_bad_tensors("dora-magnitude", _add(f"{_Q0}.lora_magnitude_vector", 32), "DoRA")
_bad_tensors("bias-tensor", _add(f"{_Q0}.lora_B.bias", 32), "bias")
_bad_tensors("saved-head", _add("base_model.model.lm_head.modules_to_save.weight", 64, 32), "modules_to_save")
_bad_tensors("full-head", _add("base_model.model.lm_head.weight", 64, 32), "full output head")
_bad_tensors("full-embedding", _add("base_model.model.model.embed_tokens.weight", 65, 32), "full embedding")
_bad_tensors("base-copy", _add("base_model.model.lm_head.base_layer.weight", 64, 32), "no LoRA weights")
_bad_tensors("endless-key", _add("base_model.model." + "a." * 50_000 + "lora_A.weight", 8, 32), "no lora_B")


def _build_resized_vocabulary(directory: Path, base: BaseShape) -> None:
    write_good_adapter(directory, base, targets=["lm_head"])
    tensors = adapter_tensors(base, targets=["lm_head"])
    copy = np.zeros((base.vocab_size + 1, base.hidden_size), np.float32)
    save_file(tensors | {"base_model.model.lm_head.base_layer.weight": copy}, directory / "adapter_model.safetensors")


_bad("resized-vocabulary", "[65, 32]", "vocabulary")(_build_resized_vocabulary)

# Pickles.


class _Boom:
    """Unpickled without care, this writes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.write_text, (self.trace, "executed")


@_bad("pickle", "adapter_model.bin")
def _pickle(directory: Path, base: BaseShape) -> None:
    """A torch archive whose pickle runs code; ``executed`` appears in the directory if anybody unpickles it."""
    write_good_adapter(directory, base)
    (directory / "adapter_model.safetensors").unlink()
    with zipfile.ZipFile(directory / "adapter_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"x": _Boom(directory / "executed")}, protocol=2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")


@_bad("pickle-of-old", "adapter_model.bin")
def _old_pickle(directory: Path, base: BaseShape) -> None:
    write_good_adapter(directory, base)
    (directory / "adapter_model.safetensors").unlink()
    (directory / "adapter_model.bin").write_bytes(pickle.dumps(_Boom(directory / "executed")))


@_bad("bad-safetensors-beside-good-bin", "adapter_model.safetensors is damaged")
def _both(directory: Path, base: BaseShape) -> None:
    write_good_adapter(directory, base)
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    (directory / "adapter_model.safetensors").write_bytes(b"garbage" * 10)
