"""The parts of the router that need no socket: health, reports, choice, the fields of a body, heads of requests."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.core.costs.step_model import PRIOR
from manylora.core.errors import RequestError
from manylora.core.routing import ReplicaView
from manylora.core.routing.policies import AffinityRouter, LeastLoadedRouter
from manylora.route.backend import BackendState, Health
from manylora.route.choice import Choice, PromptText
from manylora.route.fleet.changes import ChangeLog
from manylora.route.relay.exchange import Exchange, read_fields, with_fields
from manylora.route.relay.relay import pass_on
from manylora.route.report import BackendMetrics, MetricsReader, ReportedTimes, ServerKind, read_models
from manylora.route.upstream.address import answer_headers, parse_backend, request_head
from manylora.serving.http.http_protocol import EXTENSION

FALL = 3


def warm_health() -> Health:
    return Health(fall=FALL, rise=2, slow_start_s=10.0, is_warm=True)


def test_bytes_overrule_failed_polls_and_lost_requests_overrule_good_ones() -> None:
    health = warm_health()
    assert health.poll_succeeded(0.0)
    assert health.share(0.0) == 1.0  # warm: no slow start
    for num_reads in range(1, 20):  # it streams, and its health route does not answer
        assert not health.poll_failed(num_reads, "slow")
    assert [health.poll_failed(19, "slow") for _ in range(3)] == [False, False, True]
    assert (health.state, health.reason) == (BackendState.DOWN, "slow")
    assert [health.poll_succeeded(now) for now in (20.0, 21.0)] == [False, True]
    assert health.share(21.0) < 0.05
    assert health.share(26.0) == pytest.approx(0.5)
    assert health.share(40.0) == 1.0
    health.failed(41.0, "lost")
    health.answered()  # one answer between them: not in a row
    assert [health.failed(42.0, "lost") for _ in range(3)] == [False, False, True]
    assert not any(health.poll_succeeded(43.0) for _ in range(5))  # polls are good, and requests were not answered
    assert [health.wants_probe(now) for now in (43.9, 44.0)] == [False, True]
    health.probe_failed(44.0)
    assert [health.wants_probe(now) for now in (47.9, 48.0)] == [False, True]  # twice as long
    health.answered()
    assert health.poll_succeeded(48.0)
    held = []
    for now in range(100, 2000, 100):
        assert health.stalled(now, "no progress")
        held.append(next(s for s in range(100) if health.wants_probe(now + s)))
        health.answered()
        health.poll_succeeded(now + 90)
        assert health.poll_succeeded(now + 90)
    assert held[:4] == [8, 16, 32, 60]
    assert max(held) == 60


@given(st.lists(st.sampled_from(["good", "bad", "bytes", "failed", "answered"]), max_size=60))
def test_a_backend_goes_out_only_after_enough_failures_in_a_row(steps: list[str]) -> None:
    health, num_reads, silent, num_failed = warm_health(), 0, 0, 0
    health.poll_succeeded(0.0)
    for now, step in enumerate(steps, 1):
        was_up = health.is_up
        if step == "good":
            health.poll_succeeded(now)
            silent = 0
        elif step == "bad":
            health.poll_failed(num_reads, "no answer")
            silent += 1
        elif step == "bytes":
            num_reads += 1
            silent = 0
        elif step == "failed":
            health.failed(now, "lost")
            num_failed += 1
        else:
            health.answered()
            num_failed = 0
        if was_up and not health.is_up:
            assert silent >= FALL or num_failed >= FALL
        if health.is_up and not was_up:
            silent = num_failed = 0


VLLM = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.0e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql, poet",waiting_lora_adapters="tax"} 1.7e+09
vllm:lora_adapter_loaded{adapter_name="a \\"quoted\\" {one}",level="gpu",pinned="false",rank="16"} 1.0
vllm:lora_adapter_loaded{adapter_name="cold",level="cpu",pinned="false",rank="8"} 1.0
vllm:lora_adapter_loaded{adapter_name="gone",level="gpu",pinned="false",rank="8"} 0.0
manylora:adapter_copies_total{engine="0",model_name="m"} 7.0
manylora:lora_adapter_loaded{adapter_name="plugged",engine="0",level="device",model_name="m",rank="4"} 1.0
"""


@given(st.lists(st.integers(min_value=0, max_value=len(VLLM)), max_size=20))
def test_metrics_are_the_same_in_whatever_pieces_they_come(cuts: list[int]) -> None:
    reader, begin = MetricsReader(), 0
    for end in [*sorted(cuts), len(VLLM)]:
        reader.feed(VLLM[begin:end].encode())
        begin = end
    metrics = reader.result()
    assert (metrics.num_running, metrics.num_waiting, metrics.kv_usage) == (7, 2, 0.5)
    assert metrics.in_use == {"sql", "poet", "tax"}
    assert metrics.on_device == {'a "quoted" {one}', "plugged"}
    assert metrics.ranks == {'a "quoted" {one}': 16, "cold": 8, "plugged": 4}


@given(st.binary(max_size=400), st.sampled_from(["vllm:num_requests_running", "vllm:lora_requests_info{", "sglang:"]))
def test_metrics_that_are_wrong_are_no_error(noise: bytes, prefix: str) -> None:
    reader = MetricsReader()
    reader.feed(prefix.encode() + noise + b"\n" + noise)
    metrics = reader.result()
    assert metrics.num_running is None or metrics.num_running >= 0


def test_a_line_without_an_end_and_names_without_number_are_bounded() -> None:
    reader = MetricsReader()
    for _ in range(64):
        reader.feed(b'vllm:lora_requests_info{x="' * 4096)
    reader.feed(b'\nsglang:num_running_reqs{tp_rank="0"} 5\nsglang:token_usage 0.75\n')
    assert reader.result().num_running == 5
    many = MetricsReader()
    for number in range(60_000):
        many.feed(b'vllm:lora_adapter_loaded{adapter_name="a%d",level="gpu",rank="8"} 1\n' % number)
    assert len(many.result().ranks) == 50_000


def test_models_of_each_kind_of_server() -> None:
    def listing(*cards: dict[str, object]) -> bytes:
        return json.dumps({"object": "list", "data": cards}).encode()

    base = {"id": "m", "owned_by": "vllm", "root": "/m", "parent": None, "permission": []}
    cards, raw, kind = read_models(listing(base, {"id": "a", "root": "/a", "parent": "m"}))
    assert (kind, cards["a"].parent, cards["a"].root) == (ServerKind.VLLM, "m", "/a")
    assert json.loads(bytes(raw["m"])) == base
    assert read_models(listing({"id": "m", "owned_by": "x"}))[2] is ServerKind.OTHER
    for wrong in (b"", b"[]", b'{"data": 3}', listing({"id": ""}), listing({"id": 3}), b"[" * 100_000):
        with pytest.raises(ValueError, match=r"no list|name"):
            read_models(wrong)


@pytest.mark.parametrize("card", [b'{"id":"a"}', b"1", b"{}"])
def test_a_list_of_a_million_models_takes_little_memory(card: bytes) -> None:
    body = b'{"data":[' + b",".join([card] * 1_000_000) + b"]}"
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"more than 200000 objects|no list of models"):
        read_models(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_the_samples_of_a_page_of_metrics_are_bounded() -> None:
    reader = MetricsReader()
    for _ in range(300):
        reader.feed(b"sglang:num_running_reqs 1\n" * 1000)
    assert reader.result().num_running == 200_000


def test_tokens_of_all_engines_are_summed() -> None:
    reader = MetricsReader()
    reader.feed(b'vllm:generation_tokens_total{engine="0"} 3\nvllm:generation_tokens_total{engine="1"} 4\n')
    reader.feed(b"vllm:prompt_tokens_total 5\nvllm:generation_tokens_created 1e9\n")
    assert reader.result().num_tokens == 12


@dataclass(eq=False)
class Member:
    url: str
    view: ReplicaView = field(default_factory=ReplicaView)
    place: int = 0
    times: ReportedTimes = field(default_factory=ReportedTimes)


def test_adapters_keep_their_homes_when_others_fail_leave_and_come() -> None:
    members = [Member(str(index)) for index in range(8)]
    choice = Choice(AffinityRouter(), {})
    for member in members:
        choice.join(member)
    adapters = [f"a{index}" for index in range(200)]

    def homes(among: list[Member]) -> dict[str, Member]:
        chosen = {}
        for name in adapters:
            ticket = choice.choose(name, PromptText(b"", 40, 10), among)
            ticket.end()
            ticket.end()  # twice is the same
            chosen[name] = ticket.member
        return chosen

    first = homes(members)
    assert len(set(first.values())) == 8
    without = homes(members[1:])
    assert all(without[name] is first[name] for name in adapters if first[name] is not members[0])
    choice.leave(members[0])
    left = homes(members[1:])
    assert all(left[name] is first[name] for name in adapters if first[name] is not members[0])
    new = Member("new")
    choice.join(new)
    again = homes([new, *members[1:]])
    assert all(again[name] is (new if first[name] is members[0] else first[name]) for name in adapters)
    assert all(member.view.load == 0 for member in [new, *members])


def test_a_log_keeps_all_loads_and_the_latest_unloads() -> None:
    log = ChangeLog(max_unloaded=2)
    for name in "abcd":
        assert log.enter(name, log.next(f"/{name}")) is None
    assert [log.enter(name, log.next(None)) for name in ("b", "c", "b", "d", "a")] == [None, None, None, "c", "b"]
    assert [(name, change.path) for name, change in log] == [("a", None), ("d", None)]
    assert log.enter("a", log.next("/again")) is None
    changes = [change for _, change in log]
    assert [change.path for change in changes] == ["/again", None]
    assert changes[0].generation > changes[1].generation


def test_ranks_of_adapters_that_come_and_go_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora.route.choice.MOST_RANKS", 3)
    ranks: dict[str, int] = {}
    choice = Choice(LeastLoadedRouter(), ranks)
    for names in ("ab", "bc", "de"):
        choice.learn_ranks(dict.fromkeys(names, 8))
        assert len(ranks) <= 3
        assert set(names) <= set(ranks)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["send", "end", "report", "silence"])), max_size=80))
def test_own_requests_and_reports_never_make_a_load_negative(steps: list[tuple[int, str]]) -> None:
    members = [Member(str(index)) for index in range(4)]
    choice = Choice(LeastLoadedRouter(), {"big": 64})
    for member in members:
        choice.join(member)
    rng, tickets = Random(1), []
    for place, step in steps:
        member = members[place]
        own = sum(ticket.member is member for ticket in tickets)
        if step == "send":
            tickets.append(choice.choose("big", PromptText(b"", 400, 100), [member]))
        elif step == "end" and tickets:
            tickets.pop(rng.randrange(len(tickets))).end()
        elif step == "report":
            choice.correct(member, own, BackendMetrics(num_running=own + 5))
        else:
            choice.correct(member, 0, None)
        own_by_member = [sum(ticket.member is one for ticket in tickets) for one in members]
        assert all(0 <= one.view.load - own <= 5 for one, own in zip(members, own_by_member, strict=True))
    for ticket in tickets:
        ticket.end()
    for member in members:
        choice.correct(member, 0, BackendMetrics(num_running=0))
        assert (member.view.load, member.view.sum_rank, member.view.max_rank) == (0, 0, 0)


def test_step_times_are_learnt_from_the_means_of_reports() -> None:
    """A backend whose steps are a tenth of the guess's, and one ten times slower: loads differ from poll to poll."""
    rng, text = Random(3), "vllm:{}_{} {}\n"
    for factor in (0.1, 10.0):
        times, view, totals = (
            ReportedTimes(),
            ReplicaView(),
            dict.fromkeys(("gap_s", "gaps", "prompt_s", "prompts"), 0.0),
        )
        num_tokens = num_cached = 0
        learnt = None
        for poll in range(120):
            load, prompt, cached = rng.randint(1, 20), rng.randint(100, 2000), rng.randint(0, 90)
            totals["gap_s"] += 100 * factor * PRIOR.decode_s(load, 0, 0, 0, 0)
            totals["prompt_s"] += 3 * factor * PRIOR.prefill_s(load + prompt - cached, prompt, 0, 0, 0)
            totals["gaps"], totals["prompts"] = 100.0 * (poll + 1), 3.0 * (poll + 1)
            num_tokens, num_cached = num_tokens + 3 * prompt, num_cached + 3 * cached
            reader = MetricsReader()
            for name, kind in (("inter_token_latency", "gap"), ("request_prefill_time", "prompt")):
                reader.feed(text.format(name, "seconds_sum", totals[f"{kind}_s"]).encode())
                reader.feed(text.format(name, "seconds_count", totals[f"{kind}s"]).encode())
            reader.feed(f"vllm:prompt_tokens_total {num_tokens}\nvllm:prefix_cache_hits_total {num_cached}\n".encode())
            reader.feed(f"vllm:num_requests_running {load}\n".encode())
            learnt = times.learn(reader.result(), view)
            assert (learnt is None) == (poll < 48)
        assert learnt is not None
        for load, prompt in ((4, 500), (16, 1500)):
            assert learnt.decode_s(load, 0, 0, 0, 0) == pytest.approx(
                factor * PRIOR.decode_s(load, 0, 0, 0, 0), rel=0.1
            )
            expected = factor * PRIOR.prefill_s(load + prompt, prompt, 0, 0, 0)
            assert learnt.prefill_s(load + prompt, prompt, 0, 0, 0) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("body", "model", "tokens"),
    [
        ('{"model": "m", "prompt": "' + "x" * 400 + '"}', "m", 100),
        ('{"prompt": [1, 2, 3, 4], "model": "m"}', "m", 4),
        ('{"model": "a", "model": "b", "prompt": [[1, 2], [3]]}', "b", 3),
        ('{"messages": [{"role": "user", "content": "hello"}], "stream": true}', None, 10),
        ("{}", None, 0),
    ],
)
def test_fields_of_a_body(body: str, model: str | None, tokens: int) -> None:
    found, prompt = read_fields(body.encode())
    assert found == model
    assert abs(prompt.num_tokens - tokens) <= 1


@given(st.dictionaries(st.text(), st.recursive(st.integers() | st.text(), st.lists, max_leaves=5)), st.text())
def test_another_model_changes_nothing_else(fields: dict[str, object], model: str) -> None:
    body = json.dumps({**fields, "model": "before"}).encode()
    assert json.loads(with_fields(body, model=model)) == {**fields, "model": model}


def test_a_body_that_cannot_be_written_again_is_an_error_of_the_client() -> None:
    with pytest.raises(RequestError, match="cannot be passed on"):
        with_fields(b'{"model": "m", "\xff": 1}', "other")


@pytest.mark.parametrize("body", [b"", b"[]", b'"model"', b'{"model": ["x"]}', b'{"model": "\xff"}', b'{"model": "m"'])
def test_a_body_that_is_no_request(body: bytes) -> None:
    with pytest.raises(RequestError, match="not a JSON object"):
        read_fields(body)


def test_heads_leave_out_all_that_is_meant_for_one_hop() -> None:
    sent = [
        (b"host", b"router"),
        (b"connection", b"keep-alive, X-Hop"),
        (b"x-hop", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"authorization", b"Bearer client"),
        (b"x-forwarded-for", b"10.0.0.1"),
        (b"x-mine", b"1"),
    ]
    address = parse_backend("http://gpu:8000/prefix/v1")
    head = request_head(address, b"POST", b"/v1/x", num_body_bytes=3, headers=sent, client=b"10.0.0.2").decode()
    assert head.split("\r\n") == [
        "POST /prefix/v1/x HTTP/1.1",
        "host: gpu:8000",
        "authorization: Bearer client",
        "x-mine: 1",
        "x-forwarded-for: 10.0.0.1, 10.0.0.2",
        "content-length: 3",
        "",
        "",
    ]
    own = request_head(address, b"GET", b"/", num_body_bytes=0, headers=sent, authorization=b"Bearer own").decode()
    assert own.count("authorization") == 1
    assert "Bearer own" in own
    got = [(b"connection", b"x-hop"), (b"x-hop", b"1"), (b"server", b"s"), (b"keep-alive", b"5"), (b"x-mine", b"1")]
    assert answer_headers(got) == [(b"x-mine", b"1")]


def test_a_piece_that_comes_as_the_client_takes_another_stays_behind_it() -> None:
    async def test() -> None:
        taken: list[bytes] = []
        turns, is_slow = asyncio.Semaphore(0), True

        def write(piece: bytes) -> bool:
            if not is_slow:
                taken.append(piece)
            return not is_slow

        async def send(message: dict[str, Any]) -> None:
            if body := message.get("body"):
                await turns.acquire()  # as long as the client's connection is full
                taken.append(body)

        backend: Any = SimpleNamespace(num_reads=0, num_pieces=0)
        exchange = Exchange(backend, first_byte_s=60.0, idle_s=60.0)
        request: Any = SimpleNamespace(scope={"extensions": {EXTENSION: {"write": write}}}, call=None)
        client: Any = SimpleNamespace(waits_for=lambda exchange: None)
        exchange.head(200, [])
        exchange.body(b"1")
        passing = asyncio.create_task(pass_on(request, client, send, exchange, idle_timeout_s=60.0))
        for piece in (b"2", b"3"):
            await asyncio.sleep(0)
            exchange.body(piece)
            turns.release()
            for _ in range(8):
                await asyncio.sleep(0)
        is_slow = False  # the connection has room again, and the task that waits for it has yet to run
        exchange.body(b"4")
        exchange.ended()
        for _ in range(2):
            turns.release()
        await passing
        assert b"".join(taken) == b"1234"

    asyncio.run(test())
