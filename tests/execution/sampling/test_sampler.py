"""The sampler against a slow readable oracle, the distribution it claims to draw from, and its promises."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from launch_counter import counted_launches
from triton_cases import DEVICE

from manylora.core.plan import PlannedSequence
from manylora.core.types import Constraint, SampledToken, SamplingParams
from manylora.execution.device import make_device_ops
from manylora.execution.sampling.draw import draw_at, philox4x32, philox_uniform
from manylora.execution.sampling.logprobs import most_likely, most_likely_by_keys
from manylora.execution.sampling.sampler import Sampler

EOS = 2


def sequence(
    sampling: SamplingParams,
    *,
    prompt: Sequence[int] = (1,),
    generated: Sequence[int] = (),
    seed: int = 0,
    seq_id: int = 0,
) -> PlannedSequence:
    tokens = [*prompt, *generated]
    return PlannedSequence(
        seq_id=seq_id,
        tokens=tokens,
        num_prompt_tokens=len(prompt),
        start=len(tokens) - 1,
        num_tokens=1,
        pages=(0,),
        adapter=None,
        rank=0,
        sampling=sampling,
        is_sampled=True,
        seed=seed,
    )


def sample_ids(logits: torch.Tensor, sequences: Sequence[PlannedSequence], **kwargs) -> list[int]:
    sampler = Sampler(logits.shape[1], (EOS,), **kwargs)
    return [token.token_id for token in sampler.sample(logits, sequences) if token is not None]


def uniform(seed: int, position: int) -> float:
    return float(philox_uniform(np.array([seed % 2**64], np.uint64), np.array([position], np.uint64))[0])


class NearlyTied(Exception):
    """The oracle cannot tell: the draw or a cut falls within rounding of a boundary."""


def oracle(logits: np.ndarray, seq: PlannedSequence) -> int:
    """One row, one token, straight from the definitions."""
    sp = seq.sampling
    prompt, generated = list(seq.tokens[: seq.num_prompt_tokens]), list(seq.tokens[seq.num_prompt_tokens :])
    x = logits.astype(np.float64).copy()
    for token, bias in sp.logit_bias:
        x[token] += bias
    if len(generated) < sp.min_tokens:
        for token in {EOS, *sp.stop_token_ids}:
            x[token] = -math.inf
    for run in sp.bad_words_token_ids:
        if len(run) == 1 or generated[1 - len(run) :] == list(run[:-1]):
            x[run[-1]] = -math.inf
    for token in range(len(x)):
        if token in prompt or token in generated:
            x[token] = x[token] / sp.repetition_penalty if x[token] > 0 else x[token] * sp.repetition_penalty
        if token in generated:
            x[token] -= sp.frequency_penalty * generated.count(token) + sp.presence_penalty
    if sp.temperature == 0.0:
        ranked = sorted(range(len(x)), key=lambda t: (-x[t], t))
        if 0 < x[ranked[0]] - x[ranked[1]] < 1e-5:
            raise NearlyTied
        return ranked[0]
    x /= sp.temperature
    weights = np.exp(x - x.max())
    if np.any(np.abs(weights - sp.min_p) < 1e-6):
        raise NearlyTied
    weights[weights < sp.min_p] = 0.0
    ranked = sorted(range(len(x)), key=lambda t: (-x[t], t))
    kept = ranked[: sp.top_k or len(x)]
    total = sum(weights[t] for t in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        if sp.top_p < 1.0 and nucleus and abs(mass - sp.top_p * total) < 1e-5 * total:
            raise NearlyTied
        if sp.top_p < 1.0 and nucleus and mass >= sp.top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    target, reached = uniform(seq.seed, len(generated)) * mass, 0.0
    for token in sorted(nucleus):
        reached += weights[token]
        if abs(reached - target) < 1e-5 * mass:
            raise NearlyTied
        if reached > target:
            return token
    raise NearlyTied


@st.composite
def sampling_params(draw: st.DrawFn, vocab: int) -> SamplingParams:
    token = st.integers(0, vocab - 1)
    return SamplingParams(
        max_tokens=100,
        min_tokens=draw(st.sampled_from([0, 0, 0, 3])),
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.1, 0.5, 0.95, 1e-9])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 7, vocab, vocab + 5])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.3, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -1.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.4, 0.6])),
        stop_token_ids=tuple(draw(st.lists(token, max_size=2))),
        bad_words_token_ids=tuple(draw(st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=2))),
        logit_bias=tuple(draw(st.lists(st.tuples(token, st.floats(-5, 5, width=16)), max_size=3))),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[PlannedSequence]]:
    vocab = draw(st.sampled_from([5, 40, 600]))  # 600 is past the sorted prefix and past one block
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sequences = [
        sequence(
            draw(sampling_params(vocab)),
            prompt=rng.integers(0, vocab, rng.integers(1, 6)).tolist(),
            generated=rng.integers(0, vocab, rng.integers(0, 6)).tolist(),
            seed=int(rng.integers(-(2**63), 2**63 - 1)),
            seq_id=i,
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    scale = draw(st.sampled_from([0.2, 2.0, 8.0]))
    logits = rng.normal(0.0, scale, (len(sequences), vocab)).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits * 2) / 2  # ties everywhere
    if draw(st.booleans()):
        logits[:, rng.integers(3, vocab, vocab // 3)] = -np.inf
    return torch.from_numpy(logits), sequences


@settings(max_examples=120)
@given(batches())
def test_every_row_agrees_with_the_oracle(batch: tuple[torch.Tensor, list[PlannedSequence]]) -> None:
    logits, sequences = batch
    before = logits.clone()
    chosen = sample_ids(logits, sequences)
    assert torch.equal(logits, before), "the caller's logits were written to"
    decided = 0
    for row, (token, seq) in enumerate(zip(chosen, sequences, strict=True)):
        try:
            expected = oracle(logits[row].numpy(), seq)
        except NearlyTied:
            continue
        decided += 1
        assert token == expected, seq.sampling
    assume(decided)


def both_ways(logits: torch.Tensor, sequences: Sequence[PlannedSequence]) -> list[SampledToken | None]:
    """Return the tokens, which the kernel of a GPU must choose too."""
    pytest.importorskip("triton")
    found = Sampler(logits.shape[1], (EOS,)).sample(logits, sequences)
    on_device = logits.to(DEVICE)
    assert Sampler(logits.shape[1], (EOS,), DEVICE, is_fused=True).sample(on_device, sequences) == found
    return found


@settings(max_examples=8, deadline=None)
@given(batches())
def test_the_kernel_chooses_the_same_tokens(batch: tuple[torch.Tensor, list[PlannedSequence]]) -> None:
    both_ways(*batch)


@pytest.mark.parametrize("few", [4, 64])
def test_the_kernel_cuts_in_candidates_and_in_whole_rows(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of many equals, of few likely tokens, flat ones and broken ones; most have more candidates than fit."""
    monkeypatch.setattr("manylora.execution.sampling.draw.FUSED_FEW", few)
    monkeypatch.setattr("manylora.execution.sampling.draw.FUSED_BLOCK", 64)
    logits = torch.stack(
        [
            torch.zeros(150),
            torch.randn(150, generator=torch.Generator().manual_seed(1)).mul_(8).round_(),
            torch.cat((torch.full((140,), -torch.inf), torch.arange(10.0))),
            torch.full((150,), torch.nan),
            torch.full((150,), -torch.inf),
            torch.cat((torch.zeros(149), torch.tensor([torch.inf]))),
        ]
    )
    for params in ({"top_k": 7}, {"top_p": 0.3}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}, {"temperature": 0.0}):
        tokens = both_ways(logits, [sequence(SamplingParams(**params), seed=17 + i) for i in range(len(logits))])
        assert [token is None for token in tokens] == [False] * 3 + [True] * 3


def test_rows_may_lie_apart() -> None:
    """As those of a vocabulary that workers divide, which is no multiple of their number."""
    wide = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    wide[:, 11] = 100.0
    params = (SamplingParams(temperature=0.0), SamplingParams(top_k=3), SamplingParams(logit_bias=((5, 2.0),)))
    tokens = both_ways(wide[:, :11], [sequence(one, seed=i) for i, one in enumerate(params)])
    assert all(token is not None and token.token_id < 11 for token in tokens)


def test_sampling_on_a_device_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and log-probabilities of any parameters come by one read; nothing else looks at a value of the device."""
    pytest.importorskip("triton")
    reads: list[int] = []
    ops = type(make_device_ops(DEVICE))
    read = ops.read
    monkeypatch.setattr(ops, "read", lambda self, *found: reads.append(len(found)) or read(self, *found))
    rows = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(top_k=3, top_p=0.5, logprobs=30),
        SamplingParams(repetition_penalty=1.3, logit_bias=((5, 2.0),), min_tokens=3, allowed_token_ids=(5, 9)),
        SamplingParams(temperature=0.0, logprobs=1, logprob_token_ids=(4, 8)),
    ]
    sampler = Sampler(40, (EOS,), DEVICE, is_fused=True)
    monkeypatch.setattr("manylora.execution.sampling.sampler.most_likely", most_likely_by_keys)
    with counted_launches() as counts:
        sampler.sample(torch.randn(4, 40, device=DEVICE), [sequence(one) for one in rows])
    assert len(reads) == 1
    assert not counts.keys() & {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero"}


def test_the_search_by_keys_finds_what_the_search_for_equals_does() -> None:
    logits = torch.randn(6, 50).mul_(2).round_()
    logits[0], logits[1, 7] = 0.0, -0.0
    totals = logits.logsumexp(-1)
    for found, expected in zip(most_likely_by_keys(logits, totals, 9), most_likely(logits, totals, 9), strict=True):
        assert torch.equal(found, expected)


@settings(max_examples=40)
@given(batches())
def test_a_row_alone_draws_what_it_draws_in_the_batch(batch: tuple[torch.Tensor, list[PlannedSequence]]) -> None:
    logits, sequences = batch
    together = sample_ids(logits, sequences)
    alone = [sample_ids(logits[i : i + 1], sequences[i : i + 1])[0] for i in range(len(sequences))]
    assert together == alone


def test_a_recomputed_sequence_draws_the_same_token() -> None:
    logits = torch.randn(1, 50)
    sampling = SamplingParams(temperature=1.5, presence_penalty=0.5)
    for length in range(20):
        tokens = [7] * length
        decode = sequence(sampling, prompt=[3, 4], generated=tokens, seed=11)
        recompute = PlannedSequence(
            seq_id=99,
            tokens=[3, 4, *tokens],
            num_prompt_tokens=2,
            start=0,
            num_tokens=2 + length,
            pages=(0,),
            adapter=None,
            rank=0,
            sampling=sampling,
            is_sampled=True,
            seed=11,
        )
        assert sample_ids(logits, [decode]) == sample_ids(logits, [recompute])


@pytest.mark.parametrize(
    ("params", "vocab"),
    [
        ({}, 12),
        ({"temperature": 0.7}, 700),
        ({"top_k": 5}, 700),
        ({"top_p": 0.8}, 700),
        ({"min_p": 0.2, "top_k": 9}, 12),
    ],
)
def test_draws_follow_the_distribution(params: dict[str, float], vocab: int) -> None:
    num_draws = 8_000
    row = np.random.default_rng(5).normal(0.0, 1.5, vocab).astype(np.float32)
    sampling = SamplingParams(**params)
    weights = np.exp(row.astype(np.float64) / sampling.temperature)
    weights /= weights.sum()
    ranked = np.argsort(-weights)
    weights[weights < sampling.min_p * weights.max()] = 0.0
    if sampling.top_k:
        weights[ranked[sampling.top_k :]] = 0.0
    if sampling.top_p < 1.0:
        weights[ranked[1 + int(np.searchsorted(weights[ranked].cumsum(), sampling.top_p)) :]] = 0.0
    expected = weights / weights.sum() * num_draws

    counts = np.zeros(vocab)
    for start in range(0, num_draws, 500):
        sequences = [sequence(sampling, seed=start + i, generated=[0] * (i % 3)) for i in range(500)]
        np.add.at(counts, sample_ids(torch.from_numpy(np.tile(row, (500, 1))), sequences), 1)
    assert not counts[expected == 0].any(), "a ruled-out token was drawn"
    common = expected >= 5
    observed, theory = (
        np.append(counts[common], counts[~common].sum()),
        np.append(expected[common], expected[~common].sum()),
    )
    observed, theory = observed[theory > 0], theory[theory > 0]
    chi_square = ((observed - theory) ** 2 / theory).sum()
    degrees = len(theory) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 8  # about p = 1e-4; the seeds are fixed


def test_a_draw_on_a_boundary_never_takes_what_weighs_nothing() -> None:
    weights = torch.zeros(5, 700)
    weights[:, [3, 300, 600]] = torch.tensor([1.0, 2.0, 1.0])
    uniform = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0 - 2.0**-53], dtype=torch.float64)
    assert draw_at(weights, uniform).tolist() == [3, 300, 300, 600, 600]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    """Known answers of the Random123 distribution (kat_vectors, philox4x32 10)."""
    words = [[np.array([int(word, 16)], np.uint64) for word in text.split()] for text in (counter, key)]
    assert " ".join(f"{int(word[0]):08x}" for word in philox4x32(*map(tuple, words))) == expected


def test_uniform_numbers_are_uniform_and_keyed() -> None:
    assert uniform(0, 0) == (((0x6627E8D5 << 32) | 0xE169C58D) >> 11) * 2.0**-53
    drawn = philox_uniform(np.zeros(4000, np.uint64) + np.uint64(9), np.arange(4000, dtype=np.uint64))
    assert drawn.min() >= 0.0 and drawn.max() < 1.0
    assert abs(drawn.mean() - 0.5) < 0.02 and abs(drawn.var() - 1 / 12) < 0.005
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.05
    some = [uniform(*at) for at in [(0, 0), (1, 0), (0, 1), (2**63, 0), (0, 2**63), (2**32, 0), (0, 2**32)]]
    assert len(set(some)) == len(some), "a part of seed or position makes no difference"
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


def test_a_greedy_batch_hashes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora.execution.sampling.draw.philox_uniform", None)
    assert sample_ids(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), [sequence(SamplingParams(temperature=0.0))] * 2) == [1, 0]


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    greedy = SamplingParams(temperature=0.0)
    assert sample_ids(logits, [sequence(greedy), sequence(greedy)]) == [1, 0]


def test_top_k_keeps_exactly_k_of_equals() -> None:
    logits = torch.zeros(400, 300)
    sequences = [sequence(SamplingParams(top_k=3), seed=i) for i in range(400)]
    assert set(sample_ids(logits, sequences)) == {0, 1, 2}


def test_the_smallest_nucleus_is_the_most_likely_token() -> None:
    logits = torch.randn(50, 1000)
    sequences = [sequence(SamplingParams(top_p=1e-300, temperature=50.0), seed=i) for i in range(50)]
    assert sample_ids(logits, sequences) == logits.argmax(-1).tolist()


def test_a_vocabulary_of_one_token_is_drawn_from() -> None:
    sequences = [sequence(SamplingParams(top_p=0.5), seed=i) for i in range(2)]
    assert sample_ids(torch.zeros(2, 1), sequences) == [0, 0]


def test_a_flat_nucleus_wider_than_the_sorted_prefix_is_cut_right() -> None:
    logits = torch.zeros(600, 1000)
    sequences = [sequence(SamplingParams(top_p=0.5), seed=i) for i in range(600)]
    drawn = sample_ids(logits, sequences)
    assert max(drawn) < 500 and max(drawn) > 480


def test_min_tokens_holds_back_every_ending_token() -> None:
    logits = torch.zeros(1, 6)
    logits[0, EOS], logits[0, 4] = 50.0, 40.0
    sampling = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(4, 999))
    assert sample_ids(logits, [sequence(sampling)]) == [0]
    assert sample_ids(logits, [sequence(sampling, generated=[0])]) == [0]
    assert sample_ids(logits, [sequence(sampling, generated=[0, 0])]) == [EOS]


def test_a_bias_on_a_token_that_does_not_exist_is_harmless() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    sampling = SamplingParams(temperature=0.0, logit_bias=((3, 100.0), (2**40, 100.0), (1, 5.0)))
    assert sample_ids(logits, [sequence(sampling), sequence(sampling)]) == [1, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("extra", [{}, {"top_k": 4, "top_p": 0.9}])
def test_broken_logits_stop_only_their_own_row(temperature: float, extra: dict[str, float]) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [
            [nan, 1.0, -5.0, nan, -inf],
            [nan] * 5,
            [-inf] * 5,
            [0.0, inf, 0.0, 0.0, -inf],
            [0.0, 0.0, 0.0, 90.0, 0.0],
        ]
    )
    sampling = SamplingParams(temperature=temperature, logprobs=2, **extra)
    tokens = Sampler(5, (EOS,)).sample(logits, [sequence(sampling, seed=i) for i in range(5)])
    assert tokens[:4] == [None] * 4
    last = tokens[4]
    assert last is not None and last.token_id == 3 and last.logprob is not None and math.isfinite(last.logprob)
    assert all(math.isfinite(value) for _, value in last.top)


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6])
def test_very_cold_is_greedy(temperature: float) -> None:
    logits = torch.randn(20, 300) * 30
    sequences = [sequence(SamplingParams(temperature=temperature, top_p=0.9), seed=i) for i in range(20)]
    assert sample_ids(logits, sequences) == logits.argmax(-1).tolist()


def test_logprobs_are_of_the_raw_logits_in_a_stable_order() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    sequences = [
        sequence(SamplingParams(temperature=0.0, logprobs=2, logit_bias=((0, 100.0),))),
        sequence(SamplingParams(temperature=0.0, logprobs=0)),
        sequence(SamplingParams(temperature=0.0)),
    ]
    first, second, third = Sampler(5, (EOS,)).sample(logits, sequences)
    expected = logits.log_softmax(-1)
    assert first.token_id == 0 and first.logprob == pytest.approx(expected[0, 0].item(), abs=1e-6)
    assert [token for token, _ in first.top] == [1, 2]
    assert [value for _, value in first.top] == pytest.approx(expected[0, 1:3].tolist(), abs=1e-6)
    assert second.logprob == pytest.approx(expected[1, 4].item(), abs=1e-6) and second.top == ()
    assert third.logprob is None and third.top == ()


def test_many_and_given_logprobs_are_reported_beside_few() -> None:
    logits = torch.randn(4, 500)
    samplings = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.0, logprobs=300),
        SamplingParams(temperature=0.0, logprobs=5, logprob_token_ids=(499, 0, 7)),
        SamplingParams(temperature=0.0, logprobs=21),
    ]
    expected = logits.log_softmax(-1)
    for row, token in enumerate(Sampler(500, ()).sample(logits, [sequence(one) for one in samplings])):
        assert token is not None
        chosen = [499, 0, 7] if row == 2 else expected[row].topk(samplings[row].logprobs or 0).indices.tolist()
        assert [token_id for token_id, _ in token.top] == chosen
        assert [value for _, value in token.top] == pytest.approx(expected[row, chosen].tolist(), abs=1e-5)
        assert token.logprob == pytest.approx(float(expected[row].max()), abs=1e-5)


def test_more_logprobs_than_tokens_reports_all() -> None:
    (token,) = Sampler(3, ()).sample(torch.randn(1, 3), [sequence(SamplingParams(logprobs=20))])
    assert len(token.top) == 3


def test_without_a_grammar_a_constrained_row_ends_rather_than_answer_wrongly() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [9.0, 0.0, 0.0]])
    greedy = SamplingParams(temperature=0.0)
    constrained = SamplingParams(temperature=0.0, constraint=Constraint("json", "{}"))
    assert sample_ids(logits, [sequence(constrained), sequence(greedy)]) == [EOS, 0]


def test_an_absurd_top_k_means_all() -> None:
    logits = torch.randn(1, 50)
    all_of_them = sample_ids(logits, [sequence(SamplingParams(), seed=3)])
    assert sample_ids(logits, [sequence(SamplingParams(top_k=2**70), seed=3)]) == all_of_them


def test_nothing_to_sample() -> None:
    assert Sampler(3, ()).sample(torch.empty(0, 3), []) == []


def test_a_bad_word_is_cut_before_its_last_token_and_only_in_the_answer() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    bad = SamplingParams(temperature=0.0, bad_words_token_ids=((1, 3), (0, 0, 3)))
    chosen = {
        (tuple(prompt), tuple(generated)): sample_ids(logits, [sequence(bad, prompt=prompt, generated=generated)])
        for prompt, generated in (([2], [1]), ([1], []), ([2], [0, 0]), ([0], [0]), ([2], [1, 2]))
    }
    assert list(chosen.values()) == [[2], [3], [2], [3], [3]]


def test_only_allowed_tokens_are_chosen() -> None:
    logits = torch.randn(2, 50)
    free = SamplingParams(temperature=0.0)
    bound = SamplingParams(temperature=0.0, allowed_token_ids=(41, 7), logit_bias=((7, 90.0),))
    assert sample_ids(logits, [sequence(bound), sequence(free)]) == [7, int(logits[1].argmax())]
    drawn = {
        sample_ids(logits[:1], [sequence(SamplingParams(allowed_token_ids=(41, 7)), seed=i)])[0] for i in range(40)
    }
    assert drawn == {41, 7}
