"""The numbers that weights are kept in: as stored, or rounded; fused where they can be one; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from manylora.core.config import ModelConfig
from manylora.core.errors import ConfigError
from manylora.execution.checkpoint.codes import Codes, make_codes
from manylora.execution.kernels.cpu.forms import NarrowForm
from manylora.execution.kernels.narrow import NarrowWeight
from manylora.execution.kernels.row_weight import RowForm, RowWeight
from manylora.execution.model.precision import Kept, Precision, round_to_codes

pytest.importorskip("numba")

CPU = torch.device("cpu")


def numbers_of(kept: Kept) -> Tensor:
    if isinstance(kept, Tensor):
        return kept.float()
    form, data = kept
    if isinstance(form, RowForm):
        return RowWeight(torch.from_numpy(data), form).rows(torch.arange(form.num_out)).float()
    return NarrowWeight(torch.from_numpy(data), form).rows(torch.arange(form.num_out))


def kinds(kept: list[Kept]) -> list[str]:
    return [str(one.dtype) if isinstance(one, Tensor) else one[0].numbers for one in kept]


def weight(num_out: int = 40, num_in: int = 96, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(num_out)).to(dtype)


def codes(numbers: str = "int4", group: int = 32, num_out: int = 40, **changes: Any) -> Codes:
    generator = torch.Generator().manual_seed(num_out)
    stored = torch.randint(0, 16, (num_out, 96), dtype=torch.uint8, generator=generator)
    scales = torch.rand(num_out, 96 // group, generator=generator) + 0.1
    return make_codes(numbers, stored, scales.half(), group, changes.get("zeros"))


def keep(base: str, *parts: Tensor | Codes, is_head: bool = False) -> list[Kept]:
    return Precision(torch.float32, base, is_rounded=True).keep_linear(parts, is_head=is_head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_stored_is_kept(dtype: torch.dtype) -> None:
    parts = [weight(40, dtype=dtype), weight(24, dtype=dtype)]
    kept = keep("stored", *parts)
    assert kinds(kept) == [str(dtype) if dtype is torch.float32 else str(dtype).removeprefix("torch.")]
    assert torch.equal(numbers_of(kept[0]), torch.cat(parts).float())


def test_codes_of_one_kind_become_one_weight() -> None:
    parts = [codes(num_out=40), codes(num_out=24)]
    (kept,) = keep("stored", *parts)
    assert isinstance(kept, tuple) and isinstance(kept[0], NarrowForm) and kept[0].is_rounded
    torch.testing.assert_close(numbers_of(kept), torch.cat([part.dequantise() for part in parts]))


@pytest.mark.parametrize(
    "others",
    [
        [codes(group=48, num_out=24)],
        [codes("int8", num_out=24)],
        [weight(24)],
        [weight(24, dtype=torch.bfloat16)],
        [codes(num_out=24, zeros=torch.ones(24, 3))],
    ],
    ids=["group", "numbers", "float32", "bfloat16", "shifts"],
)
def test_weights_of_several_kinds_stay_apart(others: list[Tensor | Codes]) -> None:
    parts = [codes(), *others]
    kept = keep("stored", *parts)
    assert len(kept) == 2
    for own, part in zip(kept, parts, strict=True):
        expected = part.dequantise() if isinstance(part, Codes) else part.float()
        torch.testing.assert_close(numbers_of(own), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("numbers", "error"), [("int8", 0.008), ("int4", 0.09)])
def test_rounding_is_as_near_as_its_steps_allow(numbers: str, error: float, dtype: torch.dtype) -> None:
    given = weight(64, 1000, dtype)
    found = round_to_codes(given, numbers).dequantise()
    assert float((found - given).norm() / given.float().norm()) < error
    steps = given.float().abs().max() / (127 if numbers == "int8" else 7)
    assert float((found - given).abs().max()) <= float(steps)


@pytest.mark.parametrize("factor", [1e-7, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("numbers", ["int8", "int4"])
def test_rounding_takes_weights_of_any_magnitude(numbers: str, factor: float) -> None:
    given = weight(8, 64) * factor
    given[3] = 0.0
    found = round_to_codes(given, numbers).dequantise()
    torch.testing.assert_close(found, given, rtol=0.0, atol=float(given.abs().max()) / 6)
    assert not found[3].any()


def test_four_bits_beat_the_plain_step() -> None:
    """The step of the largest number is one of those that are tried."""
    given = weight(64, 1024)
    groups = given.view(64, -1, 32)
    peak = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    plain = (groups / (peak / -8)).round().clamp(-8, 7) * (peak / -8)
    found = round_to_codes(given, "int4").dequantise().view_as(groups)
    assert float((found - groups).norm()) < 0.97 * float((plain - groups).norm())


def test_a_head_keeps_eight_bits() -> None:
    assert kinds(keep("int4", weight(), is_head=True)) == ["int8"]
    assert kinds(keep("int4", weight())) == ["int4"]


def test_other_numbers_than_stored_are_made_of_those_stored() -> None:
    (kept,) = keep("int8", codes())
    torch.testing.assert_close(numbers_of(kept), codes().dequantise(), rtol=0.0, atol=0.05)
    (kept,) = keep("float32", codes())
    assert torch.equal(numbers_of(kept), codes().dequantise())


def test_groups_without_a_kernel_are_widened(caplog: pytest.LogCaptureFixture) -> None:
    own = codes(group=24)
    (kept,) = keep("stored", own)
    assert isinstance(kept, Tensor) and torch.equal(kept, own.dequantise())
    assert "weight_widened group=24" in caplog.text


@pytest.mark.parametrize("group", [32, 96])
def test_shifts_beside_scales_of_bfloat16_keep_their_digits(group: int) -> None:
    """One that is off by a quarter of a step moves all weights of a group alike."""
    stored = codes("int8", group)
    scales = stored.scales.bfloat16()
    own = make_codes("int8", stored.codes, scales, group, torch.full(scales.shape, 101.0))
    (kept,) = keep("stored", own)
    steps = scales.float().repeat_interleave(group, dim=1)
    assert float(((numbers_of(kept) - own.dequantise()) / steps).abs().max()) < 0.05


def test_scales_that_float16_does_not_hold_stay() -> None:
    own = make_codes("int8", torch.full((4, 32), 255, dtype=torch.uint8), torch.full((4, 1), 1e-9), 32)
    torch.testing.assert_close(numbers_of(keep("stored", own)[0]), own.dequantise(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("base", "stored", "kept"),
    [
        ("stored", torch.float32, torch.float32),
        ("stored", torch.bfloat16, torch.bfloat16),
        ("int8", torch.float32, torch.bfloat16),
        ("int4", torch.float16, torch.float16),
        ("float16", torch.bfloat16, torch.float16),
        ("float32", torch.bfloat16, torch.float32),
    ],
)
def test_a_table_of_tokens_keeps_sixteen_bits(base: str, stored: torch.dtype, kept: torch.dtype) -> None:
    found = Precision(torch.float32, base, is_rounded=True).keep_table(weight(dtype=stored))
    assert isinstance(found, Tensor) and found.dtype is kept


@pytest.mark.parametrize(
    ("options", "dtype", "device"),
    [
        ({"base_dtype": "int8"}, torch.bfloat16, CPU),
        ({"activation_dtype": "int8"}, torch.bfloat16, torch.device("cuda")),
    ],
)
def test_numbers_without_a_kernel_are_refused(
    options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    with pytest.raises(ConfigError, match="which need a CPU, float32 activations and numba"):
        Precision.choose(ModelConfig(model="x", **options), dtype, device)


@pytest.mark.parametrize(
    ("wanted", "base", "is_by_row"),
    [
        ("auto", "stored", True),
        ("int8", "int8", True),
        ("int4", "int4", True),
        ("bfloat16", "float32", False),
    ],
)
def test_a_gpu_keeps_codes_or_numbers_of_its_own_type(wanted: str, base: str, is_by_row: bool) -> None:
    pytest.importorskip("triton")
    found = Precision.choose(ModelConfig(model="x", base_dtype=wanted), torch.bfloat16, torch.device("cuda"))
    assert found == Precision(torch.bfloat16, base, is_rounded=False, is_by_row=is_by_row)


@pytest.mark.parametrize("wanted", ["float32", "float16"])
def test_numbers_of_another_type_are_refused_on_a_gpu(wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"base_dtype = '{wanted}', but on a GPU .* which is bfloat16"):
        Precision.choose(ModelConfig(model="x", base_dtype=wanted), torch.bfloat16, torch.device("cuda"))


def test_a_gpu_without_kernels_keeps_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, module = torch.device("cuda"), "manylora.execution.model.precision"
    monkeypatch.setattr(f"{module}.find_triton", lambda device: "Triton is not installed")
    assert not Precision.choose(ModelConfig(model="x"), torch.bfloat16, gpu).is_by_row
    with pytest.raises(ConfigError, match="base_dtype = 'int4', which cannot be served here: Triton is not installed"):
        Precision.choose(ModelConfig(model="x", base_dtype="int4"), torch.bfloat16, gpu)
    monkeypatch.setattr(f"{module}.find_triton", lambda device: None)
    monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="rounded by numba, which is not installed"):
        Precision.choose(ModelConfig(model="x", base_dtype="int8"), torch.bfloat16, gpu)


def test_codes_by_row_beside_numbers() -> None:
    pytest.importorskip("triton")
    precision = Precision(torch.float16, "stored", is_rounded=False, is_by_row=True)
    parts: list[Tensor | Codes] = [
        codes(num_out=40),
        codes(num_out=24),
        codes(group=24),
        weight(8, dtype=torch.bfloat16),
    ]
    joined = precision.keep_linear(parts[:2])
    assert len(joined) == 1 and isinstance(joined[0], tuple) and isinstance(joined[0][0], RowForm)
    expected = torch.cat([part.dequantise() for part in parts[:2] if isinstance(part, Codes)])
    torch.testing.assert_close(numbers_of(joined[0]), expected, rtol=1e-3, atol=1e-3)
    apart = precision.keep_linear(parts)
    assert [getattr(one, "dtype", None) for one in apart[2:]] == [torch.float16, torch.float16]
    assert precision.keep_linear([weight()], is_head=True)[0].dtype is torch.float16  # type: ignore[union-attr]
    table = precision.keep_table(weight(dtype=torch.bfloat16))
    assert isinstance(table, Tensor) and table.dtype is torch.float16


def test_activations_stay_if_asked() -> None:
    assert not Precision.choose(ModelConfig(model="x", activation_dtype="float32"), torch.float32, CPU).is_rounded
    assert Precision.choose(ModelConfig(model="x", activation_dtype="int8"), torch.float32, CPU).is_rounded
