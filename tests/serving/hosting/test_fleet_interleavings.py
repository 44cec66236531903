"""A fleet of two engines under loads, publications, unloads, kills and drains in any order, read all the time.

The engines are real, on threads, with a simulated device. No loop ends that was not killed. A request ends early only
if its adapter was unloaded: a version that was replaced outlives kills until its last answer has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from dataclasses import replace
from functools import partial

import pytest
from harness import small_base, version
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manylora.core.clock import Clock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.errors import AdapterError, AdapterReplaced, CapacityError, EngineDead, ModelNotFound, RequestError
from manylora.core.plan import PlannedSequence
from manylora.core.ports import EngineParts, check_each
from manylora.core.routing.policies import LeastLoadedRouter
from manylora.core.types import AdapterVersion, Output, Request, SampledToken, SamplingParams
from manylora.lab.costs.model import FixedCost
from manylora.lab.sim.run.executor import SimulatedExecutor
from manylora.serving.hosting.fleet.fleet import Fleet, FleetPolicy
from manylora.serving.hosting.fleet.fleet_versions import PublicationTerms
from manylora.serving.hosting.fleet.keeper import EngineState, RestartPolicy
from manylora.serving.hosting.fleet.resumption import ResumePolicy
from manylora.serving.hosting.fleet.versions import VersionTerms
from manylora.serving.hosting.links.client import EngineClient
from manylora.serving.hosting.links.thread import ThreadLink
from manylora.serving.hosting.protocol import Ending, EngineSpec

NAME = "x"
CONTENTS = {"": 0, "m": 100, "n": 200}
"""The first token of an answer, by the content of its adapter; each further one is one more."""
NUM_TOKENS = 120
PATIENCE_S = 60.0


class Reader:
    """Reads adapters whose paths are their contents."""

    def read(self, name: str, path: str) -> AdapterVersion:
        return version(path)

    def check(self, adapters: list[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        return check_each(self.read, adapters)


def count_on(part: PlannedSequence) -> SampledToken:
    position = part.start + part.num_tokens - part.num_prompt_tokens
    return SampledToken(token_id=CONTENTS[part.adapter or ""] + position)


def counting_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    return EngineParts(
        base=small_base(),
        num_pages=512,
        executor=SimulatedExecutor(FixedCost(step_s=0.001, token_s=0.0), vocab_size=1000, choose=count_on),
        reader=Reader(),  # type: ignore[arg-type]
        close=lambda: None,
    )


class KillableLink(ThreadLink):
    """A link to an engine in a thread, which may be killed from outside."""

    def __init__(self, engine: EngineSpec, ends: list[str]) -> None:
        super().__init__(engine)
        self._ends = ends
        self._is_killed = False

    def kill(self) -> None:
        self._is_killed = True
        assert self._service is not None
        self._service.stop()

    async def closed(self) -> Ending:
        ending = await super().closed()
        if not self._is_killed:
            self._ends.append(ending.reason)
        return Ending(ending.reason, is_external=self._is_killed)

    async def stop(self) -> None:
        self.kill()
        await super().stop()


class World:
    """A fleet of two, its clients, and what they may see."""

    def __init__(self) -> None:
        self.ends: list[str] = []  # of engines that were not killed
        self.links: dict[int, KillableLink] = {}
        self.answers: list[asyncio.Task[str]] = []
        self.num_unloads = 0
        self.latest = 0  # the highest version that an answer has had
        spec = EngineSpec(
            config=EngineConfig(model=ModelConfig(model="none"), memory=MemoryConfig(num_pages=512)),
            served_name="base",
            builder=counting_parts,
        )

        def make(index: int) -> KillableLink:
            self.links[index] = KillableLink(spec, self.ends)
            return self.links[index]

        self.fleet = Fleet(
            [partial(make, index) for index in range(2)],
            served_name="base",
            observe=lambda observed: None,
            policy=FleetPolicy(
                restarts=RestartPolicy(max_deaths=1000, first_pause_s=0.0, max_pause_s=0.0),
                make_router=lambda ranks: LeastLoadedRouter(),
                resumes=ResumePolicy(max_resumes=1000, max_wait_s=PATIENCE_S),
            ),
        )

    async def act(self, kind: str, value: int) -> None:
        if kind == "ask":
            model = ("base", NAME, NAME, f"{NAME}@{value}")[value % 4]
            self.answers += [asyncio.create_task(self.answer(model)) for _ in range(4)]
        elif kind in ("load", "publish", "unload"):
            self.num_unloads += kind == "unload"
            with contextlib.suppress(AdapterError, CapacityError, EngineDead):
                if kind == "load":
                    await self.fleet.adapters.load(NAME, "mn"[value % 2], replace_existing=True)
                elif kind == "publish":
                    lease = VersionTerms(keep=value % 3, ttl_s=None if value % 2 else 0.01)
                    terms = PublicationTerms(lease=lease, is_preloaded=value % 3 == 1, is_settled=value % 4 == 0)
                    await self.fleet.adapters.publish(NAME, "mn"[value % 2], terms)
                else:
                    await self.fleet.adapters.unload(NAME)
        elif kind == "pin":
            with contextlib.suppress(AdapterError, CapacityError, EngineDead):
                await self.fleet.adapters.pin(NAME if value % 3 else f"{NAME}@{value}", value % 2 == 0)
        elif kind == "kill":
            self.links[value % 2].kill()
        elif kind == "drain":
            with contextlib.suppress(RequestError, CapacityError, EngineDead):
                await self.fleet.engines.drain_replica(value % 2, 0.001 * value)
        else:
            await asyncio.sleep(0.002 * value)

    async def read(self) -> None:
        """Read the state of each engine as every route does, at once; one that is killed meanwhile does not answer."""

        async def read_one(client: EngineClient, num: int | None, only_in_use: bool, name: str | None) -> None:
            with contextlib.suppress(EngineDead):
                await client.snapshot(num, only_in_use=only_in_use, name=name)

        ways = [(None, False, None), (None, True, None), (1, False, None), (None, False, NAME)]
        with contextlib.suppress(CapacityError):
            clients = self.fleet.engines.serving().values()
            await asyncio.gather(*(read_one(client, *way) for client, way in itertools.product(clients, ways)))

    async def check_names(self) -> None:
        """Check that each engine has the names of the fleet, for the same versions, pinned alike."""
        adapters = self.fleet.adapters
        await adapters.versions.settled(NAME)
        current = adapters.find(NAME)
        wanted = {} if current is None else {NAME: (current.key, adapters.loaded[NAME].is_pinned)}
        for client in self.fleet.engines.serving().values():
            _, statuses = await client.snapshot()
            assert {one.name: (one.version.key, one.is_pinned) for one in statuses} == wanted

    async def num_versions(self) -> set[int]:
        """Return how many versions each engine holds."""
        await asyncio.sleep(0)
        stats = [(await client.snapshot(0))[0] for client in self.fleet.engines.serving().values()]
        return {one.num_resident + one.num_only_host + one.num_only_disk for one in stats}

    async def answer(self, model: str) -> str:
        """Ask for an answer and check it; return its end."""
        unloads = self.num_unloads
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
        request = Request(request_id=f"{id(asyncio.current_task())}", prompt=(1,), model=model, sampling=sampling)
        if (version := self.fleet.adapters.take(model)) is not None:
            request = replace(request, model=version.name, version=version.key)
            if model == NAME:
                assert version.number >= self.latest or unloads, "its name went back"
                self.latest = version.number
        try:
            return await self.answer_to(request, unloads)
        finally:
            if version is not None:
                self.fleet.adapters.give(version)

    async def answer_to(self, request: Request, unloads: int) -> str:
        """Check the answer to a request; return its end."""
        model = request.model
        got: list[int] = []

        def consume(outputs: list[Output]) -> None:
            for output in outputs:
                got.extend(token.token_id for token in output.tokens)
                if output.finish is not None:
                    stream.close()

        try:
            stream = await self.fleet.requests.submit([request])
            await stream.deliver(consume)
        except CapacityError:
            assert not got
            return "no engine serves"
        except ModelNotFound:
            assert model != "base" and not got
            assert request.version is None or self.num_unloads > unloads, "its version was held"
            return "unknown"
        except AdapterReplaced:
            assert self.num_unloads > unloads, "its version was held"
            return "replaced"
        if request.version is not None:
            assert got[0] == CONTENTS[request.version]
        assert got[0] in ((CONTENTS["m"], CONTENTS["n"]) if model != "base" else (CONTENTS[""],))
        assert got == list(range(got[0], got[0] + NUM_TOKENS))
        return "whole"


KINDS = ("ask", "ask", "ask", "load", "publish", "publish", "pin", "unload", "kill", "drain", "pause", "pause")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@example([("ask", 1), ("pause", 9), ("unload", 0), ("kill", 0), ("pause", 9), ("pause", 9)])  # a version without names
@example([("pin", 2), ("publish", 1), ("pin", 1), ("pause", 1)])  # unpinned before the engines' names have moved
@example([("ask", 1), ("publish", 1), ("unload", 0), ("pause", 1)])  # unloaded before
@example([("publish", 1), ("publish", 6), ("kill", 0), ("publish", 1), ("publish", 6)])  # published again before
@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 11)), min_size=4, max_size=24))
def test_no_loop_ends_and_no_answer_is_lost_that_need_not_be(actions: list[tuple[str, int]]) -> None:
    async def main() -> None:
        world = World()
        await world.fleet.start()
        keeping = asyncio.create_task(world.fleet.run())
        try:
            await world.fleet.adapters.load(NAME, "m")
            for action in actions:
                await world.act(*action)
                await world.read()
                assert not keeping.done()
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*world.answers)
                while world.fleet.engines.state is not EngineState.SERVING:
                    await asyncio.sleep(0.001)
                await world.check_names()
                assert await world.answer("base") == "whole"
                await world.read()
                await world.fleet.adapters.publish(NAME, "m", PublicationTerms(lease=VersionTerms(keep=0)))
                while len(world.fleet.adapters.versions_of(NAME)) > 1:
                    await asyncio.sleep(0.001)
                assert await world.num_versions() == {1}, "the engines hold no version but the current one"
            assert not world.ends
        finally:
            keeping.cancel()
            await world.fleet.stop()
            await asyncio.gather(keeping, *world.answers, return_exceptions=True)

    logging.disable()  # of many deaths
    try:
        asyncio.run(main())
    finally:
        logging.disable(logging.NOTSET)
