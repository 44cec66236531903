"""Bases in 8 and 4 bits against llama.cpp on this processor: tokens per second, memory, and time to the first answer.

    python bench/bases.py --llama-cpp BUILD --folder DIR [--shape 1b] [--streams 1 8 32] [--prompt 2048] [--rounds 5]
        [--openvino PYTHON]

The base has the shape of a Llama and random weights, in bfloat16; `llama-quantize` makes its GGUF files from the same
numbers. Our int8 stands beside Q8_0, our int4 beside the quicker of Q4_0 and Q4_K_M; ``--precisions`` adds bfloat16
beside BF16, and float32. Each candidate is one process per
round, in turns; the order of turns rotates. All of them answer the same loads: so many streams at once, each with a
prompt of 128 tokens and an answer of 64; and one prompt of ``--prompt`` tokens with an answer of one.

llama.cpp is its own `llama-batched-bench`, which needs no server and no tokenizer; ours is the engine in one process,
likewise. llama.cpp must be built for this processor: every vector extension of the processor that it has code for must
be in what it says of itself. Its micro-batch, and the tokens of our steps, are the quickest of a sweep over the largest
load, made before the rounds.

``--openvino`` is the Python of an environment with `openvino-genai`, for a second peer in each precision; the folder
``ov`` below ``--folder`` holds what `bases_openvino.py` reads, as ``1b-int8`` and ``1b-int4``.

The figure of a load is the time from the first token in to the last token out, and a ratio is llama.cpp's time over
ours, round by round. *Ready* is a process that starts, answers one token of one and ends. *Memory* is the largest
resident set of the process, pages of mapped files included.

A comparison that takes hours can be made in pieces: with ``--keep FILE`` every turn on a quiet machine is written there
as it ends, and the next call goes on with the turn after it; ``--turns N`` ends a call after so many.

``--adapters N`` adds our int8 base with N adapters of ranks 8 to 128 on all linears, in bfloat16, one for each stream
in turn, and the floor: the bytes that a decode step must read, over the rate at which this machine reads memory. The
result then has a page of its own. ``--precisions int8 --opponents`` leaves llama.cpp out of it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from publishing import Others, Steps, arguments, publish, reason_if_busy, reason_to_refuse, table

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "vocab_size")
SHAPES: dict[str, dict[str, int]] = {
    "1b": dict(zip(_SIZES, (2048, 8192, 16, 64, 32768), strict=True)),
    "8b": dict(zip(_SIZES, (4096, 14336, 32, 128, 128256), strict=True)),
}
"""Llama 3.2 1B (with a vocabulary of 32k, which makes 1.1 billion parameters) and Llama 3.1 8B."""

Load: TypeAlias = tuple[int, int, int]
"""Streams, and the tokens of each one's prompt and answer."""

HEADS, KV_HEADS, MODEL_LEN = 32, 8, 8192
PROMPT, ANSWER = 128, 64
RANKS = (8, 16, 32, 64, 128)
UBATCHES, STEPS = (128, 512, 2048), (256, 512, 2048)
GROUPS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("BF16",),
    "int8": ("Q8_0",),
    "int4": ("Q4_0", "Q4_K_M"),
}
"""Our precisions, and llama.cpp's beside them."""

OPENVINO = {precision: f"OpenVINO {precision}" for precision in ("int8", "int4")}

FLAGS = {"avx512f": "AVX512", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16", "amx_int8": "AMX_INT8"}
"""Extensions by the kernel's name, and by llama.cpp's."""


def main() -> None:
    parser = arguments(__doc__, quick="one round of one stream")
    parser.add_argument("--llama-cpp", type=Path, help="folder with llama-batched-bench and llama-quantize")
    parser.add_argument("--openvino", type=Path, help="Python of an environment with openvino-genai")
    parser.add_argument("--folder", type=Path, default=Path(".bases"), help="checkpoints are made and kept there")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precisions", nargs="+", choices=sorted(GROUPS), default=["int8", "int4"])
    parser.add_argument(
        "--opponents",
        nargs="*",
        choices=[name for names in GROUPS.values() for name in names],
        help="of llama.cpp; none without a name, all of the precisions' by default",
    )
    parser.add_argument(
        "--sweep", type=int, metavar="STREAMS", help="of the load that chooses steps; default: the most"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep each turn, and go on where FILE ends")
    parser.add_argument("--turns", type=int, default=sys.maxsize, help="at most, in this call")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--ours", metavar="LOADS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        return answer(json.loads(options.ours))
    if options.llama_cpp is None and options.opponents != []:
        parser.error("give --llama-cpp (docs/benchmarking.md says how to build it), or --opponents without a name")
    if options.quick:
        options.streams, options.rounds = [1], 1
    compare(options)


def compare(options: argparse.Namespace) -> None:
    """Measure all candidates in turns, and publish."""
    model = apart(make_checkpoint, options.shape, options.folder / options.shape)
    asked = options.opponents
    kinds = [kind for one in options.precisions for kind in GROUPS[one] if asked is None or kind in asked]
    built_with = check_build(options.llama_cpp) if kinds else ""
    files = apart(make_ggufs, model, options.llama_cpp, kinds) if kinds else {}
    adapters = apart(make_adapters, model, options.adapters)
    loads = [(streams, PROMPT, ANSWER) for streams in options.streams] + [(1, options.prompt, 1)]
    kept = json.loads(options.keep.read_text()) if options.keep and options.keep.exists() else {}
    if not kept:
        for precision in options.precisions:  # the first start writes the packed cache, as a first start does anywhere
            run_ours(model, precision, options, STEPS[0], [(1, 1, 1)])
        kept |= {"step": {one: choose_step(model, one, options) for one in options.precisions}, "turns": []}
        kept["ubatch"] = {name: choose_ubatch(options.llama_cpp, file, options) for name, file in files.items()}
        keep(kept, options)
    candidates: dict[str, Callable[[Sequence[Load]], dict[str, Any]]] = {
        one: partial(run_ours, model, one, options, kept["step"][one]) for one in options.precisions
    }
    if adapters:
        candidates["int8, adapters"] = partial(
            run_ours, model, "int8", options, kept["step"]["int8"], adapters=adapters
        )
    for name, file in files.items():
        candidates[name] = partial(run_llama, options.llama_cpp, file, kept["ubatch"][name])
    if options.openvino is not None:
        for precision in OPENVINO.keys() & set(options.precisions):
            exported = options.folder / "ov" / f"{options.shape}-{precision}"
            candidates[OPENVINO[precision]] = partial(run_openvino, options.openvino, exported)
    busy = take_turns(candidates, loads, kept, options)
    if len(kept["turns"]) < options.rounds * len(candidates):
        return
    found = {name: [one for each, one in kept["turns"] if each == name] for name in candidates}
    figures = {
        "shape": options.shape,
        "llama.cpp": built_with,
        "ubatch": kept["ubatch"],
        "step": kept["step"],
        "loads": loads,
        "busy": busy,
        "bytes_per_s": apart(read_rate),
        "weight_bytes": {name: file.stat().st_size for name, file in files.items()},
        "adapter_bytes": sum(file.stat().st_size for one in adapters for file in one.glob("*.safetensors")),
        "rounds": found,
    }
    publish(
        f"bases_{options.shape}{'_adapters' if adapters else ''}",
        figures,
        "\n".join(report(figures, options)),
        is_kept=not options.quick,
        refused=reason_to_refuse(options.rounds, busy),
    )


def take_turns(
    candidates: dict[str, Callable[[Sequence[Load]], dict[str, Any]]],
    loads: Sequence[Load],
    kept: dict[str, Any],
    options: argparse.Namespace,
) -> float:
    """Add turns to ``kept``; return the largest share of the machine that others took in one of them."""
    names, turns = list(candidates), kept["turns"]
    order = [names[(number + place) % len(names)] for number in range(options.rounds) for place in range(len(names))]
    left = order[len(turns) :][: options.turns]
    said = Steps(len(left))
    for name in left:
        others = Others()
        ready = candidates[name]([(1, 1, 1)])["process_s"]
        turn = {**candidates[name](loads), "ready_s": ready, "busy": others.share()}
        if options.keep and (reason := reason_if_busy(turn["busy"])):
            raise SystemExit(f"{name}: this turn is not kept: {reason}")
        turns.append((name, turn))
        keep(kept, options)
        said.done(f"turn {len(turns)} of {len(order)}, {name}")
    return max((one["busy"] for _, one in turns), default=0.0)


def keep(kept: dict[str, Any], options: argparse.Namespace) -> None:
    """Write what was measured, if it is to be kept between calls."""
    if options.keep:
        options.keep.write_text(json.dumps(kept))


def report(figures: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Return the tables of a result."""
    found, loads = figures["rounds"], figures["loads"]
    titles = [f"{streams} x {prompt}+{answer}" for streams, prompt, answer in loads]

    def median(name: str, get: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(get(one) for one in found[name])

    def seconds(name: str, place: int) -> float:
        return median(name, lambda one: one["total_s"][place])

    rows = []
    for name in found:
        speeds = [
            f"{streams * (answer if answer > 1 else prompt) / seconds(name, place):,.1f}"
            for place, (streams, prompt, answer) in enumerate(loads)
        ]
        memory, ready = median(name, lambda one: one["peak_bytes"]), median(name, lambda one: one["ready_s"])
        rows.append([name, *speeds, f"{memory / 2**30:.2f}", f"{ready:.1f}"])
    sweeps = ", ".join(f"{name} {size}" for name, size in (figures["step"] | figures["ubatch"]).items())
    kinds = " and ".join(options.precisions)
    beside = f" with {options.adapters} adapters, beside the floor" if options.adapters else ", beside llama.cpp"
    asked = ["python bench/bases.py --shape", figures["shape"], "--precisions", *options.precisions]
    asked += ["--opponents", *options.opponents] if options.opponents is not None else []
    asked += ["--adapters", str(options.adapters)] if options.adapters else []
    built = f" llama.cpp built with {figures['llama.cpp']}." if figures["ubatch"] else ""
    lines = [
        f"# A Llama of {figures['shape']} in {kinds}{beside}",
        "",
        f"`{' '.join(asked)}`: medians of {len(next(iter(found.values())))} rounds. Answered tokens a second from the "
        "first token in to the last out; of the last load, prompt tokens a second. Tokens of a step or micro-batch, "
        f"the quickest of a sweep each: {sweeps}.{built}",
        "",
        *table(["", *titles, "peak GiB", "ready s"], rows),
    ]
    ratios = []
    for precision in options.precisions:
        for rivals in (
            [name for name in GROUPS[precision] if name in found],
            [name for name in (OPENVINO.get(precision),) if name in found],
        ):
            cells = []
            for place in range(len(loads) if rivals else 0):
                rival = min(rivals, key=lambda name: seconds(name, place))
                pairs = zip(found[precision], found[rival], strict=True)
                by_round = sorted(theirs["total_s"][place] / ours["total_s"][place] for ours, theirs in pairs)
                cells.append(f"{statistics.median(by_round):.2f} ({by_round[0]:.2f}, {by_round[-1]:.2f}) {rival}")
            if cells:
                ratios.append([precision, *cells])
    if ratios:
        lines += [
            "",
            "Times as fast as the quickest opponent of its kind: the median by round of its time over ours (lowest, "
            "highest).",
            "",
            *table(["", *titles], ratios),
        ]
    if "int8, adapters" in found:
        lines += floor_lines(figures, seconds)
    return lines


def floor_lines(figures: dict[str, Any], seconds: Callable[[str, int], float]) -> list[str]:
    """Return the table of decode with adapters beside its floor."""
    rate, found = figures["bytes_per_s"], figures["rounds"]
    rows = []
    for place, (streams, _, answer) in enumerate(figures["loads"][:-1]):
        cells: list[str] = []
        for name in ("int8", "int8, adapters"):
            one = found[name][0]
            floor_s = (one["base_bytes"] + one["adapter_bytes_of_step"][place]) / rate
            step_s = statistics.median(each["decode_s"][place] for each in found[name]) / (answer - 1)
            cells += [f"{1e3 * floor_s:.1f}", f"{1e3 * step_s:.1f}", f"{step_s / floor_s:.2f}"]
        rows.append([streams, *cells])
    heads = [f"{name}: {what}" for name in ("base", "adapters") for what in ("floor ms", "step ms", "ratio")]
    return [
        "",
        f"Floor of a decode step: the base's bytes and those of the step's adapters, at {rate / 1e9:.1f} GB/s, the "
        "rate at which this machine reads memory with all its threads.",
        "",
        *table(["streams", *heads], rows),
    ]


def check_build(folder: Path) -> str:
    """Return what llama.cpp says it was built with.

    Raises:
        SystemExit: It lacks an extension of this processor.
    """
    flags = set(Path("/proc/cpuinfo").read_text().split())
    said = apart(system_info, folder)
    missing = [theirs for ours, theirs in FLAGS.items() if ours in flags and f"{theirs} = 1" not in said]
    if missing:
        raise SystemExit(f"llama.cpp in {folder} is not built for this processor: it lacks {', '.join(missing)}")
    return " ".join(re.findall(r"(\w+) = 1", said))


def system_info(folder: Path) -> str:
    """Return what llama.cpp's library says of itself."""
    ctypes.CDLL(str(folder / "libggml.so")).ggml_backend_load_all()
    library = ctypes.CDLL(str(folder / "libllama.so"))
    library.llama_print_system_info.restype = ctypes.c_char_p
    said: bytes = library.llama_print_system_info()
    return said.decode()


def make_checkpoint(shape: str, folder: Path) -> Path:
    """Write a Llama with random weights in bfloat16, a file for each layer, unless it is there."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    if (folder / "model.safetensors.index.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        **SHAPES[shape],
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=MODEL_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    generator, index = torch.Generator().manual_seed(0), dict[str, str]()

    def random(num_out: int, num_in: int) -> torch.Tensor:
        return torch.randn(num_out, num_in, generator=generator).div_(num_in**0.5).bfloat16()

    hidden, inner, ones = config.hidden_size, config.intermediate_size, torch.ones(config.hidden_size).bfloat16()
    queries, keys = HEADS * config.head_dim, KV_HEADS * config.head_dim
    linears = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for layer in range(-1, config.num_hidden_layers):
        if layer < 0:
            names = ("model.embed_tokens.weight", "lm_head.weight")
            tensors = {name: random(config.vocab_size, hidden) for name in names} | {"model.norm.weight": ones}
        else:
            prefix = f"model.layers.{layer}."
            tensors = {f"{prefix}self_attn.{name}_proj.weight": random(*size) for name, size in linears.items()}
            tensors |= {f"{prefix}mlp.{name}_proj.weight": random(*size) for name, size in mlp.items()}
            tensors |= {f"{prefix}{name}_layernorm.weight": ones for name in ("input", "post_attention")}
        file = f"model-{layer + 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def make_ggufs(model: Path, llama_cpp: Path, kinds: Sequence[str]) -> dict[str, Path]:
    """Return the checkpoint in llama.cpp's formats; those that are not there are made."""
    files = {kind: model.with_name(f"{model.name}-{kind}.gguf") for kind in kinds}
    missing = [kind for kind, file in files.items() if not file.exists()]
    if missing:
        whole = model.with_name(f"{model.name}-f16.gguf")
        if not whole.exists():
            from llama_cpp_base import write_gguf

            write_gguf(model, whole, is_half=True)
        for kind in missing:
            subprocess.run([llama_cpp / "llama-quantize", whole, files[kind], kind], check=True, capture_output=True)
        whole.unlink()
    return files


def make_adapters(model: Path, count: int, ranks: Sequence[int] = RANKS) -> list[Path]:
    """Write adapters on all linears with random weights in bfloat16, their ranks in turns."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    linears = {
        "self_attn.q_proj": (hidden, HEADS * head),
        "self_attn.k_proj": (hidden, KV_HEADS * head),
        "self_attn.v_proj": (hidden, KV_HEADS * head),
        "self_attn.o_proj": (HEADS * head, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator, folders = torch.Generator().manual_seed(1), []
    for number in range(count):
        folder, rank = model.with_name(f"{model.name}-adapters") / f"adapter-{number}", ranks[number % len(ranks)]
        folders.append(folder)
        if (folder / "adapter_model.safetensors").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (num_in, num_out) in linears.items():
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{prefix}.lora_A.weight"] = (torch.randn(rank, num_in, generator=generator) / 64).bfloat16()
                tensors[f"{prefix}.lora_B.weight"] = (torch.randn(num_out, rank, generator=generator) / 64).bfloat16()
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        modules = [name.rpartition(".")[2] for name in linears]
        adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folders


def choose_ubatch(llama_cpp: Path, file: Path, options: argparse.Namespace) -> int:
    """Return the micro-batch that answers the load of the sweep quickest."""
    load = (options.sweep or max(options.streams), PROMPT, ANSWER)
    return min(UBATCHES, key=lambda size: run_llama(llama_cpp, file, size, [load])["total_s"][0])


def choose_step(model: Path, precision: str, options: argparse.Namespace) -> int:
    """Return the tokens of a step that answer the load of the sweep quickest."""
    load = (options.sweep or max(options.streams), PROMPT, ANSWER)
    return min(STEPS, key=lambda size: run_ours(model, precision, options, size, [load])["total_s"][0])


def run_llama(llama_cpp: Path, file: Path, ubatch: int, loads: Sequence[Load]) -> dict[str, Any]:
    """Answer the loads with llama.cpp: one process, or two if there is a long prompt."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for streams, prompt, answer in loads:
        kinds.setdefault((prompt, answer), []).append(streams)
    lines, peak, took_s = {}, 0, 0.0
    for (prompt, answer), counts in kinds.items():
        out, used, seconds = watch(
            [
                str(llama_cpp / "llama-batched-bench"),
                *("-m", str(file), "-t", str(os.cpu_count()), "-tb", str(os.cpu_count()), "-ub", str(ubatch)),
                *(
                    "-b",
                    "2048",
                    "-c",
                    str(max(512, max(counts) * (prompt + answer))),
                    "-fa",
                    "auto",
                    "--output-format",
                    "jsonl",
                ),
                *("-npp", str(prompt), "-ntg", str(answer), "-npl", ",".join(map(str, counts))),
            ]
        )
        peak, took_s = max(peak, used), took_s + seconds
        for line in out.splitlines():
            if line.startswith("{"):
                one = json.loads(line)
                lines[one["pl"], one["pp"], one["tg"]] = one
    return {
        "total_s": [lines[load]["t"] for load in loads],
        "decode_s": [lines[load]["t_tg"] for load in loads],
        "peak_bytes": peak,
        "process_s": took_s,
    }


def run_ours(
    model: Path,
    precision: str,
    options: argparse.Namespace,
    step: int,
    loads: Sequence[Load],
    adapters: Sequence[Path] = (),
) -> dict[str, Any]:
    """Answer the loads with our engine, in a process of its own."""
    asked = {
        "model": str(model),
        "base_dtype": precision,
        "kv_cache_dtype": options.kv_cache_dtype,
        "step": step,
        "cache_dir": str(options.folder / "cache"),
        "adapters": [str(folder) for folder in adapters],
        "loads": loads,
    }
    out, peak, seconds = watch([sys.executable, __file__, "--ours", json.dumps(asked)])
    return {**json.loads(out.splitlines()[-1]), "peak_bytes": peak, "process_s": seconds}


def run_openvino(python: Path, folder: Path, loads: Sequence[Load]) -> dict[str, Any]:
    """Answer the loads with OpenVINO GenAI, in a process of its own."""
    worker = str(Path(__file__).with_name("bases_openvino.py"))
    out, peak, seconds = watch([str(python), worker, str(folder), json.dumps(loads)])
    return {**json.loads(out.splitlines()[-1]), "peak_bytes": peak, "process_s": seconds}


def watch(command: Sequence[str]) -> tuple[str, int, float]:
    """Run a command; return its output, its largest resident set in bytes, and its duration in seconds.

    Raises:
        SystemExit: It failed.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors)
        _, status, used = os.wait4(process.pid, 0)
        took_s = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{errors.read()[-2000:]}")
        return out.read(), used.ru_maxrss * 1024, took_s


def apart(call: Callable[..., Any], *args: object) -> Any:
    """Call in a process of its own: a child's largest resident set counts that of the process that started it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *args).result()


def read_rate() -> float:
    """Return the bytes per second at which all threads read memory: the best of ten sums over 2 GiB."""
    import torch

    data = torch.ones(2**28, dtype=torch.int64)
    times = []
    for _ in range(10):
        began = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - began)
    return data.nbytes / min(times)


def answer(asked: dict[str, Any]) -> None:
    """Answer loads in this process; print the times as JSON."""
    import torch

    from manylora.core.clock import WallClock
    from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
    from manylora.core.engine.core import EngineCore
    from manylora.core.engine.loop import EngineLoop
    from manylora.core.types import Output, Request, SamplingParams
    from manylora.execution.build import build_parts
    from manylora.execution.executor import TorchExecutor
    from manylora.execution.kernels.linear import BaseLinear
    from manylora.serving.hosting.engine.startup import keep_freed_memory, use_one_heap

    loads, clock = asked["loads"], WallClock()
    tokens = max(streams * (prompt + out) for streams, prompt, out in loads)
    config = EngineConfig(
        model=ModelConfig(model=asked["model"], device="cpu", base_dtype=asked["base_dtype"]),
        memory=MemoryConfig(
            memory_bytes=tokens * 2**18 + len(asked["adapters"]) * 2**28 + 2**28,
            prefix_caching=False,
            kv_cache_dtype=asked["kv_cache_dtype"],
        ),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=asked["step"]),
        cache_dir=asked["cache_dir"],
    )
    use_one_heap()
    parts = build_parts(config, clock)
    keep_freed_memory()
    core = EngineCore(parts, config)
    sizes = []
    for folder in map(Path, asked["adapters"]):
        version = parts.reader.read(folder.name, str(folder))
        core.adapters.register(folder.name, version, clock.now())
        sizes.append(version.weight_bytes)
    random = np.random.default_rng(1)

    def run(streams: int, prompt: int, num_out: int) -> tuple[float, float]:
        start, first = clock.now(), dict[str, float]()
        arrivals = [
            (
                start,
                Request(
                    request_id=str(index),
                    prompt=tuple(random.integers(3, parts.base.vocab_size, prompt).tolist()),
                    sampling=SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True),
                    model=Path(asked["adapters"][index % len(sizes)]).name if sizes else "base",
                ),
            )
            for index in range(streams)
        ]

        def take(outputs: list[Output], now: float) -> None:
            for output in outputs:
                assert output.error is None, output.error
                first.setdefault(output.request_id, now)

        EngineLoop(core, clock, on_outputs=take, arrivals=arrivals).run()
        end = clock.now()
        return end - start, end - max(first.values())

    if loads != [[1, 1, 1]]:
        for streams in sorted({streams for streams, _, _ in loads}):
            run(streams, 8, 2)  # as llama.cpp does before it measures; adapters come to the device here
    times = [run(*load) for load in loads]
    assert isinstance(parts.executor, TorchExecutor)
    linears = [module for module in parts.executor.runner.model.modules() if isinstance(module, BaseLinear)]
    weights = [weight for linear in linears for weight in linear.weights]
    base_bytes = sum(one.numel() * 4 if isinstance(one, torch.Tensor) else one.data.nbytes for one in weights)
    print(
        json.dumps(
            {
                "total_s": [total for total, _ in times],
                "decode_s": [decode for _, decode in times],
                "base_bytes": base_bytes,
                "adapter_bytes_of_step": [sum(sizes[: load[0]]) for load in loads],
            }
        )
    )
    parts.close()


if __name__ == "__main__":
    main()
