"""Several engines behind one face: requests are shared out, adapters are everywhere, and a death is felt by its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from reciter import ReciterReader, breaking_parts, engine_config, reciter_parts, slow_reciter_parts, write_reciter
from serving import PATIENCE_S, texts, until

from manylora.core.clock import Clock, WallClock
from manylora.core.config import EngineConfig
from manylora.core.errors import (
    AdapterError,
    AdapterExists,
    AdapterNotFound,
    CapacityError,
    EngineDead,
    ManyloraError,
    ModelNotFound,
)
from manylora.core.plan import StepPlan
from manylora.core.ports import EngineParts
from manylora.core.routing.policies import LeastLoadedRouter
from manylora.core.types import AdapterVersion, Request, SamplingParams, Tier
from manylora.lab.sim.run.executor import SimulatedWork
from manylora.serving.hosting.engine.service import BuildParts, EngineService
from manylora.serving.hosting.fleet.adapter_book import LoraModule
from manylora.serving.hosting.fleet.fleet import Fleet, FleetPolicy
from manylora.serving.hosting.fleet.fleet_versions import PublicationTerms
from manylora.serving.hosting.fleet.keeper import EngineState, RestartPolicy
from manylora.serving.hosting.fleet.snapshot import Snapshot, merge_snapshots
from manylora.serving.hosting.links.base_share import BaseShare
from manylora.serving.hosting.links.in_flight import OutputStream
from manylora.serving.hosting.links.link import LINKS
from manylora.serving.hosting.protocol import EngineSpec, Observations

DEADLY = 200
"""A prompt of this token breaks the device."""


def mortal_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Build an engine that recites, ten tokens a second, until it is asked for what kills it."""
    parts = slow_reciter_parts(config, clock)
    launch = parts.executor.launch

    def launch_or_die(plan: StepPlan, now: float) -> SimulatedWork:
        if any(part.tokens[0] == DEADLY for part in plan.sequences):
            raise RuntimeError("the device fell over")
        return launch(plan, now)  # type: ignore[return-value]

    parts.executor.launch = launch_or_die  # type: ignore[method-assign]
    return parts


class PickyReader(ReciterReader):
    """Reads what is not in ``refused``."""

    def __init__(self, refused: set[str]) -> None:
        self.refused = refused

    def read(self, name: str, path: str) -> AdapterVersion:
        if name.strip("@").partition("@")[0] in self.refused:  # versions are read under labels
            raise AdapterError(name, "its disk is gone")
        return super().read(name, path)


def picky_parts(config: EngineConfig, clock: Clock, *, refused: set[str]) -> EngineParts:
    return replace(reciter_parts(config, clock), reader=PickyReader(refused))


class Service:
    """A fleet, and what tests ask of it."""

    def __init__(self, tokenizer: Path, builders: Sequence[BuildParts], max_deaths: int = 6) -> None:
        config = engine_config(tokenizer)
        self.observed: list[Observations] = []
        self.fleet = Fleet(
            [
                partial(LINKS["thread"], EngineSpec(config=config, served_name="base", builder=build), BaseShare())
                for build in builders
            ],
            served_name="base",
            observe=self.observed.append,
            policy=FleetPolicy(
                restarts=RestartPolicy(max_deaths=max_deaths), make_router=lambda ranks: LeastLoadedRouter()
            ),
        )
        self._num_requests = 0

    def requests(self, *models: str, prompt: int = 1, num_tokens: int = 3) -> list[Request]:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        self._num_requests += len(models)
        return [
            Request(request_id=f"{self._num_requests}-{index}", prompt=(prompt,), model=model, sampling=sampling)
            for index, model in enumerate(models)
        ]

    async def answers(self, *models: str, num_tokens: int = 3) -> list[str]:
        requests = self.requests(*models, num_tokens=num_tokens)
        return await texts(await self.fleet.requests.submit(requests), requests)

    async def each(self) -> list[dict[str, bool]]:
        """Return, for each engine, which adapters it has and whether they are pinned."""
        clients = self.fleet.engines.serving().values()
        taken = [await client.snapshot() for client in clients]
        return [{status.name: status.is_pinned for status in statuses} for _, statuses in taken]

    async def snapshot(self, num_adapters: int | None = None) -> Snapshot:
        return merge_snapshots((await self.fleet.engines.snapshots(num_adapters)).values(), num_adapters)

    def under_way(self) -> list[int]:
        assert self.fleet._routing is not None
        return [view.num_requests for view in self.fleet._routing.dispatcher.views]


def run(
    tokenizer: Path,
    scenario: Callable[[Service], Coroutine[None, None, None]],
    builders: Sequence[BuildParts] = (reciter_parts,) * 3,
    modules: Sequence[LoraModule] = (),
    **options: int,
) -> None:
    async def main() -> None:
        service = Service(tokenizer, builders, **options)
        try:
            await service.fleet.start(modules)
            keeping = asyncio.create_task(service.fleet.run())
            await scenario(service)
            keeping.cancel()
        finally:
            await service.fleet.stop()

    asyncio.run(main())


def test_requests_are_shared_out_and_their_outputs_come_on_one_stream(tokenizer: Path, lora_dir: Path) -> None:
    async def scenario(service: Service) -> None:
        requests = service.requests("m", "base", "m", "base", "m", "base", num_tokens=200)
        stream = await service.fleet.requests.submit(requests)
        assert service.under_way() == [2, 2, 2]
        assert [text[:3] for text in await texts(stream, requests)] == ["mno", "abc"] * 3
        assert service.under_way() == [0, 0, 0]
        stats, (status,) = await service.snapshot()
        assert (stats.num_generated_tokens, stats.num_registered, stats.num_pages) == (1200, 1, 3 * 512)
        assert (status.name, status.num_requests, status.tier) == ("m", 3, Tier.DEVICE)
        assert [one.name for one in (await service.snapshot(1))[1]] == ["m"]

    run(tokenizer, scenario, modules=[LoraModule("m", str(lora_dir / "m"))])


def test_requests_are_added_all_or_none_or_each(tokenizer: Path) -> None:
    async def scenario(service: Service) -> None:
        with pytest.raises(ModelNotFound):
            await service.fleet.requests.submit(service.requests("base", "base", "nobody", "base"))
        assert service.under_way() == [0, 0, 0]
        await until(lambda: _is_idle(service))
        requests, stream = service.requests("base", "base", "nobody", "base"), OutputStream()
        refused = await service.fleet.requests.submit_each(requests, stream)
        assert list(refused) == [requests[2].request_id]
        assert isinstance(refused[requests[2].request_id], ModelNotFound)
        del requests[2]
        assert await texts(stream, requests) == ["abc"] * 3
        assert service.under_way() == [0, 0, 0]

    run(tokenizer, scenario)


def test_what_is_refused_together_is_not_counted(tokenizer: Path) -> None:
    async def scenario(service: Service) -> None:
        with pytest.raises(ModelNotFound):
            await service.fleet.requests.submit(service.requests("base", "base", "nobody"))
        assert await service.answers("base") == ["abc"]
        await until(lambda: _is_idle(service))
        finished = [request for observed in service.observed for request in observed.finished]
        assert [(one.reason, one.num_prompt_tokens, one.num_output_tokens) for one in finished] == [("length", 1, 3)]

    run(tokenizer, scenario, [reciter_parts])


def test_what_is_refused_together_is_counted_at_no_engine(tokenizer: Path) -> None:
    """Two engines of three have begun to answer when the third refuses."""

    async def scenario(service: Service) -> None:
        with pytest.raises(ModelNotFound):
            await service.fleet.requests.submit(service.requests("base", "base", "nobody", num_tokens=200))
        left = service.requests("base", num_tokens=200)
        await service.fleet.requests.submit(left)
        service.fleet.requests.cancel([left[0].request_id])
        await until(lambda: _is_idle(service))
        assert service.under_way() == [0, 0, 0]
        finished = [request for observed in service.observed for request in observed.finished]
        assert [one.reason for one in finished] == ["cancelled"], "a client that leaves is counted"

    run(tokenizer, scenario, [slow_reciter_parts] * 3)


async def _is_idle(service: Service) -> bool:
    stats, _ = await service.snapshot(0)
    return stats.num_running + stats.num_waiting == 0


def test_what_is_cancelled_is_cancelled_where_it_runs(tokenizer: Path) -> None:
    async def scenario(service: Service) -> None:
        requests = service.requests("base", "base", "base", num_tokens=200)
        await service.fleet.requests.submit(requests)
        service.fleet.requests.cancel([request.request_id for request in requests])
        assert service.under_way() == [0, 0, 0]
        await until(lambda: _is_idle(service))

    run(tokenizer, scenario, [slow_reciter_parts] * 3)


def test_adapters_are_the_same_on_all_engines(tokenizer: Path, lora_dir: Path) -> None:
    async def scenario(service: Service) -> None:
        adapters = service.fleet.adapters
        await adapters.load("p", str(lora_dir / "p"))
        assert (await adapters.pin("p", True)).is_pinned
        await adapters.warm("p")
        assert await service.each() == [{"p": True}] * 3
        with pytest.raises(AdapterExists):
            await adapters.load("p", str(lora_dir / "q"))
        assert (await adapters.load("p", str(lora_dir / "q"), replace_existing=True)).generation == 2
        assert await service.answers("p", "p", "p") == ["qrs"] * 3
        assert (list(adapters.loaded), adapters.loaded["p"].is_pinned) == (["p"], True)
        await adapters.unload("p")
        assert await service.each() == [{}] * 3
        for change in (adapters.unload, adapters.warm):
            with pytest.raises(AdapterNotFound):
                await change("p")

    run(tokenizer, scenario)


def test_a_change_of_a_name_that_is_still_moving_is_the_last(tokenizer: Path, lora_dir: Path) -> None:
    """A publication need not wait for the engines' own names: whatever comes next finds them moved."""
    unsettled = PublicationTerms(is_settled=False)

    async def scenario(service: Service) -> None:
        adapters = service.fleet.adapters
        await adapters.load("p", str(lora_dir / "p"))
        await adapters.pin("p", True)
        await adapters.publish("p", str(lora_dir / "q"), unsettled)
        await adapters.pin("p", False)
        assert await service.each() == [{"p": False}] * 3
        await adapters.publish("p", str(lora_dir / "p"), unsettled)
        await adapters.pin("p@3", True)
        assert await service.each() == [{"p": False}] * 3
        await adapters.publish("p", str(lora_dir / "q"), unsettled)
        await adapters.unload("p")
        await adapters.versions.settled("p")
        assert await service.each() == [{}] * 3

    run(tokenizer, scenario)


def test_a_load_that_fails_on_one_engine_is_undone_on_the_others(tokenizer: Path, lora_dir: Path) -> None:
    refused = {"p"}

    async def scenario(service: Service) -> None:
        adapters = service.fleet.adapters
        with pytest.raises(AdapterError, match=r"'p': engine 1 of 3: its disk is gone"):
            await adapters.load("p", str(lora_dir / "p"))
        assert await service.each() == [{}] * 3
        assert not adapters.loaded
        refused.clear()
        await adapters.load("p", str(lora_dir / "p"))
        refused.add("p")
        with pytest.raises(AdapterError, match="engine 1 of 3"):
            await adapters.load("p", str(lora_dir / "q"), replace_existing=True)
        assert await service.each() == [{"p": False}] * 3
        assert adapters.loaded["p"].path == str(lora_dir / "p")

    run(tokenizer, scenario, [reciter_parts, partial(picky_parts, refused=refused), reciter_parts])


def test_a_death_is_felt_by_the_requests_of_that_engine_alone(tokenizer: Path, lora_dir: Path) -> None:
    async def scenario(service: Service) -> None:
        fleet = service.fleet
        await fleet.adapters.pin("m", True)
        others = service.requests("m", num_tokens=12)  # on the first engine
        answers = asyncio.create_task(texts(await fleet.requests.submit(others), others))
        deadly = service.requests("base", prompt=DEADLY)  # on the second
        with pytest.raises(EngineDead, match="the device fell over"):
            await texts(await fleet.requests.submit(deadly), deadly)
        assert service.under_way() == [1, 0]
        await until(lambda: fleet.engines.num_restarts == 1)
        assert fleet.engines.state is EngineState.SERVING
        # While the second is away, the first takes all; a change in this time reaches the second when it is back.
        await fleet.adapters.load("p", str(lora_dir / "p"))
        assert await answers == ["mnopqrstuvwx"]
        await until(lambda: len(fleet.engines.serving()) == 2)
        assert await service.each() == [{"m": True, "p": False}] * 2
        assert await service.answers("p", "m", "p", "m") == ["pqr", "mno"] * 2

    run(tokenizer, scenario, [mortal_parts] * 2, modules=[LoraModule("m", str(lora_dir / "m"))])


def test_an_engine_that_dies_in_its_first_start_is_tried_again_if_another_came_up(tokenizer: Path) -> None:
    num_built = 0

    def flaky_parts(config: EngineConfig, clock: Clock) -> EngineParts:
        nonlocal num_built
        num_built += 1
        if num_built == 2:
            raise RuntimeError("it was killed")
        return reciter_parts(config, clock)

    async def scenario(service: Service) -> None:
        await until(lambda: len(service.fleet.engines.serving()) == 2)
        assert (service.fleet.engines.num_restarts, num_built) == (1, 3)
        assert await service.answers("base", "base") == ["abc", "abc"]

    run(tokenizer, scenario, [flaky_parts] * 2)
    with pytest.raises(EngineDead, match="before it was ready"):
        run(tokenizer, scenario, [breaking_parts] * 2)


def test_an_engine_that_serves_is_restarted_while_another_still_starts(tokenizer: Path) -> None:
    may_start = threading.Event()

    def late_parts(config: EngineConfig, clock: Clock) -> EngineParts:
        assert may_start.wait(PATIENCE_S)
        return reciter_parts(config, clock)

    async def main() -> None:
        service = Service(tokenizer, [mortal_parts, late_parts])
        fleet = service.fleet
        starting = asyncio.create_task(fleet.start())
        try:
            await until(lambda: fleet.engines.state is EngineState.SERVING)
            deadly = service.requests("base", prompt=DEADLY)
            with pytest.raises(EngineDead):
                await texts(await fleet.requests.submit(deadly), deadly)
            with pytest.raises(CapacityError, match="being restarted"):
                fleet.engines.serving()
            await until(lambda: fleet.engines.state is EngineState.SERVING)
            assert await service.answers("base") == ["abc"]
            assert fleet.engines.num_restarts == 1
            assert not starting.done()
        finally:
            may_start.set()
            await starting
            await fleet.stop()

    asyncio.run(main())


def test_engines_that_fail_are_left_out_until_there_is_none(tokenizer: Path) -> None:
    async def scenario(service: Service) -> None:
        fleet = service.fleet

        async def kill() -> None:
            deadly = service.requests("base", prompt=DEADLY)
            with pytest.raises(EngineDead):
                await texts(await fleet.requests.submit(deadly), deadly)

        keeping = asyncio.create_task(fleet.run())
        await kill()
        await until(lambda: len(fleet.engines.serving()) == 1)
        assert await service.answers("base", "base") == ["abc", "abc"]
        await kill()
        with pytest.raises(EngineDead, match="died 1 times in a row"):
            await asyncio.wait_for(keeping, PATIENCE_S)
        with pytest.raises(CapacityError):
            await fleet.requests.submit(service.requests("base"))

    async def main() -> None:
        service = Service(tokenizer, [mortal_parts] * 2, max_deaths=1)
        await service.fleet.start()
        await scenario(service)
        await service.fleet.stop()

    asyncio.run(main())


def test_an_adapter_that_an_engine_cannot_get_back_is_lost_for_all(tokenizer: Path, lora_dir: Path) -> None:
    own = write_reciter(lora_dir / "leaving", "x")

    async def scenario(service: Service) -> None:
        await service.fleet.adapters.load("x", str(own))
        (own / "adapter_config.json").unlink()
        deadly = service.requests("base", prompt=DEADLY)
        with pytest.raises(EngineDead):
            await texts(await service.fleet.requests.submit(deadly), deadly)
        await until(lambda: service.fleet.engines.num_restarts == 1 and len(service.fleet.engines.serving()) == 2)
        assert await service.each() == [{"m": False}] * 2

    run(tokenizer, scenario, [mortal_parts] * 2, modules=[LoraModule("m", str(lora_dir / "m"))])


def test_an_engine_without_a_reader_is_tried_again_and_loses_no_adapter(tokenizer: Path, lora_dir: Path) -> None:
    shortages = 0

    class ScarceReader(ReciterReader):
        def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
            nonlocal shortages
            if shortages:
                shortages -= 1
                raise CapacityError("no process could be started", status=503)
            return super().check(adapters)

    def scarce_parts(config: EngineConfig, clock: Clock) -> EngineParts:
        return replace(mortal_parts(config, clock), reader=ScarceReader())

    async def scenario(service: Service) -> None:
        nonlocal shortages
        shortages = 2
        deadly = service.requests("base", prompt=DEADLY)
        with pytest.raises(EngineDead):
            await texts(await service.fleet.requests.submit(deadly), deadly)
        await until(lambda: service.fleet.engines.num_restarts == 3 and len(service.fleet.engines.serving()) == 2)
        assert await service.each() == [{"m": False}] * 2

    run(tokenizer, scenario, [scarce_parts] * 2, modules=[LoraModule("m", str(lora_dir / "m"))])


def test_a_bad_adapter_at_the_start_is_an_error_where_it_is_required(tokenizer: Path, lora_dir: Path) -> None:
    builders = [reciter_parts, partial(picky_parts, refused={"n"})]
    modules = [LoraModule("m", str(lora_dir / "m")), LoraModule("n", str(lora_dir / "n"), is_required=False)]

    async def scenario(service: Service) -> None:
        assert await service.each() == [{"m": False}] * 2

    run(tokenizer, scenario, builders, modules)
    with pytest.raises(ManyloraError, match="'n': its disk is gone"):
        run(tokenizer, scenario, builders, [LoraModule("n", str(lora_dir / "n"))])


def test_a_fleet_drains(tokenizer: Path) -> None:
    async def scenario(service: Service) -> None:
        fleet = service.fleet
        with fleet.requests.in_progress.counted():
            requests = service.requests("base", "base", num_tokens=5)
            stream = await fleet.requests.submit(requests)
            fleet.drain()
            assert fleet.engines.state is EngineState.DRAINING
            with pytest.raises(CapacityError, match="shutting down"):
                await fleet.requests.submit(service.requests("base"))
            assert await texts(stream, requests) == ["abcde"] * 2
        await asyncio.wait_for(fleet.requests.in_progress.ended(), PATIENCE_S)

    run(tokenizer, scenario, [slow_reciter_parts] * 2)


def test_a_stop_that_comes_before_the_loop_is_not_lost(tokenizer: Path) -> None:
    def stopped_parts(config: EngineConfig, clock: Clock) -> EngineParts:
        service.stop()
        return reciter_parts(config, clock)

    engine = EngineSpec(config=engine_config(tokenizer), served_name="base", builder=stopped_parts)
    service = EngineService(engine, clock=WallClock(), send=lambda message: None)
    assert service.run()
