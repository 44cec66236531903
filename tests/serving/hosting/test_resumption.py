"""Engines that die at any point lose no token of an answer and double none; a request that kills them is ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from harness import engine_info
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.errors import CapacityError, EngineDead, ManyloraError, PoisonRequest
from manylora.core.routing import Router
from manylora.core.routing.policies import FirstFitRouter
from manylora.core.types import FinishReason, Output, PromptLogprobs, Request, SampledToken, SamplingParams
from manylora.serving.hosting.fleet.fleet import Fleet, FleetPolicy
from manylora.serving.hosting.fleet.keeper import EngineState, RestartPolicy
from manylora.serving.hosting.fleet.resumption import ResumePolicy
from manylora.serving.hosting.links.in_flight import EngineLoss
from manylora.serving.hosting.protocol import (
    AddRequests,
    Cancel,
    Command,
    Ending,
    EngineRoom,
    Fault,
    Message,
    Observations,
    Ready,
    Reply,
    Turn,
)

INFO = engine_info(vocab_size=100_000)
POISON = 13
"""A prompt of this token ends every engine that runs it."""
REPORT = PromptLogprobs(num_top=0, token_ids=b"", logprobs=b"", ranks=b"")


def token_at(request: Request, position: int) -> int:
    """Return the token of a position: a function of the request alone, as with draws keyed by position."""
    assert request.seed is not None
    return (request.seed + 31 * position) % 100_000


@dataclass
class FakeEngine:
    """A link whose engine does nothing by itself: the test calls for every answer, token and death."""

    deliver: Callable[[Sequence[Message]], None] = lambda messages: None
    cancelled: set[str] = field(default_factory=set)  # by their clients
    revived: list[str] = field(default_factory=list)  # of those, the ones that were submitted afterwards
    submitted: list[AddRequests] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    running: dict[str, tuple[Request, int]] = field(default_factory=dict)
    ending: asyncio.Future[Ending] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    pid: int | None = None

    async def start(self, deliver: Callable[[Sequence[Message]], None]) -> None:
        self.deliver = deliver
        asyncio.get_running_loop().call_soon(deliver, [Ready(INFO)])

    def send(self, command: Command) -> None:
        match command:
            case AddRequests():
                self.submitted.append(command)
                self.revived += [one.request_id for one in command.requests if one.request_id in self.cancelled]
            case Cancel(request_ids):
                self.dropped.update(request_ids)
                for request_id in request_ids:
                    self.running.pop(request_id, None)

    async def closed(self) -> Ending:
        return await asyncio.shield(self.ending)

    async def stop(self) -> None:
        self.die(Ending("it was stopped"))

    def die(self, ending: Ending) -> None:
        if not self.ending.done():
            self.ending.set_result(ending)

    def turn(self, *, is_lost: bool) -> None:
        """Accept what was submitted and run a step; with ``is_lost`` no message of it arrives."""
        messages: list[Message] = []
        for command in self.submitted:
            for request in command.requests:
                answered = () if request.continuation is None else request.continuation.tokens
                assert list(answered) == [token_at(request, position) for position in range(len(answered))]
                if request.request_id not in self.dropped:
                    self.running[request.request_id] = (request, len(answered))
            messages.append(Reply(command.call))
        self.submitted.clear()
        outputs = []
        for request_id, (request, position) in list(self.running.items()):
            if request.prompt[0] == POISON:
                self.die(Ending("the device fell over"))
                return
            if position == 0:
                outputs.append(Output(request_id=request_id, prompt_logprobs=REPORT))
            position += 1
            is_last = position == request.sampling.max_tokens
            token = SampledToken(token_id=token_at(request, position - 1))
            finish = FinishReason.LENGTH if is_last else None
            outputs.append(Output(request_id=request_id, tokens=(token,), finish=finish))
            self.running[request_id] = (request, position)
            if is_last:
                del self.running[request_id]
        if not (is_lost or self.ending.done()):
            self.deliver([*messages, Turn(outputs, Observations())])


class World:
    """A fleet of fake engines, and the requests of clients."""

    def __init__(
        self,
        num_engines: int,
        max_resumes: int,
        max_deaths: int = 1000,
        router: Router | None = None,
        after_hang: bool = True,
    ) -> None:
        self.engines: list[FakeEngine] = []
        self.present: dict[int, FakeEngine] = {}
        self.cancelled: set[str] = set()

        def make(index: int) -> FakeEngine:
            self.present[index] = FakeEngine(cancelled=self.cancelled)
            self.engines.append(self.present[index])
            return self.present[index]

        self.fleet = Fleet(
            [lambda index=index: make(index) for index in range(num_engines)],  # type: ignore[misc]
            served_name="base",
            observe=lambda observed: None,
            policy=FleetPolicy(
                restarts=RestartPolicy(max_deaths=max_deaths, first_pause_s=0.0, max_pause_s=0.0),
                make_router=None if router is None else lambda ranks: router,
                resumes=ResumePolicy(max_resumes=max_resumes, after_hang=after_hang, seed=7),
            ),
        )
        self.clients: dict[str, asyncio.Task[list[int]]] = {}
        self.requests: dict[str, Request] = {}
        self.got: dict[str, list[int]] = {}
        self.num_reports: dict[str, int] = {}

    def ask(self, num_tokens: int, prompt: int = 1) -> str:
        request_id = f"r{len(self.clients)}"
        sampling = SamplingParams(max_tokens=num_tokens, seed=None)
        self.requests[request_id] = Request(request_id=request_id, prompt=(prompt,), model="base", sampling=sampling)
        self.got[request_id] = []
        self.num_reports[request_id] = 0
        self.clients[request_id] = asyncio.create_task(self._client(request_id))
        return request_id

    def cancel(self, request_id: str) -> None:
        """The client leaves."""
        if not self.clients[request_id].done():
            self.cancelled.add(request_id)
            self.requests.pop(request_id, None)
            self.fleet.requests.cancel([request_id])
            self.clients[request_id].cancel()

    async def _client(self, request_id: str) -> list[int]:
        got = self.got[request_id]
        try:
            stream = await self.fleet.requests.submit([self.requests[request_id]])
        except CapacityError:  # it came while no engine served
            self.requests.pop(request_id, None)
            return got

        def consume(outputs: list[Output]) -> None:
            for output in outputs:
                self.num_reports[request_id] += output.prompt_logprobs is not None
                got.extend(token.token_id for token in output.tokens)
                if output.finish is not None:
                    stream.close()

        await stream.deliver(consume)
        return got

    async def settle(self) -> None:
        """Let every callback run."""
        for _ in range(30):
            await asyncio.sleep(0)

    async def finish(self) -> None:
        """Let the engines work until every request has ended."""
        for _ in range(500):
            await self.settle()
            if all(client.done() for client in self.clients.values()):
                return
            for engine in self.present.values():
                engine.turn(is_lost=False)
        raise AssertionError("requests are left")

    def check(self, request_id: str) -> ManyloraError | None:
        """Check the tokens of a request that has ended: a beginning of the answer, all of it without an error."""
        request, got, client = self.requests[request_id], self.got[request_id], self.clients[request_id]
        error = client.exception()
        assert error is None or isinstance(error, ManyloraError), error
        assert self.num_reports[request_id] == bool(got), "the prompt is reported once, with the first token"
        first = got[0] if got else 0
        assert got == [(first + 31 * position) % 100_000 for position in range(len(got))]
        assert (len(got) == request.sampling.max_tokens) == (error is None)
        return error


def play(num_engines: int, max_resumes: int, scenario: Callable[[World], object], **options: Any) -> None:
    async def main() -> None:
        world = World(num_engines, max_resumes, **options)
        await world.fleet.start()
        keeping = asyncio.create_task(world.fleet.run())
        try:
            await scenario(world)  # type: ignore[misc]
        finally:
            keeping.cancel()
            await world.fleet.stop()
            await asyncio.gather(keeping, *world.clients.values(), return_exceptions=True)

    logging.disable()  # of many deaths
    try:
        asyncio.run(main())
    finally:
        logging.disable(logging.NOTSET)


ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 6)),
    st.tuples(st.just("turn"), st.integers(0, 2)),
    st.tuples(st.just("lost turn"), st.integers(0, 2)),
    st.tuples(st.just("kill"), st.integers(0, 2)),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("fault"), st.integers(0, 2)),
    st.tuples(st.just("settle"), st.just(0)),
    st.tuples(st.just("pause"), st.just(0)),
)


async def act(world: World, action: tuple[str, int]) -> None:
    kind, value = action
    engine = world.present[value % len(world.present)]
    match kind:
        case "ask":
            world.ask(value)
        case "turn":
            engine.turn(is_lost=False)
        case "lost turn":  # tokens on their way when the engine dies
            engine.turn(is_lost=True)
            engine.die(Ending("killed", is_external=True))
        case "kill":
            engine.die(Ending("killed", is_external=True))
        case "fault":
            engine.die(Ending("the device fell over"))
        case "cancel":
            if world.clients:
                world.cancel(f"r{value % len(world.clients)}")
        case "settle":
            await world.settle()
        case "pause":
            await asyncio.sleep(0)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.lists(ACTIONS.filter(lambda action: action[0] != "fault"), max_size=40))
def test_engines_killed_from_outside_lose_and_double_no_token(num_engines: int, actions: list[tuple[str, int]]) -> None:
    async def scenario(world: World) -> None:
        for action in actions:
            await act(world, action)
        await world.finish()
        assert [world.check(request_id) for request_id in world.requests] == [None] * len(world.requests)
        assert world.fleet.resumes.num_waiting == world.fleet.resumes.num_ended == 0
        assert not any(engine.revived for engine in world.engines), "a request came back after its client had left"

    play(num_engines, 10**6, scenario)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.lists(ACTIONS, max_size=40))
def test_a_request_ends_early_only_after_two_faults_and_never_with_wrong_tokens(
    num_engines: int, actions: list[tuple[str, int]]
) -> None:
    async def scenario(world: World) -> None:
        for action in actions:
            await act(world, action)
        await world.finish()
        errors = [world.check(request_id) for request_id in world.requests]
        assert all(error is None or isinstance(error, PoisonRequest) for error in errors)
        if sum(kind == "fault" for kind, _ in actions) < 2:
            assert not any(errors)

    play(num_engines, 10**6, scenario)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(1, 6), max_size=12), st.integers(0, 12))
def test_a_poisonous_request_ends_and_every_other_is_answered(
    num_engines: int, lengths: list[int], before: int
) -> None:
    """All arrive at once, so all are under suspicion at the first death; the second finds the one to blame."""

    async def scenario(world: World) -> None:
        others = [world.ask(length) for length in lengths[:before]]
        poison = world.ask(5, prompt=POISON)
        others += [world.ask(length) for length in lengths[before:]]
        await world.finish()
        assert isinstance(world.check(poison), PoisonRequest)
        assert [world.check(other) for other in others] == [None] * len(others)
        assert world.fleet.engines.num_restarts == len(world.engines) - num_engines == 2

    play(num_engines, 3, scenario)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_poison_ends_no_engine_that_answers_other_requests(num_engines: int) -> None:
    async def scenario(world: World) -> None:
        for _ in range(6):
            others = [world.ask(2) for _ in range(4)]
            await world.finish()
            assert [world.check(other) for other in others] == [None] * 4
            poison = world.ask(2, prompt=POISON)
            await world.finish()
            assert isinstance(world.check(poison), PoisonRequest)

    play(num_engines, 3, scenario, max_deaths=4)


def test_an_engine_that_answers_nothing_is_given_up() -> None:
    """If every request of an engine looks like poison, it is the engine that is broken."""

    async def scenario(world: World) -> None:
        for _ in range(3):
            world.ask(2, prompt=POISON)
            await world.settle()
            for _ in range(2):
                world.present[0].turn(is_lost=False)
                await world.settle()
        assert world.fleet.engines.state is EngineState.STOPPED

    play(1, 3, scenario, max_deaths=4)


async def hang(world: World, index: int) -> None:
    """Let the watchdog end an engine."""
    client = world.fleet.engines.keepers[index].client
    assert client is not None
    client.lose(EngineLoss(EngineDead("it hangs"), is_hang=True))
    world.present[index].die(Ending("it was killed", is_external=True))
    await world.settle()


def test_requests_that_came_after_a_hang_go_on_together() -> None:
    async def scenario(world: World) -> None:
        early = world.ask(3)
        await world.settle()
        hung = world.present[0]
        hung.deliver([Reply(hung.submitted.pop().call)])  # accepted, and then nothing more
        late = [world.ask(3) for _ in range(5)]
        await world.settle()
        await hang(world, 0)
        sent = [one.request_id for command in world.present[0].submitted for one in command.requests]
        assert sent == [*late, early], "all at once; the one that had been accepted is a suspect, and comes last"
        await world.finish()
        assert [world.check(one) for one in (early, *late)] == [None] * 6

    play(1, 3, scenario)


def test_a_request_that_hangs_engines_before_they_accept_it_ends() -> None:
    async def scenario(world: World) -> None:
        poison = world.ask(3)
        await world.settle()
        for _ in range(3):
            assert not world.clients[poison].done()
            await hang(world, 0)
        assert isinstance(world.check(poison), PoisonRequest)

    play(1, 10**6, scenario)


def test_without_resumption_after_hangs_callers_are_asked_to_try_again() -> None:
    async def scenario(world: World) -> None:
        accepted = world.ask(3)
        await world.settle()
        hung = world.present[0]
        hung.deliver([Reply(hung.submitted.pop().call)])
        late = world.ask(3)
        await world.settle()
        await hang(world, 0)
        error = world.check(accepted)
        assert isinstance(error, CapacityError)
        assert (error.status, str(error), error.retry_after_s > 0) == (503, "'base': it hangs", True)
        assert late not in world.requests  # its submission got a CapacityError
        again = world.ask(3)
        await world.finish()
        assert world.check(again) is None

    play(1, 3, scenario, after_hang=False)


def test_a_request_goes_on_so_many_times() -> None:
    async def scenario(world: World) -> None:
        request = world.ask(50)
        for _ in range(3):
            await world.settle()
            world.present[0].turn(is_lost=False)
            world.present[0].die(Ending("killed", is_external=True))
        await world.settle()
        error = world.check(request)
        assert isinstance(error, EngineDead)
        assert "may lose 2" in str(error)
        assert (world.fleet.resumes.num_resumes, world.fleet.resumes.num_resumed) == (2, 1)

    play(1, 2, scenario)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(0, 30), st.integers(0, 12))
def test_a_request_that_is_cancelled_after_it_was_sent_on_does_not_come_back(
    num_engines: int, before: int, after: int
) -> None:
    """Its next engine hangs, accepts nothing, and dies; the client leaves in any turn of the loop around that."""

    async def scenario(world: World) -> None:
        left, stays = world.ask(50), world.ask(2)
        await world.settle()
        for engine in world.present.values():
            engine.turn(is_lost=False)
        for num_turns in (before, after):
            for engine in list(world.present.values()):
                engine.die(Ending("killed", is_external=True))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            world.cancel(left)
        await world.finish()
        assert world.check(stays) is None
        assert not any(engine.revived for engine in world.engines)

    play(num_engines, 10, scenario)


def test_a_cancelled_request_does_not_come_back() -> None:
    async def scenario(world: World) -> None:
        request = world.ask(50)
        await world.settle()
        world.present[0].turn(is_lost=False)
        world.present[0].die(Ending("killed", is_external=True))
        await asyncio.sleep(0)
        world.fleet.requests.cancel([request])
        world.clients[request].cancel()
        await world.settle()
        world.present[0].turn(is_lost=False)
        assert not world.present[0].running
        assert world.fleet.resumes.num_waiting == 0

    play(1, 3, scenario)


def test_a_request_that_was_refused_with_another_does_not_come_back_when_its_engine_dies() -> None:
    async def scenario(world: World) -> None:
        asked = [Request(request_id=name, prompt=(1,), model="base") for name in ("first", "second")]
        submission = asyncio.create_task(world.fleet.requests.submit(asked))
        await world.settle()
        one, other = world.present[0], world.present[1]
        refused, waiting = one.submitted.pop(), other.submitted[0]
        assert len(refused.requests) == len(waiting.requests) == 1
        one.deliver([Reply(refused.call, Fault.of(CapacityError("full")))])
        other.die(Ending("killed", is_external=True))  # in the same turn of the loop, before its answer
        await world.settle()
        assert isinstance(submission.exception(), CapacityError)
        assert world.fleet.resumes.num_resumes == world.fleet.resumes.num_waiting == 0
        assert not any(engine.submitted for engine in world.present.values())

    play(2, 3, scenario)


def test_a_request_that_its_next_engine_has_not_answered_ends_with_the_fleet() -> None:
    async def scenario(world: World) -> None:
        request = world.ask(5)
        await world.settle()
        world.present[0].turn(is_lost=False)
        world.present[0].die(Ending("killed", is_external=True))
        await world.settle()
        assert world.present[0].submitted, "it was sent on"
        await world.fleet.stop()
        await world.settle()
        assert isinstance(world.check(request), EngineDead)

    play(1, 3, scenario)


def test_a_full_engine_gets_no_request_while_another_has_room() -> None:
    async def scenario(world: World) -> None:
        first = world.ask(5)
        await world.settle()
        world.present[0].turn(is_lost=False)
        world.present[0].deliver([Turn([], Observations(), EngineRoom(0, Fault.of(CapacityError("full"))))])
        second = world.ask(5)
        await world.settle()
        assert [one.request_id for command in world.present[1].submitted for one in command.requests] == [second]
        world.fleet.requests.check_room()
        world.present[1].turn(is_lost=False)
        world.present[1].deliver([Turn([], Observations(), EngineRoom(0, Fault.of(CapacityError("full"))))])
        with pytest.raises(CapacityError, match="full"):
            world.fleet.requests.check_room()
        third = world.ask(5)  # the engines know better: by now one may have room
        await world.settle()
        assert world.present[0].submitted
        await world.finish()
        assert [world.check(one) for one in (first, second, third)] == [None] * 3

    play(2, 3, scenario, router=FirstFitRouter(100))
