"""The base of `throughput.py` in llama.cpp, which `docs/benchmarking.md` says how to build; optional.

The checkpoint is written as GGUF, all of it in fp32, and llama.cpp's own library answers the same requests through its
C API, in this process: all streams start together, a stream that is done leaves the batch, and greedy tokens are taken
from its logits by numpy. There is no server, tokenizer or sampler in the way. Its settings are the quickest of a sweep
over the same requests; its logits and its answers under them are held against transformers.

Two packages are needed that nothing else here uses: `gguf`, and the binding `llama-cpp-python`, for the layout of
llama.cpp's structures. Both are imported when asked for.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from peers import PeerRequest, quiet
from publishing import table
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

Numbers: TypeAlias = Sequence[int] | np.ndarray[Any, Any]
Logits: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

ALTERNATIVES: tuple[tuple[dict[str, Any], ...], ...] = (
    tuple({"batch_tokens": size, "ubatch_tokens": size} for size in (512, 1024, 2048, 4096)),
    ({"is_unified": True},),
    ({"has_flash_attention": False},),
    ({"kv": "f32"}, {"kv": "f32", "has_flash_attention": False}),
)
"""Changes of the settings, in groups: the sweep goes through them and keeps the best of each group."""

TOLERANCE = 1e-3
"""Largest error of a logit, relative to the largest logit, at which both compute the same model."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of llama.cpp that its speed depends on, at its defaults.

    Args:
        batch_tokens: Most prompt tokens of one call (`n_batch`); prompts are not divided between calls.
        ubatch_tokens: Most tokens of one forward pass (`n_ubatch`); of a call, each stream's share at a time.
        is_unified: One buffer of keys and values for all streams, instead of one for each.
        has_flash_attention: Attention in one operation.
        kv: Type of keys and values, ``f32`` or ``f16``. Flash attention rounds to 16 bits in each step
            what is kept in 32.
    """

    batch_tokens: int = 2048
    ubatch_tokens: int = 512
    is_unified: bool = False
    has_flash_attention: bool = True
    kv: str = "f16"

    def __str__(self) -> str:
        streams = "one KV buffer" if self.is_unified else "separate streams"
        attention = "flash attention" if self.has_flash_attention else "attention by products"
        return f"batch {self.batch_tokens}, ubatch {self.ubatch_tokens}, {streams}, {attention}, KV {self.kv}"


class LlamaCpp:
    """llama.cpp with one model, for requests that start together.

    Args:
        folder: Where `libllama` was built, or the folder above its `bin`.
        model: The checkpoint; ``None`` if the file is there.
        file: The GGUF file, written from the checkpoint.
        num_threads: For prompts and for decode steps.

    Raises:
        FileNotFoundError: There is no library in the folder.
    """

    def __init__(self, folder: Path, model: Path | None, file: Path, num_threads: int) -> None:
        place = next((one for one in (folder, folder / "bin") if list(one.glob("libllama.*"))), None)
        if place is None:
            raise FileNotFoundError(f"no libllama in {folder}")
        os.environ["LLAMA_CPP_LIB_PATH"] = str(place.resolve())
        self._library = library = importlib.import_module("llama_cpp")
        self._silence = library.llama_log_callback(lambda *_: None)
        library.llama_log_set(self._silence, None)
        library.llama_backend_init()
        self._checkpoint = model
        self._num_threads = num_threads
        if model is not None:
            write_gguf(model, file)
        self._model = library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())
        assert self._model, "llama.cpp refuses the file"
        self._num_vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._settings = Settings()
        self.swept: list[tuple[Settings, float]] = []
        self._error = float("nan")
        self._behind = float("nan")
        self.answers: list[list[int]] = []

    def choose(self, asked: Sequence[PeerRequest], clock: Callable[[], float]) -> None:
        """Take the settings that answer these requests quickest, in the second of two runs."""
        for settings in self.to_try():
            self.open(settings, asked)
            self.run(asked)
            began = clock()
            self.run(asked)
            self.swept.append((settings, clock() - began))
            print(f"llama.cpp {self.swept[-1][1]:8.2f} s: {settings}", flush=True)
        self.open(self.best(), asked)

    def to_try(self) -> Iterator[Settings]:
        yield Settings()
        for group in ALTERNATIVES:
            best = self.best()
            yield from (replace(best, **changes) for changes in group)

    def best(self) -> Settings:
        return min(self.swept, key=lambda one: one[1])[0]

    def check(self, asked: Sequence[PeerRequest]) -> None:
        """Compare the logits behind every prompt with those of transformers, and judge the answers by them.

        Answers themselves may differ: keys and values may have 16 bits here, and two tokens all but the same logit.

        Raises:
            AssertionError: They are those of another model.
        """
        self.run(asked)
        expected, behind = [], 0.0
        with quiet(), torch.inference_mode():
            reference = LlamaForCausalLM.from_pretrained(self._checkpoint).eval()
            for one, answer in zip(asked, self.answers, strict=True):
                logits = reference(torch.tensor([[*one.prompt, *answer[:-1]]])).logits[0, len(one.prompt) - 1 :]
                chosen = logits.gather(1, torch.tensor(answer)[:, None])
                behind = max(behind, float((logits.amax(1, keepdim=True) - chosen).max() / logits.abs().max()))
                expected.append(logits[0].numpy())
        self._forget()
        error = np.abs(self._read_prompts(asked) - np.stack(expected)).max() / np.abs(expected).max()
        self._error = float(error)
        self._behind = behind
        assert self._error < TOLERANCE, f"Logits of llama.cpp are off by {self._error:.1e} of the largest"
        assert behind < 2 * TOLERANCE, f"A token of llama.cpp is {behind:.1e} of the largest logit behind the likeliest"

    def run(self, asked: Sequence[PeerRequest]) -> None:
        """Answer all requests at once, each in a stream of its own."""
        self._forget()
        tokens = self._read_prompts(asked).argmax(1)
        self.answers = [[token] for token in tokens.tolist()]
        while streams := [index for index, one in enumerate(asked) if len(self.answers[index]) < one.num_out]:
            last = [self.answers[index][-1] for index in streams]
            places = [len(asked[index].prompt) + len(self.answers[index]) - 1 for index in streams]
            tokens = self._decode(last, places, streams, np.ones(len(streams))).argmax(1)
            for index, token in zip(streams, tokens.tolist(), strict=True):
                self.answers[index].append(token)

    def facts(self) -> dict[str, Any]:
        """Return versions, settings and the sweep, for the result."""
        system: str = self._library.llama_print_system_info().decode()
        return {
            "version": self._library.llama_version().decode(),
            "binding": self._library.__version__,
            "built with": " ".join(system.replace(" = 1", "").replace("|", "").split()),
            "backends": self._backends(),
            "threads": self._num_threads,
            "error of logits": self._error,
            "behind the likeliest": self._behind,
            "settings": str(self._settings),
            "sweep": {str(settings): seconds for settings, seconds in self.swept},
        }

    def _backends(self) -> list[str]:
        """Return the names of what computes: ``CPU``, and ``BLAS`` where it was built with it."""
        library = self._library.llama_cpp._lib
        library.ggml_backend_reg_get.argtypes, library.ggml_backend_reg_get.restype = [ctypes.c_size_t], ctypes.c_void_p
        library.ggml_backend_reg_name.argtypes, library.ggml_backend_reg_name.restype = (
            [ctypes.c_void_p],
            ctypes.c_char_p,
        )
        numbers = range(library.ggml_backend_reg_count())
        return [library.ggml_backend_reg_name(library.ggml_backend_reg_get(number)).decode() for number in numbers]

    def close(self) -> None:
        if self._context is not None:
            self._library.llama_free(self._context)
            self._context = None
        self._library.llama_model_free(self._model)

    def read_all(self, one: PeerRequest) -> Logits:
        """Return the logits behind every token of a prompt, ``[tokens, vocab]``."""
        self._forget()
        places = np.arange(len(one.prompt))
        return self._decode(one.prompt, places, np.zeros(len(places)), np.ones(len(places))).copy()

    def open(self, settings: Settings, asked: Sequence[PeerRequest]) -> None:
        """Make a context with room for these requests."""
        library = self._library
        if self._context is not None:
            library.llama_free(self._context)
        room = [-(-(len(one.prompt) + one.num_out) // 256) * 256 for one in asked]
        params = library.llama_context_default_params()
        params.n_seq_max = len(asked)
        params.n_ctx = max(room) * len(asked)
        params.n_batch = settings.batch_tokens
        params.n_ubatch = settings.ubatch_tokens
        params.n_threads = params.n_threads_batch = self._num_threads
        params.kv_unified = settings.is_unified
        params.flash_attn_type = int(settings.has_flash_attention)
        params.type_k = params.type_v = {"f32": library.GGML_TYPE_F32, "f16": library.GGML_TYPE_F16}[settings.kv]
        self._settings = settings
        self._context = library.llama_init_from_model(self._model, params)
        assert self._context, f"llama.cpp has no context for {settings}"

    def _forget(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), False)

    def _read_prompts(self, asked: Sequence[PeerRequest]) -> Logits:
        """Return the logits behind every prompt; a call takes as many whole prompts as fit."""
        calls: list[list[int]] = [[]]
        room = self._settings.batch_tokens
        for stream, one in enumerate(asked):
            if len(one.prompt) > room:
                calls.append([])
                room = self._settings.batch_tokens
            calls[-1].append(stream)
            room -= len(one.prompt)
        return np.concatenate([self._read_in_one_call(asked, streams) for streams in calls])

    def _read_in_one_call(self, asked: Sequence[PeerRequest], streams: Sequence[int]) -> Logits:
        lengths = [len(asked[stream].prompt) for stream in streams]
        tokens = np.concatenate([asked[stream].prompt for stream in streams])
        places = np.concatenate([np.arange(length) for length in lengths])
        wanted = np.zeros(len(tokens), np.bool_)
        wanted[np.cumsum(lengths) - 1] = True
        return self._decode(tokens, places, np.repeat(streams, lengths), wanted).copy()

    def _decode(self, tokens: Numbers, places: Numbers, streams: Numbers, wanted: Numbers) -> Logits:
        """Run one batch; return the wanted logits, which the next call overwrites."""
        library, number = self._library, ctypes.POINTER(ctypes.c_int32)
        rows = [np.asarray(values, np.int32) for values in (tokens, places, streams, np.ones(len(tokens)))]
        addresses = rows[2].ctypes.data + rows[2].itemsize * np.arange(len(tokens), dtype=np.uint64)
        flags = np.asarray(wanted, np.int8)
        batch = library.llama_batch(
            n_tokens=len(tokens),
            token=rows[0].ctypes.data_as(number),
            pos=rows[1].ctypes.data_as(number),
            n_seq_id=rows[3].ctypes.data_as(number),
            seq_id=addresses.ctypes.data_as(ctypes.POINTER(number)),
            logits=flags.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        code = library.llama_decode(self._context, batch)
        assert code == 0, f"llama_decode returned {code}"
        return np.ctypeslib.as_array(library.llama_get_logits(self._context), (int(flags.sum()), self._num_vocab))


def reason_to_leave_out(folder: Path | None) -> str | None:
    """Return why llama.cpp cannot be an opponent here, in words; ``None`` if it can."""
    if folder is None:
        return "no --llama-cpp DIR was given (docs/benchmarking.md says how to build it)"
    missing = [name for name in ("gguf", "llama_cpp") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} is not installed (docs/benchmarking.md says how)"
    return None


def described(facts: dict[str, Any]) -> list[str]:
    """Return the lines of a page about what `LlamaCpp.facts` returned."""
    return [
        f"llama.cpp {facts['version']} (as in llama-cpp-python {facts['binding']}; {' and '.join(facts['backends'])}; "
        f"{facts['built with']}) has {facts['threads']} threads, and the quickest settings of this sweep, made before "
        f"the first round: {facts['settings']}. Its logits behind the prompts are those of transformers but for "
        f"{facts['error of logits']:.1e} of the largest, and no token of its answers is more than "
        f"{facts['behind the likeliest']:.1e} of that behind the one that transformers finds likeliest there.",
        "",
        *table(("settings", "seconds"), ((name, f"{seconds:.2f}") for name, seconds in facts["sweep"].items())),
    ]


def write_gguf(model: Path, file: Path, *, is_half: bool = False) -> None:
    """Write a Llama checkpoint in llama.cpp's format, matrices in fp32 or fp16, without a tokenizer, file by file."""
    gguf: Any = importlib.import_module("gguf")
    config = LlamaConfig.from_pretrained(model)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if is_half else gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    files = sorted(model.glob("*.safetensors"))
    # Where the embedding is tied to the head there is no head in the file, as llama.cpp expects.
    for source in files:
        with safe_open(source, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - no mapping
                shape = tuple(weights.get_slice(name).get_shape())
                dtype = np.dtype(np.float16 if is_half and len(shape) > 1 else np.float32)
                num_bytes = math.prod(shape) * dtype.itemsize
                writer.add_tensor_info(names.get_name(name, try_suffixes=(".weight",)), shape, dtype, num_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for source in files:
        for name, weight in load_file(source).items():
            if name.endswith("q_proj.weight"):
                weight = interleaved(weight, config.num_attention_heads)
            if name.endswith("k_proj.weight"):
                weight = interleaved(weight, config.num_key_value_heads)
            weight = weight.half() if is_half and weight.ndim > 1 else weight.float()
            writer.write_tensor_data(weight.contiguous().numpy())
    writer.close()


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the rows of a q or k projection in llama.cpp's order.

    transformers rotates row *i* of a head with row *i + size/2*, llama.cpp with the next row. Scores do not depend on
    the order of the rows of a head.
    """
    halves = weight.view(num_heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)
