"""The instructions that widen codes on a GPU, run here one by one on every byte."""

from __future__ import annotations

import re

import pytest
import torch

from manylora.execution.checkpoint.codes import make_codes
from manylora.execution.kernels.triton.widening import widening_ptx

KINDS = ["int8", "int4", "float8_e4m3fn", "float8_e5m2"]


def run(text: str, word: int) -> list[int]:
    """Return ``$0`` and ``$1`` after the instructions, by PTX's definition of each."""
    values: dict[str, int] = {"$2": word}

    def value(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    def byte(pair: int, place: int) -> int:
        assert place < 8  # beyond, a byte's sign is spread
        return pair >> (8 * place) & 0xFF

    lines = re.findall(r"^(\w[\w.]*) (.+);$", text, re.MULTILINE)
    for operation, rest in lines:
        target, *names = rest.split(", ")
        a, b, c = ([value(name) for name in names] + [0, 0])[:3]
        match operation:
            case "mov.b32":
                result = a
            case "not.b32":
                result = ~a & 0xFFFFFFFF
            case "and.b32":
                result = a & b
            case "or.b32":
                result = a | b
            case "shr.b32":
                result = a >> b
            case "prmt.b32":
                result = sum(byte(b << 32 | a, c >> (4 * i) & 15) << (8 * i) for i in range(4))
            case "fma.rn.bf16x2" | "fma.rn.f16x2":
                dtype = torch.bfloat16 if "bf16" in operation else torch.float16
                pairs = (torch.tensor([x], dtype=torch.uint32).view(dtype).double() for x in (a, b, c))
                x, y, z = pairs
                result = int((x * y + z).to(dtype).view(torch.uint16).to(torch.int64) @ torch.tensor([1, 1 << 16]))
            case _:
                raise AssertionError(operation)
        values[target] = result
    return [values["$0"], values["$1"]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("numbers", KINDS)
def test_every_code_becomes_its_number(numbers: str, dtype: str) -> None:
    octets = list(range(256))
    if numbers.startswith("float8"):  # checkpoints with other codes are refused
        octets = [octet for octet in octets if octet & 0x7F < (0x7F if numbers == "float8_e4m3fn" else 0x7C)]
    octets += octets[: -len(octets) % 4]
    for half in range(2 if numbers == "int4" else 1):
        text = widening_ptx(numbers, half, dtype)
        words = [
            sum(octet << (8 * i) for i, octet in enumerate(four)) for four in zip(*[iter(octets)] * 4, strict=True)
        ]
        found = torch.tensor([run(text, word) for word in words], dtype=torch.uint32).view(getattr(torch, dtype))
        codes = torch.tensor(octets, dtype=torch.uint8)
        if numbers == "int4":
            codes = codes >> 4 if half else codes & 15
        expected = make_codes(numbers, codes[None], torch.ones(1, 1), len(octets)).dequantise()
        assert torch.equal(found.float().flatten(), expected.flatten())


def test_kinds_without_instructions() -> None:
    assert widening_ptx("table4", 0, "bfloat16") == "" == widening_ptx("int8", 0, "float32")
