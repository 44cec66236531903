"""An answer that another engine began goes on as if it had been here all the time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import check_reports, make_rig, request, version

from manylora.core.errors import AdapterReplaced, ModelNotFound, RequestError
from manylora.core.events import AdapterLoadStarted, RequestFinished
from manylora.core.types import AdapterKey, Continuation, Tier


def whole(**options):
    """Return the answer of one engine, and the request."""
    rig = make_rig()
    rig.register("a", key="v1")
    asked = request("r", num_prompt=9, max_tokens=8, model="a", **options)
    rig.add(asked)
    rig.drain()
    return asked, rig.tokens("r")


def begun(asked, tokens, adapter="v1"):
    return replace(asked, continuation=Continuation(tokens=tuple(tokens), adapter=adapter))


@pytest.mark.parametrize("num_begun", [0, 1, 5, 7])
def test_the_rest_of_an_answer_is_the_same_and_only_the_rest_comes(num_begun):
    asked, tokens = whole(seed=3)
    rig = make_rig()
    rig.register("a", key="v1")
    rig.add(begun(asked, tokens[:num_begun]))
    rig.drain()
    assert rig.tokens("r") == tokens[num_begun:]
    assert rig.finish("r") == "length"
    (finished,) = [event for event in rig.events if isinstance(event, RequestFinished)]
    assert (finished.num_prompt_tokens, finished.num_output_tokens) == (9, 8)
    assert rig.core.stats().num_generated_tokens == 8 - num_begun


def test_the_prefix_cache_is_not_reported_twice():
    asked, tokens = whole()
    rig = make_rig()
    rig.register("a", key="v1")
    rig.add(replace(asked, request_id="before", prompt=(*asked.prompt, *asked.prompt)))
    rig.drain()
    rig.add(begun(replace(asked, prompt=(*asked.prompt, *asked.prompt)), tokens[:3]))
    rig.drain()
    assert rig.outputs["r"][-1].num_cached_tokens == 0


@pytest.mark.parametrize("num_begun", [0, 1, 5])
def test_the_prompt_is_reported_by_the_engine_that_gives_the_first_token(num_begun):
    asked, tokens = whole(prompt_logprobs=1)
    rig = make_rig()
    rig.register("a", key="v1")
    rig.add(begun(asked, tokens[:num_begun]))
    rig.drain()
    assert rig.tokens("r") == tokens[num_begun:]
    reports = [output.prompt_logprobs for output in rig.outputs["r"] if output.prompt_logprobs is not None]
    assert [len(report) for report in reports] == ([] if num_begun else [8])


def test_the_version_is_found_by_its_key_under_any_name():
    asked, tokens = whole()
    rig = make_rig()
    rig.register("b", key="v1")
    rig.add(begun(asked, tokens[:4]))
    rig.drain()
    assert rig.tokens("r") == tokens[4:]
    assert rig.outputs["r"][-1].adapter == "v1"


def test_a_version_that_other_answers_still_run_on_is_found():
    asked, tokens = whole()
    rig = make_rig()
    rig.register("a", key="v1")
    rig.add(replace(asked, request_id="older"))
    rig.turn()
    rig.register("a", key="v2", replace=True)
    rig.add(begun(asked, tokens[:4]))
    rig.drain()
    assert rig.tokens("r") == tokens[4:]
    assert rig.executor.host == {"v2"}
    rig.core.check_integrity()


def test_every_report_can_be_read_while_answers_of_an_unloaded_adapter_go_on():
    asked, tokens = whole()
    rig = make_rig()
    rig.register("a", key="v1")
    rig.add(replace(asked, request_id="older"))
    rig.turn()
    rig.core.adapters.unregister("a", rig.now)
    rig.add(begun(asked, tokens[:4]))
    rig.turn()
    check_reports(rig.core, rig.now)
    assert rig.core.adapters.in_use(rig.now) == ()
    rig.drain()
    assert rig.tokens("r") == tokens[4:]


def test_another_version_or_none_is_an_error():
    asked, tokens = whole()
    rig = make_rig()
    with pytest.raises(AdapterReplaced, match="adapter 'a': it was unloaded before this answer was complete"):
        rig.add(begun(asked, tokens[:4]))
    rig.register("a", key="v2")
    with pytest.raises(AdapterReplaced, match="adapter 'a': it was replaced"):
        rig.add(begun(asked, tokens[:4]))
    with pytest.raises(AdapterReplaced, match="begun by the base"):
        rig.add(begun(asked, tokens[:4], adapter=None))
    rig.add(begun(asked, ()))  # no token came: any version will do
    rig.drain()
    assert rig.outputs["r"][-1].adapter == "v2"


def test_an_answer_that_has_all_its_tokens_is_refused():
    asked, tokens = whole()
    rig = make_rig()
    rig.register("a", key="v1")
    with pytest.raises(RequestError, match="Got 8 tokens of the answer already, expected fewer than 8"):
        rig.add(begun(asked, tokens))


def test_a_full_queue_does_not_refuse_it():
    asked, tokens = whole()
    rig = make_rig(max_waiting=1, max_num_seqs=1)
    rig.register("a", key="v1")
    rig.add(request("waits", max_tokens=2))
    rig.add(begun(asked, tokens[:4]))
    rig.drain()
    assert rig.tokens("r") == tokens[4:]


def test_a_seed_of_the_request_counts_before_that_of_its_sampling():
    def answer(seed, sampling_seed):
        rig = make_rig()
        rig.add(replace(request("r", max_tokens=6, seed=sampling_seed), seed=seed))
        rig.turn()
        return rig.executor.plan.sequences[0].seed

    assert answer(5, None) == 5
    assert answer(None, 9) == 9
    assert answer(5, 9) == 5  # one of several answers


def test_a_request_has_the_version_that_it_names_whatever_its_name_stands_for_here():
    asked, tokens = whole()
    rig = make_rig()
    rig.register("a", key="v1")
    rig.core.adapters.point("@a@1", "a", rig.now)
    rig.register("a", key="v2", replace=True)
    rig.add(replace(asked, version=AdapterKey("v1")))
    rig.drain()
    assert rig.tokens("r") == tokens
    assert rig.outputs["r"][-1].adapter == "v1"
    assert [status.name for status in rig.core.adapters.statuses(rig.now)] == ["a"]
    assert (rig.core.stats().num_registered, rig.core.adapters.status("a", rig.now).num_requests) == (1, 1)
    check_reports(rig.core, rig.now)
    rig.core.adapters.unregister("@a@1", rig.now)
    with pytest.raises(ModelNotFound):
        rig.add(replace(asked, version=AdapterKey("v1")))
    with pytest.raises(ModelNotFound):
        rig.add(replace(asked, model="@a@1"))


def test_reports_name_adapters_and_not_the_labels_of_their_versions():
    rig = make_rig(max_num_seqs=1)
    rig.register("a", key="v1")
    rig.core.adapters.point("@a@1", "a", rig.now)
    rig.register("@a@2", key="v2")
    rig.core.adapters.point("a", "@a@2", rig.now)
    rig.add(request("runs", max_tokens=8, model="a"), request("waits", model="a"))
    rig.turn()
    rig.step()
    stats = rig.core.stats()
    assert stats.running_adapters == stats.waiting_adapters == stats.resident_adapters == ("a",)
    check_reports(rig.core, rig.now)


@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_version_that_follows_one_with_requests_is_copied_before_the_next_request(is_in_use):
    rig = make_rig()
    rig.register("a", key="v1")
    rig.add(request("r", max_tokens=8, model="a"))
    rig.turn()
    if not is_in_use:
        rig.drain()
    rig.register("@a@2", key="v2")
    rig.core.adapters.point("a", "@a@2", rig.now)
    started = [event.adapter for event in rig.events if isinstance(event, AdapterLoadStarted)]
    assert started == (["v1", "v2"] if is_in_use else ["v1"])
    rig.drain()
    assert rig.core.adapters.status("a", rig.now).tier is (Tier.DEVICE if is_in_use else Tier.HOST)
    check_reports(rig.core, rig.now)


def test_a_version_is_read_again_from_the_folder_of_a_name_that_it_still_has():
    rig = make_rig()
    rig.register("a", key="v1")
    there = replace(version("v1"), source="/other/folder")
    rig.core.adapters.register("b", there, rig.now)
    rig.core.adapters.unregister("a", rig.now)
    assert rig.core._cache.residencies[AdapterKey("v1")].version.source == "/other/folder"
