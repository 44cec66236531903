"""Weights in 16, 8 and 4 bits: their bytes give the weights back, and their products are what torch computes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from manylora.execution.kernels.cpu.forms import BITS
from manylora.execution.kernels.narrow import NarrowWeight, write_narrow

pytest.importorskip("numba")

SIZES = [(200, 72), (64, 256), (130, 600), (3, 5)]
"""Outputs and inputs; most fill no tile and no block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    numbers: str
    group: int | None = 0  # None for one scale per output
    scale_dtype: torch.dtype = torch.float16
    has_shift: bool = False
    has_order: bool = False


KINDS = {
    "bfloat16": Kind(numbers="bfloat16"),
    "float16": Kind(numbers="float16"),
    "int8": Kind(numbers="int8", group=32),
    "int8 outputs": Kind(numbers="int8", group=None, scale_dtype=torch.float32),
    "int8 halves": Kind(numbers="int8", group=16, has_shift=True),
    "int8 groups of three blocks": Kind(numbers="int8", group=96, scale_dtype=torch.bfloat16),
    "int4": Kind(numbers="int4", group=32),
    "int4 halves": Kind(numbers="int4", group=48),
    "int4 shifted": Kind(numbers="int4", group=64, has_shift=True),
    "int4 ordered": Kind(numbers="int4", group=128, has_order=True),
    "float8": Kind(numbers="float8_e4m3fn", group=None, scale_dtype=torch.float32),
    "float8 wide": Kind(numbers="float8_e5m2", group=128),
    "table": Kind(numbers="table4", group=64),
}


def make(kind: Kind, num_out: int, num_in: int, *, is_rounded: bool = False) -> tuple[NarrowWeight, Tensor]:
    """Return a random weight, and its numbers."""
    generator = torch.Generator().manual_seed(num_in)
    group = num_in if kind.group is None else kind.group
    table = torch.randn(16, generator=generator) if kind.numbers == "table4" else None
    if kind.numbers.startswith("int") or table is not None:
        codes = torch.randint(0, 1 << BITS[kind.numbers], (num_out, num_in), dtype=torch.uint8, generator=generator)
        numbers = codes - 2.0 ** (BITS[kind.numbers] - 1) if table is None else table[codes.long()]
    else:
        stored = torch.randn(num_out, num_in, generator=generator).to(getattr(torch, kind.numbers))
        numbers, codes = stored.float(), stored if stored.itemsize == 2 else stored.view(torch.uint8)
    scales = shifts = None
    if group:
        shape = (num_out, math.ceil(num_in / group))
        places = torch.arange(num_in) // group
        scales = (torch.rand(shape, generator=generator) + 0.5).to(kind.scale_dtype)
        numbers = numbers * scales.float()[:, places]
        if kind.has_shift:
            shifts = torch.randn(shape, generator=generator).half()
            numbers = numbers + shifts.float()[:, places]
    order = torch.randperm(num_in, generator=generator) if kind.has_order else None
    if order is not None:
        numbers = torch.empty_like(numbers).index_copy_(1, order, numbers)
    form, data = write_narrow(
        kind.numbers,
        codes,
        group=group,
        scales=scales,
        shifts=shifts,
        table=table,
        order=order,
        is_rounded=is_rounded,
    )
    return NarrowWeight(torch.from_numpy(data), form), numbers


def rounded(x: Tensor, block: int) -> Tensor:
    """Return activations as their rounding to 8 bits in blocks leaves them."""
    padded = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % block)).unflatten(1, (-1, block))
    steps = padded.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127.0
    return ((padded / steps).round() * steps).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
@pytest.mark.parametrize("name", KINDS)
def test_rows_are_the_weights(name: str, num_out: int, num_in: int) -> None:
    weight, numbers = make(KINDS[name], num_out, num_in)
    chosen = torch.tensor([num_out - 1, 0, num_out // 2])
    torch.testing.assert_close(weight.rows(chosen), numbers[chosen], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
@pytest.mark.parametrize("name", KINDS)
def test_products_are_those_of_the_weights(name: str, num_out: int, num_in: int) -> None:
    weight, numbers = make(KINDS[name], num_out, num_in)
    x = torch.randn(300, num_in, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ numbers.double().T
    for rows in (1, 2, 3, 7, 300):
        found = weight.product(x[:rows])
        torch.testing.assert_close(found.double(), expected[:rows], rtol=0.0, atol=3e-6 * float(expected.abs().max()))
        assert torch.equal(found[0], weight.product(x[:1])[0])


@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.numbers in ("int8", "int4")])
def test_rounded_products_are_those_of_rounded_activations(name: str, num_out: int, num_in: int) -> None:
    weight, numbers = make(KINDS[name], num_out, num_in, is_rounded=True)
    x = torch.randn(300, num_in, generator=torch.Generator().manual_seed(1))
    columns = torch.arange(num_in) if weight._order is None else weight._order.long()
    activations = torch.empty(x.shape, dtype=torch.float64)
    activations[:, columns] = rounded(x[:, columns], weight.form.block)
    expected = activations @ numbers.double().T
    for rows in (1, 2, 3, 7, 300):
        found = weight.product(x[:rows])
        # A number in the middle of two steps may go to either.
        torch.testing.assert_close(found.double(), expected[:rows], rtol=0.0, atol=2e-3 * float(expected.abs().max()))
        assert torch.equal(found[0], weight.product(x[:1])[0])
    exact = weight.product(x, is_exact=True)
    torch.testing.assert_close(exact.double(), x.double() @ numbers.double().T, rtol=0.0, atol=1e-4 * num_in)


def draw(rng: random.Random) -> Kind:
    numbers = rng.choice(["int8", "int4", "int4", "table4", "float8_e4m3fn"])
    has_shift = numbers.startswith("int") and rng.random() < 0.3
    return Kind(
        numbers=numbers,
        group=rng.choice([None, 16 * rng.randint(1, 20)]),
        scale_dtype=rng.choice([torch.float32, torch.float16] if has_shift else [torch.float32, torch.bfloat16]),
        has_shift=has_shift,
        has_order=rng.random() < 0.2,
    )


def test_products_of_drawn_forms_are_those_of_the_weights() -> None:
    """Activations are whole steps in each half of a block: rounding takes nothing from them."""
    rng, threads = random.Random(0), torch.get_num_threads()
    try:
        for number in range(120):
            kind, num_out, num_in, rows = draw(rng), rng.randint(1, 140), rng.randint(1, 400), rng.randint(1, 40)
            is_rounded = kind.numbers.startswith("int") and rng.random() < 0.7
            weight, numbers = make(kind, num_out, num_in, is_rounded=is_rounded)
            x = torch.randint(-127, 128, (2 * rows, num_in), generator=torch.Generator().manual_seed(number))[
                ::2
            ].float()
            columns = torch.arange(num_in) if weight._order is None else weight._order.long()
            x[:, columns[::16]] = 127.0
            torch.set_num_threads(rng.randint(1, 3))
            expected = x.double() @ numbers.double().T
            error = (weight.product(x).double() - expected).abs().max()
            assert error < 3e-6 * (x.double().abs() @ numbers.double().abs().T).max(), (kind, num_out, num_in, rows)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_a_row_that_is_not_finite_stays_so_and_alone(number: float, is_rounded: bool) -> None:
    weight, _ = make(KINDS["int8"], 70, 96, is_rounded=is_rounded)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    expected = weight.product(x)
    x[2, 40] = number
    found = weight.product(x)
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_rows_of_zeros_and_tiny_numbers() -> None:
    weight, numbers = make(KINDS["int8"], 70, 96, is_rounded=True)
    assert not weight.product(torch.zeros(2, 96)).any()
    x = torch.full((1, 96), 1e-30)
    torch.testing.assert_close(weight.product(x), x @ numbers.T, rtol=1e-3, atol=0.0)


def test_shapes_in_front_of_the_inputs_stay() -> None:
    weight, numbers = make(KINDS["bfloat16"], 70, 96)
    x = torch.randn(2, 3, 192)[..., ::2]
    torch.testing.assert_close(weight.product(x), x @ numbers.T, rtol=1e-4, atol=1e-4)
