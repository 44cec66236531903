"""What crosses between the processes arrives as it was sent."""

from __future__ import annotations

import pytest

from manylora.core import errors
from manylora.core.errors import ManyloraError
from manylora.core.events import RequestArrived, RequestFinished, TokensEmitted
from manylora.core.types import (
    AdapterKey,
    Constraint,
    Continuation,
    FinishReason,
    Output,
    Request,
    SampledToken,
    SamplingParams,
)
from manylora.serving.hosting.engine.observer import Observer
from manylora.serving.hosting.protocol import (
    AddRequests,
    Cancel,
    Fault,
    LoadAdapter,
    Observations,
    Turn,
    decode_command,
    decode_message,
    encode,
)


def make(kind: type[ManyloraError]) -> ManyloraError:
    if issubclass(kind, errors.AdapterError):
        return kind("name", "is broken")
    if issubclass(kind, errors.RequestError):
        return kind("wrong", param="stop")
    if issubclass(kind, errors.CapacityError):
        return kind("full", retry_after_s=7.0, status=503)
    return kind("it failed")


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_survives_the_journey(name: str) -> None:
    error = make(getattr(errors, name))
    arrived = Fault.of(error).to_error()
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.status == error.status
    for detail in ("param", "adapter", "reason", "retry_after_s"):
        assert getattr(arrived, detail, None) == getattr(error, detail, None)


@pytest.mark.parametrize(
    "command",
    [
        AddRequests(
            1,
            [
                Request(
                    request_id="r",
                    prompt=(1, 2),
                    model="m",
                    sampling=SamplingParams(
                        stop=("a",), logit_bias=((3, -1.0),), seed=2**63, constraint=Constraint("json", "{}")
                    ),
                )
            ],
        ),
        Cancel(["a", "b"], True),
        LoadAdapter(2, "m", "/path", True),
    ],
)
def test_commands(command: AddRequests | Cancel | LoadAdapter) -> None:
    assert decode_command(encode(command)) == command


def test_turns() -> None:
    token = SampledToken(token_id=5, logprob=-0.5, top=((5, -0.5), (6, -1.0)))
    output = Output(
        request_id="r", tokens=(token,), finish=FinishReason.STOP, stop_token=5, adapter=AdapterKey("k"), error=None
    )
    turn = Turn([output], Observations(ttft_s={"m": [0.5]}, num_failed_loads=1))
    assert decode_message(encode(turn)) == turn


def arrived(at: float, request_id: str, name: str = "") -> RequestArrived:
    return RequestArrived(
        at,
        request_id=request_id,
        adapter=None,
        num_prompt_tokens=3,
        name=name,
        limit=100,
    )


def finished(at: float, request_id: str, reason: FinishReason) -> RequestFinished:
    return RequestFinished(
        at,
        request_id=request_id,
        adapter=None,
        reason=reason,
        arrived_at=0.0,
        admitted_at=0.0,
        first_token_at=1.0,
        num_prompt_tokens=3,
        num_output_tokens=4,
        num_cached_tokens=0,
        num_preemptions=0,
    )


def test_what_the_observer_makes_of_events() -> None:
    observer = Observer()
    for request_id, adapter in (("r", "m"), ("q", "")):
        observer(arrived(10.0, request_id, adapter))
    observer(TokensEmitted(10.5, ("r", "q")))
    observer(TokensEmitted(10.7, ("r",)))
    observer(TokensEmitted(10.9, ("r",)))
    observer(finished(11.0, "r", FinishReason.LENGTH))
    observed = observer.take()
    assert observed.ttft_s == {"m": [0.5], "": [0.5]}
    assert observed.inter_token_s == {"m": pytest.approx([0.2, 0.2])}
    assert [one.adapter for one in observed.finished] == ["m"]
    assert [(one.prefill_s, one.decode_s) for one in observed.finished] == [(1.0, 10.0)]
    assert observer.take() == Observations()


def test_what_many_answers_share_is_sent_once() -> None:
    """A message is of the size of the HTTP request, not of that times the number of answers; seeds are beside."""
    prompt = tuple(range(1000))
    sampling = SamplingParams(
        allowed_token_ids=tuple(range(5000)), constraint=Constraint("regex", "a" * 50_000), seed=3
    )
    requests = [
        Request(
            request_id=str(i), prompt=prompt, sampling=sampling, model="m" * 600, cache_salt="s" * 1000, seed=i or None
        )
        for i in range(100)
    ]
    begun = Continuation(tokens=(5, 6), adapter=AdapterKey("k"))
    requests.append(Request(request_id="other", prompt=(1, 2), tenant="t", priority=2, continuation=begun))
    data = encode(AddRequests(7, requests, True))
    assert len(data) < 100_000, "of one of a hundred: 50,000 characters, 6,000 ids, the name and the salt"
    command = decode_command(data)
    assert command == AddRequests(7, requests, True)
    assert isinstance(command, AddRequests)
    assert len({id(one.prompt) for one in command.requests}) == 2
    assert len({id(one.sampling) for one in command.requests}) == 2
