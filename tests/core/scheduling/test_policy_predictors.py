"""Length predictors: the default's quantiles, and the noisy one's error."""

from __future__ import annotations

import math
import random
from statistics import NormalDist, mean

import pytest
from harness import make_rig, request, sequence, version

from manylora.core.config import SchedulerConfig
from manylora.core.errors import ConfigError
from manylora.core.scheduling import Sequence, make_predictor
from manylora.core.scheduling.prediction.predictor import NoisyPredictor, OraclePredictor
from manylora.core.scheduling.prediction.quantile import LengthHistogram, QuantilePredictor, bin_of, upper_edge
from manylora.core.types import FinishReason


def generated(one: Sequence, num_tokens: int) -> Sequence:
    one.tokens.extend([0] * (num_tokens - one.num_output_tokens))
    return one


def asking(name: str = "", cap: int = 100_000, so_far: int = 0) -> Sequence:
    return generated(sequence(0, max_tokens=cap, adapter=version(name) if name else None), so_far)


def test_bins_are_a_quarter_of_an_octave():
    for num_tokens in (1, 2, 3, 10, 100, 1000, 16384, 10**6):
        index = bin_of(num_tokens)
        assert upper_edge(index - 1) <= num_tokens * (1 + 1e-9) and num_tokens < upper_edge(index)
    assert [bin_of(2**octave) for octave in range(5)] == [0, 4, 8, 12, 16]


def test_quantiles_of_an_adapter_are_learned_to_a_tenth():
    rng, predictor = random.Random(0), QuantilePredictor()
    law = NormalDist(math.log(300), 0.5)
    for _ in range(600):
        predictor.observe(asking("a", so_far=round(rng.lognormvariate(law.mean, law.stdev))))
    estimate = predictor.predict(asking("a"))
    assert estimate.p50 == pytest.approx(math.exp(law.inv_cdf(0.5)), rel=0.12)
    assert estimate.p90 == pytest.approx(math.exp(law.inv_cdf(0.9)), rel=0.15)


def test_the_estimate_is_conditional_on_how_far_it_got():
    rng, predictor = random.Random(0), QuantilePredictor()
    for _ in range(600):
        predictor.observe(asking("a", so_far=20 if rng.random() < 0.7 else 500))
    assert predictor.predict(asking("a")).p50 < 30
    assert predictor.predict(asking("a", so_far=40)).p50 == pytest.approx(500, rel=0.15)
    # Further than any answer ever got: nothing is known but the cap.
    beyond = predictor.predict(asking("a", cap=5000, so_far=4000))
    assert 4000 < beyond.p50 <= beyond.p90 <= 5000


def test_adapters_differ_and_new_ones_start_from_what_all_are_like():
    predictor = QuantilePredictor()
    for _ in range(200):
        predictor.observe(asking("terse", so_far=10))
        predictor.observe(asking("wordy", so_far=900))
    assert predictor.predict(asking("terse")).p50 < 13
    assert predictor.predict(asking("wordy")).p50 > 700
    assert 10 <= predictor.predict(asking("new")).p50 <= 900
    assert predictor.predict(asking("new")).p90 > 700
    # Before the first answer it believes in chat.
    assert QuantilePredictor().predict(asking()).p50 == pytest.approx(151, rel=0.25)


def test_answers_cut_off_at_their_cap_say_only_that_they_were_longer():
    rng, capped, free = random.Random(0), QuantilePredictor(), QuantilePredictor()
    for _ in range(1500):
        length = max(1, round(rng.lognormvariate(math.log(300), 0.5)))
        free.observe(asking("a", so_far=length))
        cap = 250 if rng.random() < 0.5 else 100_000  # half of the requests come with a low cap
        capped.observe(asking("a", cap=cap, so_far=min(length, cap)))
    assert capped.predict(asking("a")).p50 == pytest.approx(free.predict(asking("a")).p50, rel=0.15)
    assert capped.predict(asking("a")).p90 == pytest.approx(free.predict(asking("a")).p90, rel=0.2)


def test_old_answers_fade():
    histogram = LengthHistogram(memory=50)
    for length in [10] * 500 + [1000] * 200:
        histogram.add(length)
    ended, cut = [0.0] * 80, [0.0] * 80
    histogram.add_to(ended, cut, 1.0)
    assert ended[bin_of(1000)] > 0.97
    assert histogram.count == pytest.approx(51, rel=0.05)
    for _ in range(5000):  # across a few rescalings
        histogram.add(1000)
    assert histogram.count == pytest.approx(51, rel=0.05)


@pytest.mark.parametrize("predictor", [OraclePredictor(), NoisyPredictor(0.6, 1), QuantilePredictor()])
def test_estimates_lie_between_what_is_there_and_the_cap(predictor):
    for cap in (1, 2, 50, 4000):
        for so_far in {0, 1, cap // 2, cap - 1, cap}:
            if so_far <= cap:
                estimate = predictor.predict(asking(cap=cap, so_far=so_far))
                assert min(so_far + 1, cap) <= estimate.p50 <= estimate.p90 <= cap


@pytest.mark.parametrize("accuracy", [1.0, 0.8, 0.6])
def test_the_noisy_predictor_is_as_wrong_as_it_says(accuracy):
    asked = [sequence(seq_id, max_tokens=100_000) for seq_id in range(2000)]

    def guesses(seed: int) -> list[int]:
        predictor = NoisyPredictor(accuracy, seed, truth=lambda one: 1000)
        return [predictor.predict(one).p50 for one in asked]

    mine = guesses(3)
    assert mean(abs(guess - 1000) / 1000 for guess in mine) == pytest.approx(1 - accuracy, abs=0.02)
    assert mean(mine) == pytest.approx(1000, abs=25)
    assert mine == guesses(3)
    assert (mine == guesses(4)) == (accuracy == 1.0)
    covered = [NoisyPredictor(accuracy, 3, lambda one: 1000).predict(one).p90 >= 1000 for one in asked]
    assert mean(covered) >= 0.9 - 0.02


def test_predictors_by_name():
    assert isinstance(make_predictor(SchedulerConfig(), 0), QuantilePredictor)
    with pytest.raises(ConfigError, match="predictor = 'psychic'"):
        make_predictor(SchedulerConfig(predictor="psychic"), 0)


def test_the_engine_tells_the_predictor_how_answers_ended_but_not_those_cancelled():
    rig = make_rig()
    told = []
    rig.core._answers._predictor.observe = lambda one: told.append((one.request.request_id, one.num_output_tokens))
    rig.add(*(request(name, max_tokens=50) for name in ("stopped", "cancelled")), request("whole", max_tokens=3))
    rig.turn()
    rig.step()
    rig.core.cancel("stopped", rig.now, FinishReason.STOP)  # its text reached a stop string
    rig.core.cancel("cancelled", rig.now)
    rig.drain()
    assert told == [("stopped", 1), ("whole", 3)]
    assert (rig.core.stats().num_answers, rig.core.stats().num_answer_tokens) == (2, 4)
