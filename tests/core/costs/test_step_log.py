"""Features of a plan, and the log of what steps and loads took."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from harness import make_rig, request, small_base, version
from msgspec import structs

from manylora.core.costs.features import step_features
from manylora.core.costs.step_log import LoadRecord, LoggedExecutor, LogHeader, StepLog, StepRecord, read_step_log
from manylora.core.errors import ConfigError
from manylora.core.plan import Placement, PlannedSequence, StepPlan
from manylora.core.types import AdapterKey, SamplingParams, Tier


def part(seq_id: int, *, start: int, num_tokens: int, adapter: str | None = None, rank: int = 0) -> PlannedSequence:
    return PlannedSequence(
        seq_id=seq_id,
        tokens=range(start + num_tokens),
        num_prompt_tokens=8,
        start=start,
        num_tokens=num_tokens,
        pages=(),
        adapter=AdapterKey(adapter) if adapter else None,
        rank=rank,
        sampling=SamplingParams(),
        is_sampled=num_tokens != 3,
        seed=0,
    )


def test_features_tell_what_a_step_is():
    plan = StepPlan(
        step_id=0,
        sequences=(
            part(0, start=10, num_tokens=1, adapter="a", rank=8),
            part(1, start=20, num_tokens=1, adapter="a", rank=8),
            part(2, start=30, num_tokens=1),
            part(3, start=4, num_tokens=3, adapter="b", rank=16),
            part(4, start=0, num_tokens=5, adapter="a", rank=8),
        ),
    )
    features = step_features(plan)
    assert (features.num_decodes, features.num_prompts, features.num_sequences) == (3, 2, 5)
    assert (features.num_prompt_tokens, features.num_tokens, features.num_sampled) == (8, 11, 4)
    assert features.context_tokens == 11 + 21 + 31
    assert features.prompt_pairs == (5 + 6 + 7) + (1 + 2 + 3 + 4 + 5)
    assert (features.num_adapters, features.sum_rank, features.max_rank) == (2, 24, 16)
    assert (features.num_adapted_decodes, features.decode_row_rank) == (2, 16)
    assert features.prompt_row_rank == 3 * 16 + 5 * 8


def test_features_tell_whether_the_rows_are_those_of_the_step_before():
    def is_changed(*parts: PlannedSequence, released: tuple[int, ...] = ()) -> int:
        return step_features(StepPlan(step_id=1, sequences=parts, released=released)).is_changed

    old = part(0, start=10, num_tokens=1)
    assert is_changed(old, part(1, start=9, num_tokens=1)) == 0
    assert is_changed(old, part(1, start=8, num_tokens=1)) == 1  # its prompt has just ended
    assert is_changed(old, part(1, start=0, num_tokens=5)) == 1
    assert is_changed(old, released=(1,)) == 1


def test_features_tell_what_is_read_from_the_host():
    parts = [
        part(0, start=10, num_tokens=1, adapter="a", rank=8),
        structs.replace(part(1, start=0, num_tokens=5, adapter="b", rank=16), placement=Placement(Tier.HOST)),
        structs.replace(part(2, start=9, num_tokens=1, adapter="c", rank=4), placement=Placement(Tier.DEVICE, 3)),
        structs.replace(part(3, start=9, num_tokens=1, adapter="d", rank=4), placement=Placement(Tier.DEVICE)),
    ]
    features = step_features(StepPlan(step_id=0, sequences=tuple(parts)))
    assert (features.num_host_adapted, features.host_row_rank) == (2, 5 * 16 + 4)


def test_a_chunked_prompt_attends_to_as_many_pairs_as_a_whole_one():
    whole = step_features(StepPlan(step_id=0, sequences=(part(0, start=0, num_tokens=40),)))
    chunks = [part(0, start=0, num_tokens=16), part(0, start=16, num_tokens=24)]
    assert whole.prompt_pairs == sum(
        step_features(StepPlan(step_id=0, sequences=(chunk,))).prompt_pairs for chunk in chunks
    )


def test_work_is_logged_when_the_core_learns_that_it_is_done():
    records: list[StepRecord | LoadRecord] = []
    rig = make_rig(executor=lambda fake: LoggedExecutor(fake, records.append))
    rig.register("a", num_pages=3)
    rig.add(request("r0", num_prompt=5, max_tokens=2, model="a"))
    rig.drain()
    load, prefill, decode = records
    assert isinstance(load, LoadRecord)
    assert (load.tier, load.num_bytes, load.adapter) == (Tier.DEVICE, version("a", 3).host_bytes, "key-a")
    assert (load.launched_at, load.ended_at) == (1.0, 2.0)
    assert isinstance(prefill, StepRecord)
    assert (prefill.launched_at, prefill.ended_at, prefill.features.num_prompt_tokens) == (2.0, 3.0, 5)
    assert isinstance(decode, StepRecord)
    # The sequence has grown since: what is logged is what was launched.
    assert (decode.took_s, decode.features.num_decodes, decode.features.context_tokens) == (1.0, 1, 6)


def test_a_log_reads_back_as_it_was_written(tmp_path: Path):
    base = replace(small_base(), unsupported=(("norm", "it is a normalisation"),))
    header = LogHeader(base=base, num_pages=64, machine="here")
    features = step_features(StepPlan(step_id=0, sequences=(part(0, start=0, num_tokens=5),)))
    step = StepRecord(step_id=3, launched_at=0.1 + 0.2, ended_at=1e9 / 3, device_s=None, features=features)
    load = LoadRecord(
        adapter=AdapterKey("a"), tier=Tier.HOST, num_bytes=7, launched_at=0.1, ended_at=0.7, device_s=0.5, error="gone"
    )
    file = io.BytesIO()
    log = StepLog(file, header)
    log(step)
    log(load)
    path = tmp_path / "steps.jsonl"
    path.write_bytes(file.getvalue())
    assert list(read_step_log(path)) == [header, step, load]
    path.write_bytes(file.getvalue().partition(b"\n")[2])
    with pytest.raises(ConfigError, match=r"steps\.jsonl does not begin with its header"):
        list(read_step_log(path))


def test_a_log_that_is_none_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="Cannot read the step log"):
        list(read_step_log(tmp_path / "none"))
    path = tmp_path / "other.jsonl"
    path.write_text('{"arrived_at": 1.0}\n')
    with pytest.raises(ConfigError, match=r"Line 1 of .* is not a line of a step log"):
        list(read_step_log(path))
    path.write_text("")
    with pytest.raises(ConfigError, match=r"The step log .*other\.jsonl is empty"):
        list(read_step_log(path))
