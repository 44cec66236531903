"""A fleet that scales: engines start and drain by the load, and no answer is lost or doubled on the way."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import httpx
import pytest
import zmq
from reciter import engine_config, slow_reciter_parts
from serving import PATIENCE_S, texts, until

from manylora.core.clock import Clock
from manylora.core.config import EngineConfig, ServerConfig
from manylora.core.errors import ConfigError, EngineDead
from manylora.core.plan import StepPlan
from manylora.core.ports import EngineParts
from manylora.core.scaling.autoscaler import ScalingPolicy
from manylora.core.server_config import FleetConfig
from manylora.core.types import Request, SamplingParams
from manylora.lab.sim.run.executor import SimulatedWork
from manylora.serving.hosting.fleet.fleet import Fleet, FleetPolicy
from manylora.serving.hosting.fleet.keeper import EngineState, RestartPolicy
from manylora.serving.hosting.fleet.resumption import ResumePolicy
from manylora.serving.hosting.links.base_share import BaseShare
from manylora.serving.hosting.links.link import LINKS
from manylora.serving.hosting.links.thread import ThreadLink
from manylora.serving.hosting.protocol import EngineSpec, Message
from manylora.serving.server import BackgroundServer

POLICY = ScalingPolicy(
    min_replicas=1,
    max_replicas=3,
    capacity_rps=2.0,
    start_s=0.2,
    look_every_s=0.05,
    stay_starts=1.0,
    least_stay_s=0.0,
)


def make_fleet(
    tokenizer: Path,
    policy: ScalingPolicy = POLICY,
    build: object = slow_reciter_parts,
    max_deaths: int = 6,
    num_devices: int = 1,
) -> Fleet:
    """Return a fleet of thread engines; ``build`` builds each of them, or is a builder for each."""
    builds = build if isinstance(build, list) else [build] * policy.max_replicas
    specs = [EngineSpec(config=engine_config(tokenizer), served_name="base", builder=one) for one in builds]
    return Fleet(
        [partial(LINKS["thread"], spec, BaseShare()) for spec in specs],
        served_name="base",
        observe=lambda observed: None,
        policy=FleetPolicy(
            restarts=RestartPolicy(max_deaths=max_deaths, first_pause_s=0.01, max_pause_s=0.01),
            resumes=ResumePolicy(),
            scaling=policy,
            num_devices=num_devices,
            drain_timeout_s=PATIENCE_S,
        ),
    )


async def answers(fleet: Fleet, num: int, num_tokens: int) -> list[str]:
    """Submit requests at once and return their answers."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    requests = [
        Request(request_id=f"{index}/{num}", prompt=(1,), model=("base", "a")[index % 2], sampling=sampling)
        for index in range(num)
    ]
    return await texts(await fleet.requests.submit(requests), requests)


def num(fleet: Fleet, state: EngineState) -> int:
    return sum(one.state is state for one in fleet.engines.replicas())


def test_engines_start_with_every_adapter_and_the_hottest_warm_and_drain_without_loss(
    tokenizer: Path, lora_dir: Path
) -> None:
    async def scenario() -> None:
        fleet = make_fleet(tokenizer)
        await fleet.start()
        assert (num(fleet, EngineState.SERVING), num(fleet, EngineState.IDLE)) == (1, 2)
        await fleet.adapters.load("a", str(lora_dir / "p"))
        running = asyncio.create_task(fleet.run())
        burst = asyncio.create_task(answers(fleet, 40, 20))
        await until(lambda: num(fleet, EngineState.SERVING) == 3)
        for client in fleet.engines.serving().values():
            stats, statuses = await client.snapshot()
            assert [status.name for status in statuses] == ["a"]
            assert stats.resident_adapters == ("a",)  # no request has come to the new ones
        later = asyncio.create_task(answers(fleet, 9, 20))
        both = [*await burst, *await later]
        assert {len(text) for text in both} == {20}
        await until(lambda: num(fleet, EngineState.IDLE) == 2 and num(fleet, EngineState.SERVING) == 1)
        assert fleet.scaling is not None and fleet.scaling.num_wanted == 1
        again = asyncio.create_task(answers(fleet, 41, 5))  # a place is used again
        await until(lambda: num(fleet, EngineState.SERVING) == 3)
        await again
        fleet.drain()
        await fleet.stop()
        running.cancel()

    asyncio.run(scenario())


def test_a_start_that_fails_is_tried_again_and_disturbs_no_other(
    tokenizer: Path, lora_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_built = num_started = 0
    start = ThreadLink.start

    async def start_if_there_is_room(link: ThreadLink, deliver: Callable[[Sequence[Message]], None]) -> None:
        nonlocal num_started
        num_started += 1
        if num_started in (2, 3):
            raise zmq.ZMQError(errno.EMFILE) if num_started == 2 else MemoryError
        await start(link, deliver)

    def build(config: EngineConfig, clock: Clock) -> EngineParts:
        nonlocal num_built
        num_built += 1
        if num_built in (2, 3):
            raise ConfigError("its memory is taken")
        return slow_reciter_parts(config, clock)

    monkeypatch.setattr(ThreadLink, "start", start_if_there_is_room)

    async def scenario() -> None:
        policy = ScalingPolicy(min_replicas=1, max_replicas=2, capacity_rps=1.0, start_s=0.2, look_every_s=0.05)
        fleet = make_fleet(tokenizer, policy, build)
        await fleet.start()
        await fleet.adapters.load("a", str(lora_dir / "p"))
        running = asyncio.create_task(fleet.run())
        burst = asyncio.create_task(answers(fleet, 30, 20))
        await until(lambda: num(fleet, EngineState.SERVING) == 2)
        assert (num_started, num_built) == (6, 4)
        assert {len(text) for text in await burst} == {20}
        await fleet.stop()
        running.cancel()

    asyncio.run(scenario())


def test_the_only_engine_dies_while_scaling_starts_another(tokenizer: Path, lora_dir: Path) -> None:
    """It is tried again for as long as the other may come, and the fleet goes on."""
    may_start, is_deadly, num_built = threading.Event(), threading.Event(), 0

    def build(config: EngineConfig, clock: Clock) -> EngineParts:
        nonlocal num_built
        num_built += 1
        if num_built == 2:
            assert may_start.wait(PATIENCE_S)
        parts = slow_reciter_parts(config, clock)
        launch = parts.executor.launch

        def launch_or_die(plan: StepPlan, now: float) -> SimulatedWork:
            if is_deadly.is_set():
                is_deadly.clear()
                raise RuntimeError("the device fell over")
            return launch(plan, now)  # type: ignore[return-value]

        parts.executor.launch = launch_or_die  # type: ignore[method-assign]
        return parts

    async def scenario() -> None:
        policy = ScalingPolicy(min_replicas=1, max_replicas=2, capacity_rps=1.0, start_s=0.2, look_every_s=0.05)
        fleet = make_fleet(tokenizer, policy, build, max_deaths=1)
        await fleet.start()
        await fleet.adapters.load("a", str(lora_dir / "p"))
        running = asyncio.create_task(fleet.run())
        burst = asyncio.create_task(answers(fleet, 30, 20))
        try:
            await until(lambda: num_built == 2)
            is_deadly.set()
            await until(lambda: fleet.engines.num_restarts == 1)
            may_start.set()
            await until(lambda: num(fleet, EngineState.SERVING) == 2)
            assert {len(text) for text in await burst} == {20}
            assert not running.done()
        finally:
            may_start.set()
            await fleet.stop()
        await running

    asyncio.run(scenario())


def test_another_engine_takes_the_place_of_one_that_fails_for_good(tokenizer: Path) -> None:
    """One of three devices is broken: the fleet has two engines all the same."""
    may_start = threading.Event()

    def build_on_broken(config: EngineConfig, clock: Clock) -> EngineParts:
        if not may_start.is_set():
            raise RuntimeError("the device fell over")
        return slow_reciter_parts(config, clock)

    async def scenario() -> None:
        policy = ScalingPolicy(
            min_replicas=2, max_replicas=3, capacity_rps=50.0, start_s=0.2, look_every_s=0.05, least_stay_s=0.0
        )
        fleet = make_fleet(tokenizer, policy, [slow_reciter_parts, build_on_broken, slow_reciter_parts], max_deaths=2)
        await fleet.start()
        running = asyncio.create_task(fleet.run())
        states = [EngineState.SERVING, EngineState.RESTARTING, EngineState.SERVING]
        await until(lambda: [one.state for one in fleet.engines.replicas()] == states)
        may_start.set()  # it is repaired, and one of the three is too many
        await until(lambda: fleet.engines.replicas()[1].state is EngineState.SERVING)
        await until(lambda: num(fleet, EngineState.SERVING) == 2 and num(fleet, EngineState.IDLE) == 1)
        await fleet.stop()
        running.cancel()

    asyncio.run(scenario())


def test_the_first_engine_may_be_of_another_device(tokenizer: Path) -> None:
    """Two of three devices are broken at the start."""

    def build_on_broken(config: EngineConfig, clock: Clock) -> EngineParts:
        raise RuntimeError("the device fell over")

    async def scenario(num_devices: int) -> list[EngineState]:
        builds = [build_on_broken, build_on_broken, slow_reciter_parts]
        fleet = make_fleet(tokenizer, build=builds, num_devices=num_devices)
        try:
            await fleet.start()
            running = asyncio.create_task(fleet.run())
            assert await answers(fleet, 1, 5)
            running.cancel()
            return [one.state for one in fleet.engines.replicas()][2:]
        finally:
            await fleet.stop()

    assert asyncio.run(scenario(3)) == [EngineState.SERVING]
    with pytest.raises(EngineDead, match="the device fell over"):
        asyncio.run(scenario(2))


def test_scaling_is_shown_in_status_and_metrics(tokenizer: Path) -> None:
    config = ServerConfig(port=0, fleet=FleetConfig(min_replicas=1, max_replicas=2, replica_rate=50.0))
    with BackgroundServer(engine_config(tokenizer), config, [], builder="reciter:reciter_parts") as server:

        async def decided() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
                async with asyncio.timeout(PATIENCE_S):
                    while (await client.get("/status")).json()["scaling"] is None:
                        await asyncio.sleep(0.05)
                report = (await client.get("/status")).json()
                assert report["scaling"]["num_wanted"] == 1
                assert [row["index"] for row in report["replicas"]] == [0]
                text = (await client.get("/metrics")).text
                assert 'manylora_replicas{state="serving"} 1.0' in text
                assert 'manylora_replicas{state="idle"} 1.0' in text
                assert "manylora_replicas_wanted 1.0" in text
                assert 'manylora_engine_up{replica="0"} 1.0' in text

        asyncio.run(decided())


def test_a_fixed_number_and_bounds_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="bounds"):
        FleetConfig(replicas=2, max_replicas=4)
    with pytest.raises(ConfigError, match="min"):
        FleetConfig(min_replicas=2)
    assert FleetConfig(max_replicas=4).num_places == 4
