"""The gate's decisions, against a stand-in of vLLM's scheduler and worker."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm_standin import StandInEngine, make_folder

from manylora.core.errors import ConfigError
from manylora.core.events import AdapterLoaded, RequestAdmitted
from manylora.vllm.plugin import read_options


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in "abcdefgh":
        make_folder(tmp_path, name, name.encode() * 100)
    return tmp_path


def test_others_run_while_an_adapter_loads(folders: Path) -> None:
    engine = StandInEngine(folders)
    base = engine.add(None, max_tokens=20)
    cold = engine.add("a")
    engine.run()
    first = next(number for number, ran in enumerate(engine.log) if cold.request_id in ran)
    assert first == engine.worker.read_steps + engine.worker.copy_steps, "not a step after the load"
    assert all(base.request_id in ran for ran in engine.log[:first])
    assert not [event for event in engine.events if isinstance(event, AdapterLoaded) and event.error]


def test_a_request_runs_only_when_its_adapter_is_in_a_slot(folders: Path) -> None:
    """The stand-in worker asserts it in every step."""
    engine = StandInEngine(folders)
    for name in "abcdefgh" * 3:
        engine.add(name)
    engine.run()
    assert {request.end for request in engine.ended.values()} == {"whole"}
    assert len(engine.ended) == 24
    assert engine.gate.counters.num_loads == engine.worker.num_copied


def test_requests_of_adapters_in_slots_go_first_and_none_starves(folders: Path) -> None:
    def num_copies(policy: str) -> int:
        engine = StandInEngine(folders, policy=policy, look_ahead=0, max_num_seqs=2, max_cpu_loras=2)
        for _ in range(6):
            for name in "abcdef":
                engine.add(name)
        engine.run()
        return engine.worker.num_copied

    assert 2 * num_copies("adapter-aware") <= num_copies("strict-fifo")


def test_small_requests_go_first_under_an_order_by_size(folders: Path) -> None:
    engine = StandInEngine(folders, policy="sjf", max_num_seqs=1)
    running = engine.add(None, max_tokens=5)
    engine.step()
    long, short = engine.add(None, max_tokens=50), engine.add(None, max_tokens=2)
    engine.run()
    order = list(dict.fromkeys(name for ran in engine.log for name in ran))
    assert order == [running.request_id, short.request_id, long.request_id]


def test_adapters_of_waiting_requests_are_loaded_before_their_turn(folders: Path) -> None:
    engine = StandInEngine(folders, max_num_seqs=1)
    engine.add(None, max_tokens=20)
    cold = engine.add("a", max_tokens=1)
    engine.run()
    first = next(number for number, ran in enumerate(engine.log) if cold.request_id in ran)
    assert first == 20 and engine.gate.counters.num_prefetches == 2
    admitted = [event for event in engine.events if isinstance(event, RequestAdmitted)]
    assert admitted[-1].adapter_was_resident


def test_what_is_used_often_stays(tmp_path: Path) -> None:
    names = [f"a{number}" for number in range(32)]
    for name in names:
        make_folder(tmp_path, name)

    def num_reads(eviction: str) -> int:
        engine = StandInEngine(tmp_path, eviction=eviction, num_slots=4, max_cpu_loras=4, policy="fifo", look_ahead=0)
        rng = random.Random(0)
        for name in rng.choices(names, [1 / rank for rank in range(1, 33)], k=1000):
            engine.add(name, max_tokens=1)
            engine.run()
            engine.now += rng.expovariate(1.0)
        return engine.worker.num_read

    assert num_reads("price") < 0.8 * num_reads("lru")


def test_adapters_of_a_hub_under_one_name_share_no_prefix_blocks(folders: Path) -> None:
    engine = StandInEngine(folders)
    refs = [engine.add("a", path=path).ref for path in ("org/one", "org/two", "org/three", "org/two")]
    assert all(ref is not None and ref.file_key == "" for ref in refs)
    names = [ref.name for ref in refs if ref is not None]
    assert names == ["a", "a@org/two", "a@org/three", "a@org/two"], "prefix blocks are named by it"


def test_a_changed_folder_is_another_version(folders: Path) -> None:
    engine = StandInEngine(folders)
    old = engine.add("a", max_tokens=10)
    for _ in range(6):
        engine.step()
    make_folder(folders, "a", b"other")
    new = engine.add("a", max_tokens=10)
    assert old.ref is not None and new.ref is not None
    assert old.ref.number != new.ref.number and old.ref.file_key != new.ref.file_key
    assert old.ref.name == "a" and new.ref.name == f"a@{new.ref.file_key}", "prefix blocks are named by it"
    assert old in engine.running, "a request in flight keeps the weights that it began with"
    engine.run()
    assert (old.end, new.end) == ("whole", "whole")
    again = engine.add("a")
    assert again.ref == new.ref
    engine.run()
    assert old.ref.number not in [*engine.worker.slots, *engine.worker.packed], "the old version was freed"


def test_the_same_files_are_the_same_version(folders: Path) -> None:
    engine = StandInEngine(folders)
    refs = {engine.add("a").ref for _ in range(3)}
    assert len(refs) == 1
    other = engine.add("b", path=str(folders / "a"))
    assert other.ref is not None and other.ref.number not in {ref.number for ref in refs if ref is not None}
    engine.run()


def test_a_request_fails_whose_adapter_cannot_be_read(folders: Path) -> None:
    engine = StandInEngine(folders)
    engine.worker.broken.add(str(folders / "a"))
    broken = [engine.add("a"), engine.add("a")]
    sound = engine.add("b")
    engine.run()
    assert [request.end for request in broken] == ["failed", "failed"] and sound.end == "whole"
    engine.worker.broken.clear()
    later = engine.add("a")
    engine.run()
    assert later.end == "whole", "the next request tries again"


def test_a_request_fails_whose_folder_is_gone(folders: Path) -> None:
    engine = StandInEngine(folders)
    gone = engine.add("a", path=str(folders / "nowhere"))
    assert gone.ref is None and "cannot open" in engine.gate.doomed[gone.request_id]
    engine.run()
    assert gone.end == "failed"


@pytest.mark.parametrize("rank", ['"x"', "1e9", "-1", "1" + "0" * 400, "null"])
@pytest.mark.parametrize("policy", ["boost", "sjf", "adapter-aware"])
def test_a_config_that_changed_to_a_senseless_rank_harms_no_other(folders: Path, rank: str, policy: str) -> None:
    engine = StandInEngine(folders, policy=policy)
    engine.add("a")
    (folders / "a" / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    bad, sound = engine.add("a"), engine.add("b")
    engine.run()
    assert bad.end and sound.end == "whole"


def test_a_request_that_was_pre_empted_keeps_its_adapter(folders: Path) -> None:
    engine = StandInEngine(folders, num_slots=1)
    first = engine.add("a", max_tokens=10)
    while not engine.running:
        engine.step()
    other = engine.add("b")
    engine.preempt()
    engine.run()
    assert (first.end, other.end) == ("whole", "whole")
    assert engine.worker.num_copied == 2


def test_no_more_is_cleared_than_a_step_can_take(folders: Path) -> None:
    """Else vLLM, which goes by arrival, would undo the order."""
    engine = StandInEngine(folders, policy="sjf", max_num_batched_tokens=20, max_num_seqs=8, kv_tokens=40)
    engine.add(None, num_prompt=16, max_tokens=20)
    engine.step()
    for number in range(8):
        engine.add(None, num_prompt=16, max_tokens=20 - number)
    for _ in range(3):
        engine.step()
    last = engine.add(None, num_prompt=8, max_tokens=1)
    engine.run()
    assert list(engine.ended).index(last.request_id) <= 5, "of ten: the first, and four that were cleared or in line"


def test_pins_of_the_options_keep_their_slot(folders: Path) -> None:
    engine = StandInEngine(folders, pin=["a"])
    engine.add("a")
    engine.run()
    for name in "bcdefgh":
        engine.add(name)
    engine.run()
    assert engine.gate.residency()["a"] == ("device", 8)
    assert engine.worker.num_copied == 8


@pytest.mark.parametrize("policy", ["adapter-aware", "boost", "fifo", "priority", "sjf", "strict-fifo"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_request_ends_whatever_happens(policy: str, folders: Path, data: st.DataObject) -> None:
    engine = StandInEngine(
        folders,
        policy=policy,
        num_slots=data.draw(st.integers(1, 3)),
        max_cpu_loras=3,
        max_num_seqs=data.draw(st.integers(1, 4)),
        kv_tokens=data.draw(st.sampled_from([40, 100, 10_000])),
        eviction=data.draw(st.sampled_from(["price", "lru", "none"])),
        look_ahead=data.draw(st.sampled_from([0, 3])),
    )
    added = []
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["add", "add", "add", "step", "cancel", "preempt", "replace", "break"])):
            case "add":
                adapter = data.draw(st.sampled_from([None, *"abcde"]))
                sizes = data.draw(st.tuples(st.integers(1, 30), st.integers(1, 6)))
                added.append(engine.add(adapter, num_prompt=sizes[0], max_tokens=sizes[1]))
            case "step":
                engine.step()
            case "cancel":
                if added:
                    engine.cancel(data.draw(st.sampled_from(added)))
            case "preempt":
                engine.preempt()
            case "replace":
                make_folder(folders, data.draw(st.sampled_from("abcde")), data.draw(st.binary(max_size=8)))
            case "break":
                engine.worker.broken ^= {str(folders / "a")}
        engine.gate.check_integrity()
    engine.run()
    assert all(request.end for request in added)
    assert all(request.end != "failed" or request.ref is None or request.ref.name.startswith("a") for request in added)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"polcy": "fifo"}, "kv_connector_extra_config = 'polcy'"),
        ({"policy": "chameleon"}, "expected a policy that needs no pool of pages"),
        ({"policy": "nope"}, "nope"),
        ({"eviction": "nope"}, "nope"),
        ({"look_ahead": -1}, "look_ahead"),
        ({"look_ahead": "10"}, "look_ahead = '10', expected a whole number"),
        ({"look_ahead": True}, "look_ahead = True, expected a whole number"),
        ({"blocking_loads": "false"}, "blocking_loads = 'false', expected true or false"),
        ({"forecast": "no"}, "forecast = 'no', expected true or false"),
        ({"policy": ["fifo"]}, r"policy = \['fifo'\], expected a text"),
        ({"policy_options": "x"}, "policy_options = 'x', expected an object"),
        ({"pin": "a"}, "pin = 'a', expected a list"),
        ({"pin": [3]}, r"pin = \[3\], expected a list of at most 1 names"),
        ({"pin": ["a", "b"]}, "a list of at most 1 names"),
    ],
)
def test_wrong_options_are_refused_by_name(table: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        StandInEngine(tmp_path, **table)  # type: ignore[arg-type]


def test_the_limits_are_those_of_vllm() -> None:
    options = read_options({}, max_loras=2, max_cpu_loras=4, max_num_seqs=5, max_num_batched_tokens=64)
    engine = options.engine
    assert options.num_slots == 2 and engine.scheduler.max_num_seqs == 5 and engine.adapters.max_cpu_loras == 4
