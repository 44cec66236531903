"""Compile every Triton kernel for GPUs that need not be here, and print what came out, as JSON.

The interpreter takes Python that the compiler refuses; and what makes a kernel slow (narrow loads, spilled registers)
shows in the machine code. Run without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from manylora.execution.kernels.triton import attention as triton_attention
from manylora.execution.kernels.triton import coded as triton_coded
from manylora.execution.kernels.triton import fused as triton_fused
from manylora.execution.kernels.triton import lora as triton_lora
from manylora.execution.kernels.triton.widening import widening_ptx

CAPABILITIES = (80, 90)
WIDE_LOAD = re.compile(r"(?:ld\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global [^;]*0x10)")

SIGNATURE = {
    **dict.fromkeys(("x", "out", "pool"), "*bf16"),
    **dict.fromkeys(("step", "columns"), "*i64"),
    **dict.fromkeys(("work", "sizes"), "*i32"),
    **dict.fromkeys(("partials", "sums"), "*fp32"),
    **dict.fromkeys(("query", "key", "value", "sinks"), "*bf16"),
    **dict.fromkeys(("slots", "blocks"), "*i64"),
    "tables": "*i32",
    **dict.fromkeys(("scaling", "softcap", "eps", "inner_eps"), "fp32"),
    **dict.fromkeys(("weight", "inner_weight", "residual", "total", "gate", "up", "cos", "sin"), "*bf16"),
    **dict.fromkeys(("scales", "shifts"), "*fp16"),
    "codes": "*u8",
    "table": "*fp32",
    "chosen": "*i64",
}

# (kernel, its constants, warps, whether it reads enough to need wide loads)
CASES: list[tuple[Any, dict[str, Any], int, bool]] = [
    (triton_lora.plan, {"MODULES": 3, "PAD": False, "BLOCKS": 64}, 4, False),
    (triton_lora.plan, {"MODULES": 3, "PAD": True, "BLOCKS": 64}, 4, False),
]
for rows, depth, width, splits in ((16, 256, 256, 8), (64, 64, 128, 1)):
    shared = {"SPLITS": splits, "BLOCK_M": rows, "ALIGN": 32}
    CASES.append((triton_lora.shrink, {**shared, "BLOCK_K": depth}, 4, True))
    CASES.append((triton_lora.expand, {**shared, "BLOCK_N": width}, 4, True))
HEADS = {"HEADS": 32, "DIM": 128, "ROTARY": 128, "BLOCK_D": 128, "VALUE_DIM": 128, "BLOCK_V": 128}
SEEN = {"GROUP": 4, "HAS_WINDOW": False, "HAS_SOFTCAP": False, "HAS_SINKS": False, "BLOCK_SIZE": 16}
PROMPT = {"SPLITS": 1, "BLOCK_M": 64, "BLOCK_N": 32}
DECODE = {"SPLITS": 4, "BLOCK_M": 16, "BLOCK_N": 64}
LIMITED = {**SEEN, "HAS_WINDOW": True, "HAS_SOFTCAP": True}
STORE = {"HEADS": 8, "BLOCK_SIZE": 16, "BLOCK_H": 8}
for rotary, *shapes in ((128, PROMPT, DECODE), (0, DECODE)):  # a whole head; rotated before
    heads = {**HEADS, "ROTARY": rotary}
    CASES.append((triton_attention.store, {**heads, **STORE}, 4, True))
    CASES += [(triton_attention.attend, {**heads, **SEEN, **shape}, 4, True) for shape in shapes]
CASES.append((triton_attention.attend, {**HEADS, **LIMITED, **PROMPT, "ROTARY": 64}, 4, True))
CASES.append(
    (
        triton_attention.attend,
        {
            **HEADS,
            **SEEN,
            **DECODE,
            "ROTARY": 0,
            "DIM": 64,
            "VALUE_DIM": 64,
            "BLOCK_D": 64,
            "BLOCK_V": 64,
            "HAS_SINKS": True,
        },
        4,
        True,
    )
)
CASES.append((triton_attention.combine, {"HEADS": 32, "DIM": 128, "BLOCK_D": 128, "SPLITS": 4}, 4, False))
for width, is_gemma, is_sum in ((4096, False, False), (4096, False, True), (3584, True, True)):
    norm = {"WIDTH": width, "BLOCK": 4096, "IS_OFFSET": is_gemma, "IS_SUM": is_sum, "HAS_INNER": is_gemma}
    CASES.append((triton_fused.rms_norm, norm, 4, True))
for is_gelu in (False, True):
    CASES.append((triton_fused.activate, {"WIDTH": 14336, "BLOCK": 1024, "IS_GELU": is_gelu}, 4, True))
# (kind, group, bytes of a block, whether it has shifts)
CODES = (("int8", 128, 64, False), ("int4", 32, 32, False), ("int4", 128, 64, True), ("float8_e4m3fn", 128, 64, False))
for numbers, group, span, has_shift in (*CODES, ("table4", 64, 64, False)):
    halves = 2 if numbers in ("int4", "table4") else 1
    kind = {"NUMBERS": numbers, "GROUP": group, "SPAN": span, "HALVES": halves, "HAS_SHIFT": has_shift}
    low, high = (widening_ptx(numbers, half, "bfloat16") for half in range(2))
    for rows, width, warps in ((16, 64, 2), (64, 128, 8)):
        shape = {"LOW": low, "HIGH": high, "SPLITS": 4, "BLOCK_M": rows, "BLOCK_N": width}
        CASES.append((triton_coded.multiply, {**kind, **shape}, warps, True))
    CASES.append((triton_coded.dequantise, {**kind, "IS_CHOSEN": False, "BLOCK_N": 64}, 4, True))
CASES.append((triton_coded.add_splits, {"SPLITS": 4, "BLOCK": 1024}, 4, True))


def resources(cubin: bytes) -> dict[str, int]:
    """Return registers, stack and spilled bytes of a kernel, as the disassembler reports them."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def compile_case(kernel: Any, constants: dict[str, Any], warps: int, capability: int) -> dict[str, Any]:
    names = kernel.arg_names
    is_split = constants.get("SPLITS", 1) > 1 and kernel in (triton_attention.attend, triton_coded.multiply)
    signature = {name: "constexpr" if name in constants else SIGNATURE.get(name, "i32") for name in names}
    if is_split:
        signature["out"] = "*fp32"
    # What a launch finds out by itself: pointers and strides of rows that are multiples of 16.
    free = {kernel.params[index].name for index in range(len(names)) if kernel.params[index].do_not_specialize}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*")
        or (name.endswith(("stride", "num_in", "num_out", "num_sums")) and name not in free)
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps}
    if kernel is triton_coded.multiply:
        options["num_stages"] = 1 if not constants["LOW"] else 4 if constants["BLOCK_M"] == 16 else 3
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "kernel": kernel.__name__,
        "constants": constants,
        "capability": capability,
        "shared_bytes": compiled.metadata.shared,
        "wide_loads": len(WIDE_LOAD.findall(compiled.asm["ptx"])),
        **resources(compiled.asm["cubin"]),
    }


if __name__ == "__main__":
    for kernel, constants, warps, is_reading in CASES:
        for capability in CAPABILITIES:
            print(json.dumps({**compile_case(kernel, constants, warps, capability), "is_reading": is_reading}))
