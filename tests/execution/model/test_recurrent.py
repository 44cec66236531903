"""Layers with states: where states lie, which forms are refused, and that cost models count the same bytes."""

from __future__ import annotations

import pytest
import torch
from parity_cases import HYBRIDS
from torch import nn
from transformers import AutoModelForCausalLM

from manylora.core.adapters.shape import PageShape
from manylora.core.errors import ConfigError
from manylora.core.plan import PlannedSequence
from manylora.core.types import SamplingParams
from manylora.execution.attention.call import register_attention
from manylora.execution.model.load import LoadedModel
from manylora.execution.model.recurrent import Mixer, MixerWatch, StatefulAttention, adapt_mixers
from manylora.execution.storage.page_tensor import PageTensor
from manylora.lab.catalog.models import base_shape, dims_from_config


class Sum(nn.Module):
    """A mixer: the sum of all tokens so far, and of the columns that its convolution would see."""

    def __init__(self, *, projects_late: bool = False) -> None:
        super().__init__()
        self.layer_idx = 0
        self.first, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.projects_late = projects_late
        for linear in (self.first, self.last):
            nn.init.eye_(linear.weight)

    def forward(self, x: torch.Tensor, cache: object = None) -> torch.Tensor:
        x = self.first(x)
        num_tokens = x.shape[1]
        columns = cache.update_conv_state(x.mT, self.layer_idx, conv_kernel_size=2)  # type: ignore[attr-defined]
        before = cache.get_recurrent_state(self.layer_idx)  # type: ignore[attr-defined]
        sums = x.cumsum(1) if before is None else x.cumsum(1) + before[:, None]
        cache.update_recurrent_state(sums[:, -1], self.layer_idx)  # type: ignore[attr-defined]
        shifted = nn.functional.pad(columns, (1, 0))[..., : columns.shape[-1]][..., -num_tokens:].mT
        out = sums + 100 * shifted
        return self.last(self.first(out) if self.projects_late else out)


def found(module: nn.Module) -> Mixer:
    watch, model = MixerWatch(), nn.Sequential(module)
    with watch.watching(model), torch.inference_mode():
        model(torch.ones(1, 4, 3))
    return watch.found[0]


def part(seq_id: int, start: int, stop: int, pages: list[int]) -> PlannedSequence:
    return PlannedSequence(
        seq_id=seq_id,
        tokens=[0] * stop,
        num_prompt_tokens=stop,
        start=start,
        num_tokens=stop - start,
        pages=pages,
        adapter=None,
        rank=0,
        sampling=SamplingParams(),
        is_sampled=False,
        seed=0,
    )


class NoAttention:
    """Keeps the pages that attention is given."""

    def prepare(self, sequences: list[PlannedSequence]) -> NoAttention:  # type: ignore[override]
        self.pages = [list(one.pages) for one in sequences]
        return self

    def release(self, seq_ids: object) -> None:
        self.released = seq_ids


def test_states_follow_their_sequences_through_pages() -> None:
    """States of 9 numbers in pages of 4: one lies in two pages. Steps mix chunks and single rows, in any pages."""
    mixer = found(Sum())
    assert mixer.states == {("conv", 0): (3, 2), ("recurrent", 0): (3,)}
    assert mixer.inputs == ("0.first",)
    shape = PageShape(block_size=1, num_layers=1, num_kv_heads=1, head_dim=2, element_bytes=4, dtype="float32")
    pages = PageTensor(shape, 16, torch.device("cpu"))
    pages.flat.fill_(float("nan"))
    base = AutoShape(shape, mixer.num_bytes)
    assert base.num_state_pages == 3
    model, attention = nn.Sequential(Sum()), NoAttention()
    step = adapt_mixers(model, [mixer], (), pages, base, attention)  # type: ignore[arg-type]
    assert isinstance(step, StatefulAttention)
    own = {1: [7, 2, 9, 5], 2: [0, 11, 3, 6], 3: [4, 1, 8, 10]}
    rows = {seq: torch.arange(18.0).view(6, 3) * seq for seq in own}

    def run(*parts: tuple[int, int, int]) -> list[torch.Tensor]:
        step.prepare([part(seq, start, stop, own[seq]) for seq, start, stop in parts])
        assert attention.pages == [own[seq][3:] for seq, _, _ in parts]
        with torch.inference_mode():
            out = model(torch.cat([rows[seq][start:stop] for seq, start, stop in parts])[None])[0]
        return list(out.split([stop - start for _, start, stop in parts]))

    def expected(seq: int, start: int, stop: int) -> torch.Tensor:
        shifted = torch.cat((torch.zeros(1, 3), rows[seq][:-1]))
        return (rows[seq].cumsum(0) + 100 * shifted)[start:stop]

    for parts in (
        [(1, 0, 3), (2, 0, 1)],
        [(2, 1, 2), (1, 3, 5), (3, 0, 1)],
        [(3, 1, 2), (2, 2, 3), (1, 5, 6)],
        [(2, 0, 6)],  # pre-empted: it begins anew
        [(3, 2, 5)],
    ):
        for out, one in zip(run(*parts), parts, strict=True):
            assert torch.equal(out, expected(*one))


class AutoShape:
    """As much of a base as mixers ask for."""

    name = architecture = "sum"

    def __init__(self, page: PageShape, state_bytes: int) -> None:
        self.num_state_pages = -(-state_bytes // page.num_bytes)


def test_another_form_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="0 keeps a state in another form than this: linears, a convolution"):
        found(Sum(projects_late=True))


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_cost_models_count_the_bytes_that_the_probe_finds(architecture: str) -> None:
    config = HYBRIDS[architecture]
    register_attention()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="manylora_paged").eval()
    for name, buffer in list(model.named_buffers()):
        model.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = torch.ones(buffer.shape)
    probe = LoadedModel(
        name="", model=model, text_config=config, dtype=torch.float32, device=torch.device("cpu")
    ).probe()
    shape = base_shape(dims_from_config(config.to_dict()))
    assert shape.state_bytes == sum(mixer.num_bytes for mixer in probe.mixers) > 0
    assert shape.page.num_layers == len(probe.kv_layers)
