"""Which machine code does every launch of the engine become, on GPUs that are not here?

    python bench/kernels_offline.py

The engine's own code launches each kernel as it does for served models: the constants, the warps and what Triton finds
out about arguments are those of the call sites. In place of a launch, Triton compiles for sm_80, 86, 90, 100 and 120
and for gfx942 and 950, which needs no GPU. The machine code says what makes a kernel slow: registers that spill, shared
memory that keeps a second block off a processor, loads of less than 16 bytes, products without matrix instructions.

It writes `results/kernels_offline.md`. `tests/execution/kernels/test_triton_compile.py` holds some of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)

import numpy as np
import torch
import triton
from publishing import arguments, publish, table
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from manylora.core.adapters.shape import PageShape
from manylora.core.plan import PlannedSequence
from manylora.core.types import SamplingParams
from manylora.execution.attention.call import AttentionCall, Rotation
from manylora.execution.attention.triton import TritonAttentionKernel
from manylora.execution.device import DeviceOps
from manylora.execution.fusion.layers import FusedNorm, activate
from manylora.execution.kernels.row_weight import RowWeight, write_rows
from manylora.execution.lora.tables import PADDED, RAGGED, LoraSpace
from manylora.execution.sampling.draw import choose_fused
from manylora.execution.storage.page_tensor import PageTensor
from manylora.execution.storage.tile_tables import GroupDirectory
from manylora.lab.catalog.models import base_shape

TARGETS = {
    **{f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 86, 90, 100, 120)},
    **{name: GPUTarget("hip", name, 64) for name in ("gfx942", "gfx950")},
}

SHARED_LIMIT = {"sm_80": 163, "sm_86": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64, "gfx950": 160}
"""Shared memory of a block, in KiB at most (CUDA C++ Programming Guide, compute capabilities; AMD CDNA 3 and 4)."""

CHAINED = ("sm_90", "sm_100", "sm_120")
"""Those on which a launch may begin before the one before it has ended."""

PROCESSORS = 132
"""Processors of the GPU whose grids are launched: an H200's. They decide only how far contexts are split."""

DTYPE = torch.bfloat16

_WIDE = {
    "cuda": re.compile(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64|cp\.async\.cg\.shared\.global [^;]*0x10"),
    "hip": re.compile(r"(?:global|buffer)_load_(?:dwordx4|lds_dwordx4)"),
}
_LOADS = {
    "cuda": re.compile(r"ld\.global|cp\.async\.c[ag]\.shared"),
    "hip": re.compile(r"(?:global|buffer)_load_"),
}
_PRODUCTS = {
    "cuda": re.compile(r"\bmma\.sync|wgmma\.mma_async|tcgen05\.mma"),
    "hip": re.compile(r"v_mfma_"),
}


class AbsentGpu:
    """A GPU of a kind that Triton compiles for, in place of its driver."""

    def __init__(self, number: int, target: GPUTarget) -> None:
        self._number, self._target = number, target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Compiled:
    """A kernel as one call site launches it, for one target."""

    site: str
    kernel: str
    constants: str
    target: str
    warps: int
    registers: int
    spilled: int  # bytes of a thread
    shared_bytes: int
    wide_loads: int
    loads: int
    products: int


@contextmanager
def launches_compiled(name: str) -> Iterator[dict[tuple[str, str], Any]]:
    """Compile what the block launches for a target; yield the kernels by name and constants."""
    found: dict[tuple[str, str], Any] = {}
    run = triton.runtime.jit.JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        bound = dict(zip(kernel.arg_names, args, strict=False)) | options
        constants = {p.name: bound[p.name] for p in kernel.params if p.is_constexpr and p.name not in ("LOW", "HIGH")}
        text = " ".join(f"{key}={value}" for key, value in constants.items())
        found[kernel.fn.__name__, text] = compiled
        return compiled

    before = driver._active
    driver.set_active(AbsentGpu(list(TARGETS).index(name), TARGETS[name]))
    try:
        with (
            patch.object(triton.runtime.jit.JITFunction, "run", compile_only),
            patch.object(torch.version, "hip", "7.0" if TARGETS[name].backend == "hip" else None),
            patch("manylora.execution.attention.triton.num_programs", lambda device: 4 * PROCESSORS),
            patch("manylora.execution.attention.triton._shared_bytes", lambda device: SHARED_LIMIT[name] * 1024),
            patch("manylora.execution.lora.tables.num_programs", lambda device: 4 * PROCESSORS),
            patch("manylora.execution.lora.tables.is_chained", lambda device: name in CHAINED),
            patch("manylora.execution.kernels.row_weight.num_programs", lambda device: 4 * PROCESSORS),
        ):
            yield found
    finally:
        driver._active = before


@dataclass(frozen=True)
class Heads:
    """How a family attends."""

    num: int
    num_kv: int
    dim: int
    rotary: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_dim: int | None = None


FAMILIES = {
    "Llama 3 8B": Heads(32, 8, 128, 128),
    "Llama 3.2 1B": Heads(32, 8, 64, 64),
    "Phi 3 mini": Heads(32, 32, 96, 96),
    "Gemma 2 9B": Heads(16, 8, 256, 256, window=4096, softcap=50.0),
    "gpt-oss 20B": Heads(64, 8, 64, 64, window=128, has_sinks=True),
    "Falcon 7B": Heads(71, 1, 64, 64),
}


def attention(heads: Heads) -> None:
    """Launch a layer's attention: a few rows that decode, and a prompt."""
    shape = PageShape(
        block_size=16,
        num_layers=1,
        num_kv_heads=heads.num_kv,
        head_dim=heads.dim,
        element_bytes=2,
        dtype="bfloat16",
        value_dim=heads.value_dim,
    )
    cpu = torch.device("cpu")
    kernel = TritonAttentionKernel(DeviceOps(cpu), PageTensor(shape, 2, cpu), max_num_seqs=4, max_model_len=4096)
    rows = 4
    query = torch.zeros(rows, heads.num, heads.dim, dtype=DTYPE).transpose(0, 1)
    key = torch.zeros(rows, heads.num_kv, heads.dim, dtype=DTYPE).transpose(0, 1)
    value = key if heads.value_dim is None else torch.zeros(heads.num_kv, rows, heads.value_dim, dtype=DTYPE)
    rotation = Rotation(*(torch.zeros(rows, heads.rotary, dtype=DTYPE) for _ in range(2))) if heads.rotary else None
    sinks = torch.zeros(heads.num, dtype=DTYPE) if heads.has_sinks else None
    module: Any = SimpleNamespace(layer_idx=0)
    call = AttentionCall(module, query, key, value, 0.1, heads.window, heads.softcap, None, {}, rotation, sinks)
    for start, count in ((2000, 1), (0, rows)):  # a context in parts, and a prompt
        kernel.prepare([_sequence(start, count)]).attend(call)


def _sequence(start: int, num_tokens: int) -> PlannedSequence:
    return PlannedSequence(
        seq_id=start,
        tokens=(),
        num_prompt_tokens=0,
        start=start,
        num_tokens=num_tokens,
        pages=range(256),
        adapter=None,
        rank=0,
        sampling=SamplingParams(),
        is_sampled=True,
        seed=0,
    )


def adapters(name: str) -> None:
    """Launch all groups of a base, in steps that decode, in steps with prompts, and padded."""
    base = base_shape(name)
    directory = GroupDirectory.of(replace(base, modules=tuple([m for m in base.modules if m.layer in (0, None)])))
    pool = torch.zeros(2, base.page.num_elements, dtype=DTYPE)
    LoraSpace(directory, pool, RAGGED).compile(64)
    LoraSpace(directory, pool, PADDED).compile(1)


def layers() -> None:
    """Launch norms and gates of a few families."""
    for width, is_offset in ((4096, False), (3584, True), (8192, False)):
        norm, x = FusedNorm(_parameter(width), 1e-5, is_offset=is_offset), torch.zeros(2, width, dtype=DTYPE)
        norm(x)
        norm.add(x, x, FusedNorm(_parameter(width), 1e-5, is_offset=True) if is_offset else None)
    for is_gelu in (False, True):
        activate(*torch.zeros(2, 2 * 14336, dtype=DTYPE).chunk(2, dim=-1), is_gelu=is_gelu)


CODES = (
    ("int8", 128, False),
    ("int4", 32, False),
    ("int4", 128, True),
    ("float8_e4m3fn", 128, False),
    ("float8_e5m2", 128, False),
    ("table4", 64, False),
)
"""Kind of a base's codes, inputs that share a scale, and whether they have shifts."""


def codes(numbers: str, group: int, has_shift: bool) -> None:
    """Launch products with a base in codes: one row, many, and more than are widened in registers."""
    num_out, num_in = 4096, 4096
    scales = torch.ones(num_out, num_in // group, dtype=torch.float16)
    form, data = write_rows(
        numbers,
        torch.zeros(num_out, num_in, dtype=torch.uint8),
        group=group,
        scales=scales,
        shifts=scales if has_shift else None,
        table=torch.zeros(16) if numbers == "table4" else None,
        order=None,
        dtype=DTYPE,
    )
    weight = RowWeight(torch.from_numpy(data), form)
    for num_rows in (1, 64, 128, 192):
        weight.product(torch.zeros(num_rows, num_in, dtype=DTYPE))


def sampler() -> None:
    """Launch the choice of tokens, from logits as they are and from edited ones."""
    logits = torch.zeros(2, 128256)
    numbers = np.zeros((2, 5))
    for edited in (logits, logits.clone()):
        choose_fused(logits, edited, numbers, 0, DeviceOps(torch.device("cpu")))


def _parameter(width: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(width, dtype=DTYPE), requires_grad=False)


SITES: dict[str, Callable[[], None]] = {
    **{f"attention, {name}": partial(attention, heads) for name, heads in FAMILIES.items()},
    "adapters, Llama 3 8B": partial(adapters, "llama-3-8b"),
    "adapters, Mixtral 8x7B": partial(adapters, "mixtral-8x7b"),
    "norms and gates": layers,
    "sampler": sampler,
    **{
        f"base in {numbers}, groups of {group}{', shifted' * has_shift}": partial(codes, numbers, group, has_shift)
        for numbers, group, has_shift in CODES
    },
}
"""What the engine launches, by place."""


def resources(compiled: Any, target: GPUTarget) -> tuple[int, int]:
    """Return the registers of a kernel's thread, and the bytes of memory that it takes beside them."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        found = {
            key: int(value) for key, value in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", text)
        }
        return found["vgpr_count"], found["private_segment_fixed_size"]
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], max(found["STACK"], found["LOCAL"])


def compile_sites(targets: Iterable[str], sites: Sequence[str] | None = None) -> Iterator[Compiled]:
    """Compile what ``sites`` launch, all by default, for ``targets``."""
    for name in targets:
        target = TARGETS[name]
        for site in sites or SITES:
            with launches_compiled(name) as found:
                SITES[site]()
            for (kernel, constants), compiled in found.items():
                text = compiled.asm["amdgcn" if target.backend == "hip" else "ptx"]
                registers, spilled = resources(compiled, target)
                counts = (len(kind[target.backend].findall(text)) for kind in (_WIDE, _LOADS, _PRODUCTS))
                yield Compiled(
                    *(site, kernel, constants, name, compiled.metadata.num_warps, registers, spilled),
                    *(compiled.metadata.shared, *counts),
                )


def report(kernels: Sequence[Compiled]) -> str:
    targets = list(dict.fromkeys(one.target for one in kernels))
    lines = [
        "# Kernels, compiled for GPUs that are not here",
        "",
        f"`python bench/kernels_offline.py`, Triton {triton.__version__}. Every launch of the engine, with the",
        "constants of its call site and bfloat16. A cell: registers of a thread / KiB of shared memory / loads of 16",
        "bytes of all loads / matrix instructions, each counted once in the code however often it runs. **Bold**:",
        "spilled registers, or more shared memory than a block may have.",
        "",
    ]
    for site in dict.fromkeys(one.site for one in kernels):
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for one in kernels:
            if one.site == site:
                cell = f"{one.registers} / {one.shared_bytes / 1024:.0f} / {one.wide_loads} of {one.loads}"
                cell += f" / {one.products}"
                if one.spilled or one.shared_bytes > SHARED_LIMIT[one.target] * 1024:
                    cell = f"**{cell}, spilled {one.spilled}**"
                rows.setdefault((one.kernel, f"{one.constants}, {one.warps} warps"), {})[one.target] = cell
        cells = ([kernel, short, *(row.get(name, "") for name in targets)] for (kernel, short), row in rows.items())
        lines += ["", f"## {site[0].upper()}{site[1:]}", "", *table(("kernel", "constants", *targets), cells, left=2)]
    num_bad = sum(1 for one in kernels if one.spilled)
    lines += ["", f"{len(kernels)} kernels; {num_bad} with spilled registers."]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--sites", help="names of places, divided by semicolons; all by default")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each kernel, and write nothing")
    options = parser.parse_args()
    sites = None if options.sites is None else options.sites.split(";")
    kernels = []
    for one in compile_sites(options.targets.split(","), sites):
        kernels.append(one)
        if options.json:
            print(json.dumps(asdict(one)), flush=True)
    if not options.json:
        publish("kernels_offline", [asdict(one) for one in kernels], report(kernels))


if __name__ == "__main__":
    main()
