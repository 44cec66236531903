"""Base checkpoints that are damaged, or another model's: refused by file and tensor before anything is served."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import run_main
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPTNeoConfig,
    LlamaConfig,
    Mamba2Config,
    MixtralConfig,
    PreTrainedConfig,
)

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.errors import ConfigError
from manylora.demo import demo_model_path
from manylora.execution.build import build_parts
from manylora.execution.model.base_weights import BaseWeights
from manylora.execution.model.freeze import load_weights
from manylora.execution.model.load import load_model
from manylora.execution.storage.adapter_files import InlineReader
from manylora.serving.offline import Engine
from manylora.serving.text import Tokenizer

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
UP = "model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def save(folder: Path, config: PreTrainedConfig, **options: Any) -> Path:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, **options)
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("bases")
    save(tmp / "single", LlamaConfig(**SMALL))
    save(tmp / "tied", LlamaConfig(**SMALL, tie_word_embeddings=True))
    save(tmp / "shards", LlamaConfig(**SMALL), max_shard_size="20KB")
    return tmp


def load(folder: Path) -> BaseWeights:
    return load_weights(ModelConfig(model=str(folder), device="cpu", base_dtype="float32"), load_model)[1]


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    """Return damage to the tensors of a checkpoint of one file."""

    def damage(folder: Path) -> None:
        found = load_file(folder / FILE)
        change(found)
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / FILE, {"format": "pt"})

    return damage


def config(**fields: object) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | fields))

    return damage


def index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], object]:
    """Return damage to the names of files in an index."""

    def damage(folder: Path) -> None:
        found = json.loads((folder / INDEX).read_text())
        change(found["weight_map"])
        (folder / INDEX).write_text(json.dumps(found))

    return damage


def cut(file: str, keep: Callable[[int], int]) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / file, keep((folder / file).stat().st_size))


def write(file: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(content)


def with_number(name: str, number: float) -> Callable[[Path], object]:
    def change(found: dict[str, Tensor]) -> None:
        found[name][-1, -1] = number

    return tensors(change)


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Return damage to the header of a checkpoint of one file, whose bytes stay."""

    def damage(folder: Path) -> None:
        content = (folder / FILE).read_bytes()
        length = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + length])
        change(entries)
        changed = json.dumps(entries).encode()
        (folder / FILE).write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])

    return damage


def shards_of(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def copy_into_another_shard(folder: Path) -> None:
    place = shards_of(folder)[UP]
    other = next(file for file in sorted(shards_of(folder).values()) if file != place)
    found = {**load_file(folder / other), UP: load_file(folder / place)[UP]}
    save_file(found, folder / other, {"format": "pt"})


def other_models_index(folder: Path) -> None:
    save(folder / "other", LlamaConfig(**SMALL | {"num_hidden_layers": 3}), max_shard_size="1KB")
    wanted = shards_of(folder / "other")
    own = sorted(set(shards_of(folder).values()))
    index(lambda found: found.update({name: own[0] for name in wanted if name not in found}))(folder)
    shutil.rmtree(folder / "other")


def unreadable(folder: Path) -> None:
    (folder / FILE).unlink()
    (folder / FILE).mkdir()  # as good as no permission, which root has


def dangling(folder: Path) -> None:
    (folder / FILE).unlink()
    (folder / FILE).symlink_to("gone")


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no tensor": ("single", tensors(lambda t: t.pop(UP)), rf"{FILE} lacks tensor '{UP}'$"),
    "no norm": ("single", tensors(lambda t: t.pop("model.norm.weight")), rf"{FILE} lacks tensor 'model.norm.weight'$"),
    "no head": ("single", tensors(lambda t: t.pop("lm_head.weight")), rf"{FILE} lacks tensor 'lm_head.weight'$"),
    "no tied weight": ("tied", tensors(lambda t: t.pop(EMBEDDING)), rf"{FILE} lacks tensor .*'"),
    "an extra tensor": (
        "single",
        tensors(lambda t: t.update({"model.layers.1.mlp.extra.weight": torch.ones(3)})),
        rf"{FILE} has tensor 'model.layers.1.mlp.extra.weight', which no part of LlamaForCausalLM takes",
    ),
    "another shape": (
        "single",
        tensors(lambda t: t.update({UP: t[UP][:, :-1]})),
        rf"{FILE} has tensor '{UP}' of shape \[48, 31\], expected \[48, 32\]",
    ),
    "codes in place of numbers": (
        "single",
        tensors(lambda t: t.update({UP: t[UP].to(torch.int8)})),
        rf"{FILE} has tensor '{UP}' of type I8, expected one of F64, F32, F16, BF16",
    ),
    "small floats": (
        "single",
        tensors(lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)})),
        rf"{FILE} has tensor '{UP}' of type F8_E4M3",
    ),
    "NaN": ("single", with_number(UP, float("nan")), rf"{FILE} has tensor '{UP}' with NaN in it"),
    "inf": ("single", with_number(UP, float("inf")), rf"{FILE} has tensor '{UP}' with infinity in it"),
    "-inf in tied": ("tied", with_number(EMBEDDING, float("-inf")), rf"{FILE} has tensor '{EMBEDDING}' with infinity"),
    "cut": ("single", cut(FILE, lambda size: size - 100), rf"{FILE} is damaged .* its tensors take \d+ bytes"),
    "cut in the header": ("single", cut(FILE, lambda size: 100), rf"{FILE} is damaged .* a header of \d+ bytes"),
    "cut in the length": ("single", cut(FILE, lambda size: 5), rf"{FILE} is damaged .* in a file of 5"),
    "empty": ("single", cut(FILE, lambda size: 0), rf"{FILE} is damaged .* in a file of 0"),
    "an absurd length": ("single", write(FILE, b"\xff" * 64), rf"{FILE} is damaged .* 18446744073709551615 bytes"),
    "a header of noise": ("single", write(FILE, b"\x08" + b"\0" * 70), rf"{FILE} is damaged .* not valid JSON"),
    "a page of HTML": ("single", write(FILE, b"<!DOCTYPE html>" * 9), rf"{FILE} is damaged"),
    "a false size": (
        "single",
        header(lambda entries: entries[UP].update(shape=[48, 33])),
        rf"{FILE} is damaged .* tensor '{UP}' has \d+ bytes, which its shape does not take",
    ),
    "an unknown type": (
        "single",
        header(lambda entries: entries[UP].update(dtype="Q4")),
        rf"{FILE} is damaged .* tensor '{UP}' is malformed",
    ),
    "unreadable": ("single", unreadable, rf"{FILE} cannot be read: Is a directory"),
    "a dangling link": (
        "single",
        dangling,
        rf"{FILE} cannot be read: No such file",
    ),
    "no weights": ("single", lambda folder: (folder / FILE).unlink(), rf"no {FILE} and no {INDEX}"),
    "weights in a pickle": (
        "single",
        lambda folder: (folder / FILE).rename(folder / "pytorch_model.bin"),
        "pytorch_model.bin is of another format",
    ),
    "an adapter": (
        "single",
        write("adapter_config.json", b'{"base_model_name_or_path": "/etc"}'),
        "adapter_config.json: it is an adapter",
    ),
    "no shard": (
        "shards",
        lambda folder: (folder / shards_of(folder)[UP]).unlink(),
        rf"model-0.*safetensors is missing, which {INDEX} names for tensor 'model\.layers\.1\.",
    ),
    "a cut shard": (
        "shards",
        lambda folder: cut(shards_of(folder)[UP], lambda size: size - 4)(folder),
        r"model-0\S+safetensors is damaged",
    ),
    "another model's index": (
        "shards",
        other_models_index,
        rf"model-00001\S+ lacks tensor 'model\.layers\.2\..*, which {INDEX} places there",
    ),
    "a shard outside": (
        "shards",
        index(lambda found: found.update({UP: "../single/" + FILE})),
        rf"{INDEX} places tensor '{UP}' in '../single/{FILE}', expected a .safetensors file of that folder",
    ),
    "a shard at a path": (
        "shards",
        index(lambda found: found.update({UP: "/etc/passwd"})),
        rf"{INDEX} places tensor '{UP}' in '/etc/passwd'",
    ),
    "a tensor in two shards": ("shards", copy_into_another_shard, rf"tensor '{UP}' is in model-0\S+ and in model-0"),
    "an index of noise": ("shards", write(INDEX, b"\0\1"), rf"{INDEX} is damaged"),
    "an index of lists": ("shards", write(INDEX, b'{"weight_map": ["a"], "metadata": {}}'), rf"{INDEX} is damaged"),
    "an empty index": ("shards", write(INDEX, b'{"weight_map": {}, "metadata": {}}'), rf"{INDEX} is damaged"),
    "another hidden size": (
        "single",
        config(hidden_size=64),
        rf"{FILE} has tensor 'lm_head.weight' .* \[64, 64\] by {CONFIG}",
    ),
    "more layers": ("single", config(num_hidden_layers=3), rf"{FILE} lacks tensor 'model.layers.2.\S+' and 8 more"),
    "fewer layers": (
        "single",
        config(num_hidden_layers=1),
        rf"{FILE} has tensor 'model.layers.1.\S+' and 8 more, which no part of LlamaForCausalLM takes",
    ),
    "another vocabulary": ("single", config(vocab_size=65), rf"{FILE} has tensor 'lm_head.weight' of shape \[64, 32\]"),
    "no configuration": ("single", lambda folder: (folder / CONFIG).unlink(), CONFIG),
    "an empty configuration": ("single", write(CONFIG, b""), CONFIG),
    "a configuration of noise": ("single", write(CONFIG, bytes(range(256))), CONFIG),
    "a configuration of a list": ("single", write(CONFIG, b"[1]"), CONFIG),
    "no type": ("single", write(CONFIG, b"{}"), CONFIG),
    "an unknown type of model": ("single", config(model_type="nonsense"), f"{CONFIG}.*nonsense"),
    "text as a size": ("single", config(hidden_size="large"), f"{CONFIG}.*hidden_size"),
    "no heads": ("single", config(num_attention_heads=0), f"{CONFIG} cannot be read"),
    "heads that do not divide": ("single", config(num_attention_heads=5), f"{CONFIG}.*attention heads"),
    "below zero": ("single", config(intermediate_size=-1), "of type 'llama'|intermediate_size"),
}


@pytest.mark.parametrize(("base", "damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_base_is_refused_by_file_and_tensor(
    bases: Path, base: str, damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(bases / base, tmp_path / "base"))
    damage(folder)
    with pytest.raises(ConfigError) as refused:
        load(folder)
    message = str(refused.value)
    assert re.search(words, message) and str(folder) in message, message
    assert len(message) < 420 and "\n" not in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_named(bases: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bases / "single", tmp_path / "base"))
    (folder / FILE).chmod(0)
    with pytest.raises(ConfigError, match=f"{FILE} cannot be read: Permission denied"):
        load(folder)


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ("single", lambda folder: None),
        ("tied", lambda folder: None),
        ("shards", lambda folder: None),
        ("tied", tensors(lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))),
        ("tied", tensors(lambda t: t.update({"lm_head.weight": t.pop(EMBEDDING)}))),
        ("single", tensors(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))),
        ("single", tensors(lambda t: t.update({name: value.bfloat16() for name, value in t.items()}))),
        ("single", tensors(lambda t: t.update({n.removeprefix("model."): t.pop(n) for n in list(t)}))),
    ],
    ids=["single", "tied", "shards", "tied head", "head alone", "old buffer", "bfloat16", "no prefix"],
)
def test_what_the_architecture_allows_is_served(
    bases: Path, base: str, change: Callable[[Path], object], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(bases / base, tmp_path / "base"))
    change(folder)
    expected, found = load(bases / base), load(folder)
    for name, weight in expected.tensors.items():
        torch.testing.assert_close(found.tensors[name].to_dense(), weight.to_dense(), atol=1e-3, rtol=1e-2)


def test_an_expert_that_is_missing_or_left_over_is_refused(tmp_path: Path) -> None:
    """Transformers merges experts into one weight as it loads them."""
    folder = save(tmp_path / "base", MixtralConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1))
    load(folder)
    names = [name for name in load_file(folder / FILE) if "experts.1." in name]
    assert names
    shutil.copytree(folder, tmp_path / "missing")
    tensors(lambda t: t.pop(names[0]))(tmp_path / "missing")
    shutil.copytree(folder, tmp_path / "more")
    tensors(lambda t: t.update({name.replace("experts.1.", "experts.2."): t[name].clone() for name in names}))(
        tmp_path / "more"
    )
    for damaged in ("missing", "more"):
        with pytest.raises(ConfigError, match="experts"):
            load(tmp_path / damaged)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: [path.unlink() for path in folder.glob("*token*")], "none of its files is a tokenizer's"),
        (write("tokenizer.json", b""), "tokenizer"),
        (write("tokenizer.json", b'{"version": "1.0"}'), "tokenizer"),
        (cut("tokenizer.json", lambda size: size // 2), "tokenizer"),
        (write("tokenizer_config.json", b"[]"), "tokenizer"),
    ],
    ids=["missing", "empty", "no model", "cut", "a list"],
)
def test_a_broken_tokenizer_is_refused(damage: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo_model_path(), tmp_path / "base"))
    damage(folder)
    with pytest.raises(ConfigError, match=words) as refused:
        Tokenizer.load(folder)
    assert str(folder) in str(refused.value)


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (
            Mamba2Config(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8),
            "no layer has keys",
        ),
        (
            GPTNeoConfig(
                vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
            ),
            "its attention is part of the layer's code",
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_an_architecture_is_refused_by_the_assumption_that_fails(
    shape: PreTrainedConfig, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"of type '{shape.model_type}'.*, which is not supported: {words}"):
        load(save(tmp_path, shape))


@pytest.mark.parametrize(
    ("memory", "asked"),
    [
        (MemoryConfig(memory_bytes=900 << 40), f"memory_bytes = {900 << 40}, 921600.0 GiB"),
        (MemoryConfig(num_pages=1 << 40), f"num_pages = {1 << 40}, "),
    ],
)
def test_a_pool_larger_than_the_machine_is_refused(memory: MemoryConfig, asked: str, bases: Path) -> None:
    config = EngineConfig(model=ModelConfig(model=str(bases / "single"), device="cpu"), memory=memory)
    with pytest.raises(ConfigError, match=rf"Got {asked}.* expected at most the \d+\.\d GiB .* available now\)$"):
        build_parts(config, WallClock(), readers=[InlineReader()])


@pytest.fixture
def incomplete(tmp_path: Path) -> Path:
    """Return the demo's base without a tensor."""
    folder = Path(shutil.copytree(demo_model_path(), tmp_path / "base"))
    tensors(lambda t: t.pop(UP))(folder)
    return folder


def test_a_program_gets_the_refusal(incomplete: Path) -> None:
    with pytest.raises(ConfigError, match=f"{FILE} lacks tensor '{UP}'"):
        Engine(str(incomplete), device="cpu")


@pytest.mark.parametrize("command", ["generate", "backbone"])
def test_a_command_prints_one_line(
    command: str,
    incomplete: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = ["hello"] if command == "generate" else ["--socket", str(tmp_path / "socket")]
    assert run_main(monkeypatch, command, str(incomplete), *options) == 2
    printed = capfd.readouterr().err
    assert f"{FILE} lacks tensor '{UP}'" in printed.splitlines()[-1]
    assert "Traceback" not in printed and "LOAD REPORT" not in printed
    assert not (tmp_path / "socket").exists()
