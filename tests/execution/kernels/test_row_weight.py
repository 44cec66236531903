"""Weights of 8 and 4 bits on a GPU, in Triton's interpreter where there is none: their numbers and their products."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec
import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, DTYPES, HALVES, poison, relative_error

from manylora.execution.checkpoint.codes import Codes, make_codes
from manylora.execution.kernels import row_weight
from manylora.execution.kernels.linear import (
    BaseLinear,
    WeightEntry,
    map_weight,
    rows_at,
    rows_of,
    weight_kind,
    write_narrow_weight,
)
from manylora.execution.kernels.row_weight import RowForm, RowWeight, write_rows

pytest.importorskip("triton")

__all__ = ["poison"]

SIZES = [(200, 72), (64, 256), (130, 600), (3, 5), (65, 1056)]
"""Outputs and inputs; most fill no block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    numbers: str
    group: int | None = None  # None for one scale per output
    scale_dtype: torch.dtype = torch.float16
    has_shift: bool = False
    has_order: bool = False


KINDS = {
    "int8": Kind(numbers="int8", group=128),
    "int8 outputs": Kind(numbers="int8", scale_dtype=torch.float32),
    "int8 halves shifted": Kind(numbers="int8", group=16, has_shift=True),
    "int8 groups of three blocks": Kind(numbers="int8", group=96, scale_dtype=torch.bfloat16),
    "int4 32": Kind(numbers="int4", group=32),
    "int4 64": Kind(numbers="int4", group=64, scale_dtype=torch.bfloat16),
    "int4 128 shifted": Kind(numbers="int4", group=128, has_shift=True),
    "int4 48 shifted": Kind(numbers="int4", group=48, has_shift=True),
    "int4 outputs": Kind(numbers="int4", scale_dtype=torch.float32),
    "int4 ordered": Kind(numbers="int4", group=128, has_order=True),
    "float8": Kind(numbers="float8_e4m3fn", scale_dtype=torch.float32),
    "float8 blocks": Kind(numbers="float8_e4m3fn", group=128, scale_dtype=torch.float32),
    "float8 wide": Kind(numbers="float8_e5m2", group=32),
    "table": Kind(numbers="table4", group=64, scale_dtype=torch.float32),
}


def make_codes_of(kind: Kind, num_out: int, num_in: int) -> Codes:
    """Return random codes whose numbers are all that a checkpoint may hold."""
    generator = torch.Generator().manual_seed(num_in)
    group = num_in if kind.group is None else kind.group
    codes = torch.randint(0, 256, (num_out, num_in), dtype=torch.uint8, generator=generator)
    if kind.numbers in ("int4", "table4"):
        codes &= 15
    elif kind.numbers.startswith("float8"):
        least = 0x7F if kind.numbers == "float8_e4m3fn" else 0x7C
        codes[(codes & 0x7F) >= least] = 3
    shape = (num_out, math.ceil(num_in / group))
    scales = (torch.rand(shape, generator=generator) + 0.5).to(kind.scale_dtype)
    own = make_codes(kind.numbers, codes, scales, group)
    if kind.numbers == "table4":
        table = torch.randn(16, generator=generator).bfloat16().float()  # numbers that 16 bits hold
        own = replace(own, table=table)
    if kind.has_shift:
        own = replace(own, shifts=torch.randn(shape, generator=generator).to(kind.scale_dtype).float())
    return replace(own, order=torch.randperm(num_in, generator=generator) if kind.has_order else None)


def open_weight(codes: Codes, dtype: torch.dtype) -> RowWeight:
    form, data = write_rows(
        codes.numbers,
        codes.codes,
        group=codes.group,
        scales=codes.scales,
        shifts=codes.shifts,
        table=codes.table,
        order=codes.order,
        dtype=dtype,
    )
    assert data.nbytes == sum(form.sections)
    form = msgspec.msgpack.decode(msgspec.msgpack.encode(form), type=RowForm)  # as another process gets it
    return RowWeight(torch.from_numpy(data).to(DEVICE), form)


def inputs(num_rows: int, num_in: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
@pytest.mark.parametrize("name", KINDS)
def test_rows_are_the_weights(name: str, num_out: int, num_in: int) -> None:
    codes = make_codes_of(KINDS[name], num_out, num_in)
    weight = open_weight(codes, torch.float32)
    chosen = torch.tensor([num_out - 1, 0, num_out // 2, 0])
    found = weight.rows(chosen.to(DEVICE)).cpu()
    torch.testing.assert_close(found, codes.dequantise()[chosen], rtol=1e-6, atol=1e-6)
    assert weight.rows(chosen[:0].to(DEVICE)).shape == (0, num_in)


def test_rows_are_written_out_on_the_weight_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the thread's: threads that settle adapters have entered none, which is the first GPU."""
    weight = open_weight(make_codes_of(KINDS["int4 32"], 200, 72), torch.float32)
    entered: list[Tensor] = []
    written_out = RowWeight._written_out

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        entered.append(tensor)
        yield
        entered.pop()

    def check(self: RowWeight, *args: int, **kwargs: Tensor) -> Tensor:
        assert [tensor.data_ptr() for tensor in entered] == [weight.data.data_ptr()]
        return written_out(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(RowWeight, "_written_out", check)
    assert rows_of(weight, 3, 9).shape == (6, 72)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
@pytest.mark.parametrize("name", KINDS)
def test_products_are_those_of_the_weights(
    name: str, num_out: int, num_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_weight, "SCRATCH_WEIGHTS", 64 * num_in)  # several pieces
    codes = make_codes_of(KINDS[name], num_out, num_in)
    weight = open_weight(codes, torch.float32)
    x = inputs(140, num_in, torch.float32)
    expected = x.double() @ codes.dequantise().double().T
    for num_rows in (1, 16, 17, 128, 140):
        found = weight.product(x[:num_rows].to(DEVICE))
        assert found.shape == (num_rows, num_out)
        assert relative_error(found, expected[:num_rows]) < 3e-6, num_rows


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", KINDS)
def test_no_scaled_weight_is_rounded(name: str, dtype: str) -> None:
    """In 16 bits, the result is that of exact weights, rounded once: a rounded weight would cost as much again."""
    codes = make_codes_of(KINDS[name], 130, 600)
    weight = open_weight(codes, DTYPES[dtype])
    x = inputs(3, 600, DTYPES[dtype]) * 1e-3  # float8 has large numbers
    found = weight.product(x.to(DEVICE)).cpu()
    exact = x.double() @ codes.dequantise().double().T
    assert found.dtype is DTYPES[dtype]
    assert relative_error(found, exact) < 1.05 * relative_error(exact.to(found.dtype), exact) + 1e-6


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", KINDS)
def test_many_rows_round_weights_once(name: str, dtype: str) -> None:
    codes = make_codes_of(KINDS[name], 130, 600)
    codes = replace(codes, scales=codes.scales * 0.25)  # weights that 16 bits hold
    weight = open_weight(codes, DTYPES[dtype])
    x = inputs(200, 600, DTYPES[dtype]) * 1e-3
    rounded = codes.dequantise().to(DTYPES[dtype]).double()
    assert relative_error(weight.product(x.to(DEVICE)), x.double() @ rounded.T) < (1e-3 if dtype == "float16" else 8e-3)


@pytest.mark.parametrize("most", [row_weight.MOST_FEW, 16])
def test_a_row_does_not_depend_on_the_rows_beside_it(most: int) -> None:
    weight = open_weight(make_codes_of(KINDS["int4 32"], 130, 1024), torch.float32)
    x = inputs(most, 1024, torch.float32)
    other = x.clone()
    other[1:] = float("nan")
    found, beside = weight.product(x.to(DEVICE)), weight.product(other.to(DEVICE))
    assert torch.equal(found[0], beside[0]) and beside[1:].isnan().all()


def test_a_row_keeps_its_result_in_a_smaller_batch() -> None:
    weight = open_weight(make_codes_of(KINDS["int4 128 shifted"], 130, 1024), torch.float32)
    x = inputs(128, 1024, torch.float32).to(DEVICE)
    assert torch.equal(weight.product(x[:16])[:3], weight.product(x[:3]))
    assert torch.equal(weight.product(x)[:80], weight.product(x[:80]))


def test_inputs_of_any_shape() -> None:
    codes = make_codes_of(KINDS["int8"], 70, 96)
    weight = open_weight(codes, torch.float32)
    x = torch.randn(2, 3, 192)[..., ::2].to(DEVICE)
    torch.testing.assert_close(weight.product(x).cpu(), x.cpu() @ codes.dequantise().T, rtol=1e-4, atol=1e-3)
    assert weight.product(x[:, :0]).shape == (2, 0, 70)


def test_a_linear_over_mapped_bytes() -> None:
    codes = make_codes_of(KINDS["int8"], 70, 96)
    form, data = write_rows(
        "int8", codes.codes, group=96, scales=codes.scales, shifts=None, table=None, order=None, dtype=torch.float32
    )
    entry = write_narrow_weight(("a.weight",), form, data, lambda content: 64)
    entry = msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=WeightEntry)
    assert weight_kind(entry) == "int8, a scale for 128 inputs, activations in float32"
    buffer = torch.cat((torch.zeros(64, dtype=torch.uint8), torch.from_numpy(data))).to(DEVICE)
    weight, bias = map_weight(buffer, entry), torch.randn(140)
    assert isinstance(weight, RowWeight)
    x = inputs(3, 96, torch.float32)
    expected = x @ torch.cat([codes.dequantise()] * 2).T
    linear = BaseLinear([weight, codes.dequantise().to(DEVICE)], bias.to(DEVICE))
    torch.testing.assert_close(linear.product(x.to(DEVICE)).cpu(), expected + bias, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(rows_of(weight, 7, 70).cpu(), codes.dequantise()[7:])
    torch.testing.assert_close(rows_at(weight, torch.tensor([69, 0])).cpu(), codes.dequantise()[[69, 0]])
    torch.testing.assert_close(linear.product(x.to(DEVICE), has_bias=False).cpu(), expected, rtol=1e-4, atol=1e-3)
