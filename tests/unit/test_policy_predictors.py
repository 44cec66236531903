"""Length predictors: the default's quantiles, the noisy one's error, the trained one's trees, the request log."""

from __future__ import annotations

import io
import json
import math
import random
from dataclasses import asdict
from statistics import NormalDist, mean

import pytest
from harness import make_rig, request, sequence, version
from typer.testing import CliRunner

from manylora.cli.app import app
from manylora.config import SchedulerConfig
from manylora.errors import ConfigError
from manylora.scheduling import Sequence, make_predictor
from manylora.scheduling.prediction import (
    NoisyPredictor,
    OraclePredictor,
    QuantilePredictor,
    RequestLog,
    TrainedPredictor,
    load_trained,
)
from manylora.scheduling.prediction.histogram import LengthHistogram, bin_of, upper_edge
from manylora.scheduling.prediction.request_log import RequestRecord, read_request_log
from manylora.scheduling.prediction.training import measure, train


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
    with pytest.raises(ConfigError, match="no predictor option 'file'"):
        make_predictor(SchedulerConfig(predictor="trained"), 0)
    with pytest.raises(ConfigError, match="Cannot read"):
        make_predictor(SchedulerConfig(predictor="trained", predictor_options={"file": "nowhere.json"}), 0)


def test_the_engine_tells_the_predictor_how_answers_ended_but_not_those_cancelled():
    rig = make_rig()
    told = []
    rig.core._answers._predictor.observe = lambda one: told.append((one.request.request_id, one.num_output_tokens))
    rig.add(request("whole", max_tokens=3), request("cancelled", max_tokens=50))
    rig.turn()
    rig.step()
    rig.core.cancel("cancelled", rig.now)
    rig.drain()
    assert told == [("whole", 3)]


# -- the request log and what is trained on it -------------------------------------------------------------------------


def records(count: int, seed: int = 0) -> list[RequestRecord]:
    """Answers whose length depends on the adapter, the prompt and whether a schema was asked for."""
    rng, made = random.Random(seed), []
    for index in range(count):
        adapter, prompt = rng.randrange(5), rng.randint(10, 1000)
        has_schema = rng.random() < 0.3
        length = (20 + 40 * adapter) * (4.0 if prompt > 500 else 1.0) * (0.25 if has_schema else 1.0)
        output = max(1, round(length * rng.lognormvariate(0, 0.15)))
        made.append(
            RequestRecord(
                arrived_at=float(index),
                adapter=f"a{adapter}",
                prompt_tokens=prompt,
                output_tokens=output,
                max_tokens=None,
                limit=4096,
                temperature=1.0,
                has_schema=has_schema,
                finish="stop",
            )
        )
    return made


def test_the_log_has_a_line_for_each_request_that_finished(tmp_path):
    file = io.StringIO()
    log = RequestLog(file)
    rig = make_rig()
    rig.core._sinks = (log,)
    rig.register("a")
    rig.add(request("1", num_prompt=7, max_tokens=3, model="a"), request("2", max_tokens=None, min_tokens=0))
    rig.turn()
    rig.step()
    rig.core.cancel("2", rig.now)
    rig.drain()
    (line,) = file.getvalue().splitlines()
    assert json.loads(line)["adapter"] == "a"
    path = tmp_path / "requests.jsonl"
    path.write_text(file.getvalue())
    (record,) = read_request_log(path)
    assert (record.prompt_tokens, record.output_tokens, record.max_tokens, record.limit) == (7, 3, 3, 3)
    assert (record.finish, record.temperature, record.has_schema) == ("length", 0.0, False)
    assert not log._arrived


def test_a_log_that_is_none_says_which_line(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"adapter": "a"}\n')
    with pytest.raises(ConfigError, match="Line 1 of"):
        list(read_request_log(path))
    with pytest.raises(ConfigError, match="Cannot read"):
        list(read_request_log(tmp_path / "none"))


def test_a_trained_predictor_beats_the_default_where_there_is_something_to_learn(tmp_path):
    pytest.importorskip("sklearn")
    trained, default = train(records(1200), tmp_path / "p.json")
    assert trained.relative_error < 0.2 < default.relative_error
    assert trained.ordered > 0.9 > default.ordered
    assert trained.covered == pytest.approx(0.9, abs=0.08)
    # What was written is what was measured.
    loaded = load_trained(tmp_path / "p.json", QuantilePredictor())
    assert measure(loaded, sorted(records(1200), key=lambda one: one.arrived_at)[960:]) == trained


def test_trees_in_plain_python_say_what_scikit_learn_says(tmp_path):
    ensemble = pytest.importorskip("sklearn.ensemble")
    rng = random.Random(0)
    rows = [[rng.random() for _ in range(7)] for _ in range(300)]
    targets = [3 * row[0] + (row[5] > 0.5) + 0.1 * rng.random() for row in rows]
    from manylora.scheduling.prediction.trained import _trees
    from manylora.scheduling.prediction.training import _fit

    ours = _trees(json.loads(json.dumps(_fit(rows, targets, 0.5))))
    model = ensemble.GradientBoostingRegressor(
        loss="quantile", alpha=0.5, n_estimators=100, max_depth=3, learning_rate=0.1, random_state=0
    ).fit(rows, targets)
    assert [ours.evaluate(row) for row in rows] == pytest.approx(model.predict(rows).tolist(), abs=1e-9)


def test_past_its_estimates_the_trained_predictor_asks_the_default(tmp_path):
    pytest.importorskip("sklearn")
    train(records(400), tmp_path / "p.json")
    predictor = make_predictor(
        SchedulerConfig(predictor="trained", predictor_options={"file": str(tmp_path / "p.json")}), 0
    )
    first = predictor.predict(asking("a0", cap=4096))
    later = predictor.predict(asking("a0", cap=4096, so_far=first.p50))
    beyond = predictor.predict(asking("a0", cap=4096, so_far=first.p90 + 1))
    assert first.p50 < later.p50 <= first.p90 < beyond.p50


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        '{"format": "x", "features": []}',
        '{"format": "manylora-length-predictor-1"}',
    ],
)
def test_files_that_are_no_predictor_are_refused(tmp_path, content):
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(ConfigError):
        load_trained(path, QuantilePredictor())


def test_trees_that_walk_in_a_circle_are_refused(tmp_path):
    from manylora.scheduling.prediction.features import FEATURES
    from manylora.scheduling.prediction.trained import FORMAT

    trees = {"base": 0, "rate": 1, "trees": [[[0, 0.5, 0, 0, 0.0]]]}
    content = {
        "format": FORMAT,
        "features": FEATURES,
        "mean": 5,
        "count": 1,
        "adapters": {},
        "p50": trees,
        "p90": trees,
    }
    path = tmp_path / "p.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="leads nowhere"):
        load_trained(path, QuantilePredictor())


def test_too_short_a_log_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least 100"):
        train(records(99), tmp_path / "p.json")


def test_training_from_the_command_line(tmp_path):
    pytest.importorskip("sklearn")
    log, out_file = tmp_path / "log.jsonl", tmp_path / "p.json"
    log.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records(600)))
    result = CliRunner().invoke(app, ["predictor", "train", str(log), "--out", str(out_file)])
    assert result.exit_code == 0, result.output
    assert "120 requests not trained on" in result.output and "median error" in result.output
    assert isinstance(load_trained(out_file, QuantilePredictor()), TrainedPredictor)
