"""A function that lies is ended; the agent and the other functions go on."""

from __future__ import annotations

import asyncio
from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any, cast, get_type_hints

import pytest
from msgspec import ValidationError, structs

from manylora.core.config import EngineConfig, ModelConfig
from manylora.core.engine.status import AdapterStatus, EngineStats
from manylora.core.errors import EngineDead
from manylora.core.isolation.confine import Measure
from manylora.core.types import (
    AdapterKey,
    AdapterVersion,
    Output,
    PromptLogprobs,
    Request,
    SampledToken,
    SamplingParams,
    Tier,
)
from manylora.functions.processes.checks import MAX_ENTRIES, MAX_NOTE_CHARS, MAX_PARTS, NUM_EMPTY, MessageCheck
from manylora.functions.processes.frames import FrameError
from manylora.functions.processes.link import FunctionLink
from manylora.functions.processes.messages import FunctionPlace
from manylora.functions.processes.zygote import ForkedFunction, Zygote
from manylora.serving.hosting.links.client import EngineClient
from manylora.serving.hosting.protocol import (
    AdapterIdentity,
    AdapterMove,
    AddRequests,
    Cancel,
    EngineInfo,
    EngineRoom,
    EngineSpec,
    Fault,
    FinishedRequest,
    Message,
    Observations,
    Ready,
    Reply,
    StartRefused,
    StartReport,
    Turn,
    decode_message,
    encode,
)

NAN = float("nan")
INFO = EngineInfo(
    max_model_len=8,
    vocab_size=9,
    block_size=1,
    page_bytes=1,
)
GOOD = FinishedRequest("mine", "stop", 0.1, 1, 1)


def start(stage: str = "fork", measure: str = "files", note: str = "", took_s: float = 0.1) -> Ready:
    return Ready(INFO, start=StartReport(took_s={stage: took_s}, measures=(Measure(measure, False, note),)))


def turn(**seen: Any) -> Turn:
    return Turn([], Observations(**seen))


def finished(**changes: Any) -> Turn:
    return turn(finished=[structs.replace(GOOD, **changes)])


def status(name: str) -> AdapterStatus:
    numbers: dict[str, Any] = dict.fromkeys(("num_running", "num_waiting", "num_requests", "num_hits", "generation"), 0)
    sizes: dict[str, Any] = dict.fromkeys(
        ("rank", "num_modules", "num_pages", "weight_bytes", "host_bytes", "disk_bytes"), 0
    )
    version = AdapterVersion(key=AdapterKey("k"), source="", target_modules=(), **sizes)
    return AdapterStatus(
        name=name, version=version, tier=Tier.DISK, state="disk", is_pinned=False, last_used_s=None, **numbers
    )


def stats(**changes: Any) -> EngineStats:
    hints = get_type_hints(EngineStats)
    needed = [one.name for one in fields(EngineStats) if one.default is MISSING]
    return EngineStats(**{name: 0 if hints[name] is int else () for name in needed}, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        start(stage="x"),
        start(measure="m" * 5000),
        start(took_s=NAN),
        turn(ttft_s={"mine": [0.1, NAN, 0.2]}),
        turn(queue_s=[float("inf")]),
        turn(device_loads_s=[-1.0]),
        turn(inter_token_s={"theirs": [0.1]}),
        turn(step_tokens=[-1]),
        finished(adapter="", num_output_tokens=-1),
        finished(num_prompt_tokens=2**31),
        finished(reason="any label"),
        finished(prefill_s=NAN),
        finished(adapter="theirs"),
        finished(engine_s=NAN),
        finished(tenant="of another function"),
        StartRefused(Fault(kind="AdapterError", message="", reason="r" * 2**17)),
        Reply(1, Fault(kind="CapacityError", message="", retry_after_s=NAN)),
        Reply(1, refused={"r": Fault(kind="CapacityError", message="", status=200)}),
        turn(queue_s=[0.1] * (MAX_ENTRIES + 1)),
        turn(step_tokens=[1] * (MAX_ENTRIES + 1)),
        turn(moves=[AdapterMove(AdapterKey("k"), Tier.HOST, "loaded", took_s=NAN)]),
        turn(moves=[AdapterMove(AdapterKey("k" * 5000), Tier.HOST, "loaded")]),
        finished(load_s=NAN),
        Turn([Output(request_id="other")] * (MAX_ENTRIES + 1), Observations()),
        Turn([], Observations(), EngineRoom(1, Fault(kind="CapacityError", message="", status=200))),
        Turn([], Observations(), EngineRoom(-1, Fault(kind="CapacityError", message=""))),
        Reply(1, registered={"mine": AdapterIdentity(1, AdapterKey("k" * 5000), "", "")}),
        Reply(1, statuses=(status("mine"),) * 3),
        Reply(1, stats=stats(resident_adapters=("mine",) * (MAX_PARTS + 1))),
    ],
)
def test_a_lie_is_no_message(message: Message) -> None:
    check = MessageCheck({"", "mine"})
    check.checked(start())
    check = MessageCheck({"", "mine"})
    with pytest.raises(FrameError):
        check.checked(message)


def answer(num_tokens: int, **changes: Any) -> Turn:
    return Turn([Output(request_id="r", tokens=(SampledToken(token_id=1),) * num_tokens, **changes)], Observations())


def test_a_message_is_no_longer_than_what_was_asked_for() -> None:
    """The agent holds what has arrived of it: 64 MiB for each function would fill its memory."""

    engine = EngineSpec(config=EngineConfig(model=ModelConfig(model="m")), served_name="base", builder="")
    transport = SimpleNamespace(is_closing=lambda: False, write=len, get_write_buffer_size=lambda: 0)

    async def scenario() -> None:
        link = FunctionLink(engine, cast(Zygote, None), FunctionPlace(readable=[]))
        link._transport = cast(Any, transport)
        prompt = SamplingParams(prompt_logprobs=20)
        long = Request(request_id="long", prompt=(1,) * 100_000, sampling=prompt)
        short = Request(request_id="short", prompt=(1,), sampling=SamplingParams(logprobs=5))
        longest = []
        for asked in ((), (short,), (long,)):
            if asked:
                link.send(AddRequests(1, list(asked)))
            longest.append(link._buffer.max_bytes)
        link.send(Cancel(["long"]))
        assert longest[0] == 1 << 20
        assert longest[0] + 4096 < longest[1] < longest[0] + 10_000
        assert longest[2] == link._buffer.max_bytes == 64 << 20  # a part may be on its way
        other = FunctionLink(engine, cast(Zygote, None), FunctionPlace(readable=[]))
        other._take((2 << 20).to_bytes(4, "big"))
        assert other._lost.result() == "Got a message of 2097152 bytes, expected at most 1048576"

    asyncio.run(scenario())


def test_a_message_of_too_many_names_is_not_read() -> None:
    """A decoder takes seconds for some millions, and the agent waits."""
    names: dict[str, Any] = {str(number): [] for number in range(2**18 + 1)}
    fault = Fault(kind="RequestError", message="")
    for message in (
        turn(ttft_s=names),
        turn(inter_token_s=names),
        Reply(1, refused=dict.fromkeys(names, fault)),
        Reply(1, registered=dict.fromkeys(names, AdapterIdentity(1, AdapterKey("k"), "", ""))),
    ):
        with pytest.raises(ValidationError, match="length <="):
            decode_message(encode(message))


def test_moves_of_adapters_are_kept_with_short_reasons() -> None:
    check = MessageCheck({"", "mine"})
    moves = [AdapterMove(AdapterKey("k"), Tier.HOST, "failed", error="e" * 10_000)] * (MAX_PARTS + 1)
    checked = check.checked(turn(moves=moves))
    assert isinstance(checked, Turn)
    assert (
        checked.observations.moves == [AdapterMove(AdapterKey("k"), Tier.HOST, "failed", error="e" * 1000)] * MAX_PARTS
    )


def test_an_answer_is_no_longer_than_was_asked_for() -> None:
    """A client that does not read has its answer wait in the API process."""
    check = MessageCheck({"", "mine"})
    prompt = PromptLogprobs(num_top=0, token_ids=b"", logprobs=b"", ranks=b"")
    sampling = SamplingParams(max_tokens=5, prompt_logprobs=0)
    one_top = SampledToken(token_id=1, logprob=0.0, top=((1, 0.0),))
    asked = [Request(request_id=one, prompt=(1,), sampling=sampling) for one in ("r", "s", "t")]
    check.expect(1, asked)
    check.checked(Reply(1, refused={"s": Fault(kind="RequestError", message="no")}))
    check.checked(answer(0, prompt_logprobs=prompt))
    for wrong in (
        answer(0, prompt_logprobs=prompt),  # it has come
        answer(0, error="e" * 5000),
        answer(0, adapter="a" * 5000),
        answer(6 + NUM_EMPTY),
        structs.replace(answer(0), outputs=[Output(request_id="r", tokens=(one_top,))]),  # it asked for none
    ):
        with pytest.raises(FrameError):
            check.checked(wrong)
    for _ in range(NUM_EMPTY - 1):
        check.checked(answer(0))
    check.checked(answer(5))
    with pytest.raises(FrameError, match="more tokens than its request asked for"):
        check.checked(answer(0))
    check.forget(["r", "t"])
    check.checked(answer(100))  # which is dropped
    assert not (check._left or check._tops or check._prompts or check._calls)


def test_a_function_starts_once_with_short_notes() -> None:
    check = MessageCheck({"", "mine"})
    ready = check.checked(start(note="n" * 10_000))
    assert isinstance(ready, Ready) and ready.start is not None
    assert len(ready.start.measures[0].note) == MAX_NOTE_CHARS
    good = turn(ttft_s={"mine": [0.1]}, inter_token_s={"": [0.0, 0.1]}, step_tokens=[4], finished=[GOOD])
    assert check.checked(good) is good
    with pytest.raises(FrameError, match="twice"):
        check.checked(start())


def test_a_snapshot_without_counters_is_an_error_of_the_engine() -> None:
    async def scenario() -> None:
        class Forks:
            async def fork(self, *_: object, **__: object) -> ForkedFunction:
                return ForkedFunction(1)

            def kill(self, function: ForkedFunction) -> None:
                function.end(-9)

        engine = EngineSpec(config=EngineConfig(model=ModelConfig(model="m")), served_name="base", builder="")
        link = FunctionLink(engine, cast(Zygote, Forks()), FunctionPlace(readable=[]))
        client = EngineClient(link, observe=lambda seen: None)
        starting = asyncio.create_task(client.start())
        while link._transport is None:
            await asyncio.sleep(0)
        client._deliver([start()])
        await starting
        taking = asyncio.create_task(client.snapshot())
        await asyncio.sleep(0)
        client._deliver([Reply(1)])
        with pytest.raises(EngineDead, match="without its counters"):
            await taking
        await client.stop()
        await asyncio.sleep(0)

    asyncio.run(scenario())
