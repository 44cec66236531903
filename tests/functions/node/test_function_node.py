"""A node's functions without processes: waking, batches, memory, keep-alive, and the account of all of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from manylora.core.config import ModelConfig, ServerConfig
from manylora.core.errors import AdapterError, CapacityError, EngineDead, ManyloraError, ModelNotFound, RequestError
from manylora.core.isolation.confine import Measure
from manylora.core.types import Request
from manylora.functions.decisions.billing import PLATFORM, PriceList
from manylora.functions.decisions.offload import Held, Offload, choose_offload
from manylora.functions.deployment import BackboneSpec, FunctionSpec, NodeSpec
from manylora.functions.node import accounts as accounts_module
from manylora.functions.node import instance as instance_module
from manylora.functions.node import launch as launch_module
from manylora.functions.node import node as node_module
from manylora.functions.node import room as room_module
from manylora.functions.node.backbone_fleet import BackboneFleet
from manylora.functions.node.backbone_host import BackboneHost
from manylora.functions.node.instance import FunctionInstance, FunctionPhase
from manylora.functions.node.launch import Launcher, Timeouts
from manylora.functions.node.node import FunctionNode
from manylora.functions.node.readings import MemoryReading
from manylora.functions.node.room import NodeRoom
from manylora.serving.hosting.fleet.keeper import EngineState
from manylora.serving.hosting.fleet.resumption import ResumeStats
from manylora.serving.hosting.protocol import FinishedRequest, Observations, StartReport
from manylora.serving.metrics.status_report import FunctionState

NO_TIMEOUTS = Timeouts(hang_s=None, start_s=None)
PROCESS_BYTES = room_module.LEAST_BYTES


class Engine:
    """Stands for a function's engine: it holds requests until told."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.has_share = True
        self.num_in_flight = 0
        self.pid: int | None = None
        self.report: StartReport | None = None
        self.is_stopped = False
        self.error: ManyloraError | None = None
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self.keeping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fleet = SimpleNamespace(
            engines=SimpleNamespace(state=EngineState.SERVING, num_restarts=0),
            requests=SimpleNamespace(submit=self.submit),
            resumes=ResumeStats(),
        )

    def weigh(self, has_requests: bool) -> None:
        self.has_share = has_requests

    async def submit(self, requests: list[Request]) -> str:
        assert self.has_share
        self.submitted += [one.request_id for one in requests]
        self.num_in_flight += len(requests)
        return "stream"

    async def stop(self, error: ManyloraError) -> None:
        self.error = error
        await self.may_stop.wait()
        self.is_stopped = True
        self.keeping.cancel()


class Rig:
    """A node over a backbone that is always ready, and the engines that it starts."""

    def __init__(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        max_batch: int = 1,
        timeouts: Timeouts = NO_TIMEOUTS,
    ) -> None:
        self.engines: dict[str, Engine] = {}
        self.num_launches = 0
        self.error: Exception | None = None
        self.zygote_ends = 0
        self.cold_ends = 0  # zygotes that end before they are warm
        self.pid: int | None = None
        self.report: StartReport | None = None
        self.may_start = asyncio.Event()
        self.may_start.set()

        async def here(function: Callable[..., Any], *arguments: Any) -> Any:
            return function(*arguments)

        monkeypatch.setattr(asyncio, "to_thread", here)  # so that turns of the loop are all that a start waits for

        async def start_from(launcher: Launcher, zygote: object) -> Engine:
            name = launcher.name
            self.num_launches += 1
            await asyncio.sleep(0)
            await self.may_start.wait()
            if self.zygote_ends:
                self.zygote_ends -= 1
                self.zygote.pid += 1
                raise EngineDead("The zygote ended.")
            if self.error is not None:
                raise self.error
            self.engines[name] = Engine()
            self.engines[name].pid = self.pid
            self.engines[name].report = self.report
            return self.engines[name]

        self.zygote = SimpleNamespace(pid=1)

        async def ready(host: object) -> SimpleNamespace:
            if self.cold_ends:
                self.cold_ends -= 1
                raise EngineDead("The zygote ended.")
            return self.zygote

        monkeypatch.setattr(Launcher, "start_from", start_from)
        monkeypatch.setattr(BackboneHost, "ready", ready)
        self.node = FunctionNode(
            tmp_path,
            memory_bytes=4 * PROCESS_BYTES,
            parent_pipe=None,
            timeouts=timeouts,
        )
        self.spec = spec = FunctionSpec(
            backbone="base", adapter=str(tmp_path), max_batch=max_batch, slo_s=3600.0, kv_bytes=1, adapter_bytes=1
        )
        names = ("a", "b", "c", "d", "e")
        backbones = {"base": BackboneSpec(model=str(tmp_path))}
        self.node.configure(backbones, dict.fromkeys(names, spec), NodeSpec(keep_alive_s=0.0), ())

    def ask(self, name: str, request_id: str) -> asyncio.Task[Any]:
        return asyncio.create_task(self.node.functions[name].submit([Request(request_id=request_id, prompt=(1,))]))

    def finish(self, name: str) -> None:
        self.engines[name].num_in_flight = 0
        self.node.changed()

    def fleet(self) -> BackboneFleet:
        """Return the backbone as its clients see it, over a model of nine tokens."""
        model = Path(self.spec.adapter)
        (model / "config.json").write_text('{"vocab_size": 9}')
        return BackboneFleet("base", self.node, str(model))


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60.0))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_counters_do_not_go_back_as_functions_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        fleet = rig.fleet()
        for name, longest_pause_s in (("a", 2.0), ("b", 1.0)):
            await rig.ask(name, name)
            rig.engines[name].fleet.resumes = ResumeStats(
                num_resumes=3, num_resumed=2, num_ended=1, num_waiting=1, longest_pause_s=longest_pause_s
            )
        before = fleet.resumes
        assert (before.num_resumes, before.num_ended, before.longest_pause_s, before.num_waiting) == (6, 2, 2.0, 2)
        rig.finish("a")
        await rig.node.functions["a"].sleep("idle")
        assert fleet.resumes == replace(before, num_waiting=1)
        rig.node.configure({}, {}, NodeSpec(), ())
        await settle()
        assert fleet.resumes == replace(before, num_waiting=0)

    run(scenario)


def test_an_engine_keeps_its_number_as_other_functions_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        fleet = rig.fleet()
        rig.pid = 7
        await rig.ask("b", "1")

        def numbers() -> list[int]:
            return [one.index for one in fleet.replicas() if one.pid == 7]

        before = numbers()
        changed = structs.replace(rig.spec, max_batch=9)
        rig.node.configure({}, {"a": changed, "b": rig.spec}, NodeSpec(), ())
        assert numbers() == before == [1]
        assert [one.index for one in fleet.replicas()] == [1, 5]

    run(scenario)


def test_a_batch_waits_on_a_busy_device_until_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch, max_batch=3)
        for name in ("a", "b"):
            assert await rig.ask(name, "warm") == "stream"  # an idle device: at once
            rig.finish(name)
        assert await rig.ask("a", "a1") == "stream"
        assert await rig.ask("a", "a2") == "stream"  # it runs already: its next step takes it in
        waiting = [rig.ask("b", "b1"), rig.ask("b", "b2")]
        await settle()
        assert rig.engines["b"].submitted == ["warm"]
        assert waiting.pop().cancel()  # a client that leaves
        await settle()
        waiting += [rig.ask("b", "b3"), rig.ask("b", "b4")]
        assert await asyncio.gather(*waiting) == ["stream"] * 3
        assert sorted(rig.engines["b"].submitted) == ["b1", "b3", "b4", "warm"]
        rig.finish("b")
        late = rig.ask("b", "b5")
        await settle()
        assert not late.done()
        rig.finish("a")  # the device is idle: nothing to wait for
        assert await late == "stream"
        assert rig.num_launches == 2

    run(scenario)


def test_a_request_that_comes_as_its_function_is_put_to_sleep_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        assert await rig.ask("a", "1") == "stream"
        rig.finish("a")
        asked, sleeping = rig.ask("a", "2"), asyncio.create_task(rig.node.functions["a"].sleep("idle"))
        assert await asked == "stream"
        await sleeping
        assert rig.engines["a"].submitted == ["1", "2"] and not rig.engines["a"].is_stopped

    run(scenario)


def test_more_answers_than_may_wait_are_refused_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        function = rig.node.functions["a"]
        function.spec = structs.replace(rig.spec, max_waiting=2)
        with pytest.raises(RequestError, match="at most 2 of function 'a'"):
            await function.submit([Request(request_id=str(number), prompt=(1,)) for number in range(3)])
        rig.may_start.clear()
        waiting = [rig.ask("a", "1"), rig.ask("a", "2")]
        await settle()
        with pytest.raises(CapacityError, match="2 requests wait"):
            await rig.ask("a", "3")
        rig.may_start.set()
        assert await asyncio.gather(*waiting) == ["stream"] * 2

    run(scenario)


def test_a_function_that_took_all_memory_keeps_none_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that were never awake, by what a process takes, nor its own next process."""

    def take(num_bytes: int) -> None:
        monkeypatch.setattr(room_module, "memory_of", lambda *_: MemoryReading(1, num_bytes, 1))

    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        rig.pid = os.getpid()
        take(100 * PROCESS_BYTES)
        assert await rig.ask("a", "1") == "stream"
        assert rig.node.functions["a"].own_bytes == 100 * PROCESS_BYTES
        rig.finish("a")
        await rig.node.functions["a"].sleep("idle")
        take(2 * PROCESS_BYTES)
        assert await rig.ask("a", "2") == "stream"
        assert await rig.ask("b", "3") == "stream"
        rig.finish("a")
        assert await rig.ask("c", "4") == "stream"  # two processes of twice the least fill the node
        assert rig.node.functions["a"].phase is FunctionPhase.ASLEEP

    run(scenario)


def test_a_function_that_wakes_takes_the_memory_of_idle_ones_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        functions = rig.node.functions
        monkeypatch.setattr(FunctionInstance, "cold_start_s", 1.0)  # so that the rates decide
        for name in ("a", "b", "c", "d"):
            await rig.ask(name, name)
        rig.finish("b")
        await rig.ask("b", "again")
        rig.finish("b")
        rig.finish("d")  # used less than b
        assert await rig.ask("e", "e") == "stream"
        assert {name for name, one in functions.items() if one.phase is FunctionPhase.AWAKE} == {"a", "b", "c", "e"}
        assert rig.engines["d"].is_stopped

        monkeypatch.setattr(room_module, "MAX_WAIT_S", 3600.0)
        await rig.ask("b", "busy")
        waits = rig.ask("d", "d")
        await settle()
        assert not waits.done()  # all others run
        rig.finish("c")
        assert await waits == "stream"
        monkeypatch.setattr(room_module, "MAX_WAIT_S", 0.0)
        with pytest.raises(CapacityError, match="memory is in use: function 'c'"):
            await rig.ask("c", "c")
        rig.finish("a")
        monkeypatch.setattr(room_module, "MAX_WAIT_S", 3600.0)
        assert await rig.ask("c", "c") == "stream"

    run(scenario)


def test_a_failed_start_is_told_to_all_and_not_tried_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        rig.error = AdapterError("a", "its weights are broken")
        found = await asyncio.gather(rig.ask("a", "1"), rig.ask("a", "2"), return_exceptions=True)
        assert [(type(one), cast(CapacityError, one).status) for one in found] == 2 * [(CapacityError, 503)]
        with pytest.raises(CapacityError, match=r"Function 'a' cannot start: .*broken"):  # no fault of the caller
            await rig.ask("a", "3")
        assert rig.num_launches == 1
        monkeypatch.setattr(instance_module, "RETRY_AFTER_S", 0.0)
        rig.error = None
        assert await rig.ask("a", "4") == "stream"

    run(scenario)


def test_a_function_pays_for_being_held_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(node_module, "TICK_S", 0.0)
        used_ns = 1000
        monkeypatch.setattr(accounts_module, "cpu_ns", lambda _: used_ns)
        rig = Rig(tmp_path, monkeypatch)
        rig.pid = os.getpid()
        rig.may_start.clear()
        living = asyncio.create_task(rig.node.run())
        rig.node.configure({}, None, NodeSpec(keep_alive_s=0.0), ["process:a", "adapter:b"])
        await settle()
        assert rig.node.functions["a"].phase is FunctionPhase.WAKING
        rig.may_start.set()
        while rig.node.functions["a"].phase is not FunctionPhase.AWAKE:
            await asyncio.sleep(0)
        await settle()
        _, accounts = rig.node.take()
        own = {one.name: one.usage for one in accounts}["a"]  # its start as well
        assert own.idle_device_ns > 0 and own.cpu_ns == 1000
        used_ns = 1700
        await settle()
        _, accounts = rig.node.take()
        assert {one.name: one.usage for one in accounts}["a"].cpu_ns == 700  # it works without a request
        rig.node.configure({}, None, NodeSpec(keep_alive_s=0.0), ())
        while rig.node.functions["a"].phase is not FunctionPhase.ASLEEP:
            await asyncio.sleep(0)
        assert rig.num_launches == 1
        living.cancel()

    run(scenario)


def test_functions_are_kept_while_the_device_is_worth_its_rent_or_another_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(node_module, "TICK_S", 0.0)
        rig = Rig(tmp_path, monkeypatch)
        living = asyncio.create_task(rig.node.run())
        dear, cheap = PriceList(wait_s=1e9), PriceList(wait_s=1e-9, host_gb_s=0.0)
        rig.node.configure({}, None, NodeSpec(), (), dear)
        for name in ("a", "b"):
            await rig.ask(name, name)
        rig.finish("a")
        rig.finish("b")
        await settle()
        assert [rig.node.functions[name].phase for name in ("a", "b")] == [FunctionPhase.AWAKE] * 2
        rig.node.configure({}, None, NodeSpec(), (), cheap)
        await rig.ask("a", "2")
        await settle()
        assert rig.node.functions["b"].phase is FunctionPhase.AWAKE  # the one that runs pays for the device
        rig.finish("a")
        while any(rig.node.functions[name].phase is not FunctionPhase.ASLEEP for name in ("a", "b")):
            await asyncio.sleep(0)
        living.cancel()

    run(scenario)


def test_what_its_isolation_lacks_is_logged_once_and_stays_in_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report = StartReport(took_s={}, measures=(Measure("files", True), Measure("network", False, "no user\nnamespaces")))

    async def scenario() -> None:
        monkeypatch.setattr(node_module, "TICK_S", 0.0)
        rig = Rig(tmp_path, monkeypatch)
        rig.report = report
        living = asyncio.create_task(rig.node.run())
        function = rig.node.functions["a"]
        for number in range(2):
            await rig.ask("a", str(number))
            await settle()
            (state,) = [one for one in rig.node.states("base") if one.name == "a"]
            assert [(one.name, one.note) for one in state.missing] == [("network", "no user\nnamespaces")]
            rig.finish("a")
            while function.phase is not FunctionPhase.ASLEEP:
                await asyncio.sleep(0)
        living.cancel()

    run(scenario)
    told = [one.getMessage() for one in caplog.records if "function_isolation_missing" in one.getMessage()]
    assert told == ["function_isolation_missing name=a measures=network: 'no user\\nnamespaces'"]


def test_a_function_does_not_exist_for_keys_that_are_not_its_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        fleet = rig.fleet()
        caller = "key-" + hashlib.sha256(b"abc").hexdigest()[:12]
        spec = structs.replace(rig.node.functions["a"].spec, callers=(caller,))
        rig.node.configure({}, {"a": spec}, NodeSpec(), ())
        for name, tenant in (("a", ""), ("a", "key-0123456789ab"), ("b", caller), ("base", caller)):
            with pytest.raises(ModelNotFound):
                await fleet.submit([Request(request_id="r", prompt=(1,), model=name, tenant=tenant)])
        for name in ("a", "base:a"):
            assert await fleet.submit([Request(request_id="r", prompt=(1,), model=name, tenant=caller)]) == "stream"
        assert (fleet.info.vocab_size, list(fleet.adapters.loaded)) == (9, ["a"])
        hidden = {tenant: fleet.hidden_from(tenant) for tenant in (caller, "", "key-0123456789ab")}
        assert hidden == {caller: frozenset(), "": {"a"}, "key-0123456789ab": {"a"}}

    run(scenario)


def test_an_idle_function_sleeps_and_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(node_module, "TICK_S", 0.0)
        rig = Rig(tmp_path, monkeypatch)
        living = asyncio.create_task(rig.node.run())
        function = rig.node.functions["a"]
        await rig.ask("a", "1")
        await settle()
        assert function.phase is FunctionPhase.AWAKE  # a request is in progress
        rig.finish("a")
        while function.phase is not FunctionPhase.ASLEEP:
            await asyncio.sleep(0)
        taken, accounts = rig.node.take()
        used = {one.name: one.usage for one in accounts}
        assert used["a"].active_device_ns > 0
        times = sum(one.active_device_ns + one.idle_device_ns for one in used.values())
        assert times == taken.device_ns == taken.until_ns - taken.since_ns
        await settle()
        _, accounts = rig.node.take()
        assert [one.name for one in accounts] == [PLATFORM]
        living.cancel()

    run(scenario)


def test_a_function_without_requests_yields_the_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        await rig.ask("a", "1")
        engine = rig.engines["a"]
        assert engine.has_share
        rig.finish("a")
        assert not engine.has_share
        await rig.ask("a", "2")  # it has its share again before the engine gets the request
        assert engine.has_share

    run(scenario)


def test_files_that_are_read_ahead_may_be_of_any_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, mine = tmp_path / "pipe", tmp_path / "mine"
    for folder in (pipe, mine):
        folder.mkdir()
    os.mkfifo(pipe / "adapter_model.safetensors")
    (mine / "adapter_model.safetensors").write_bytes(b"weights")
    for number in range(3):  # there may be millions
        (mine / f"{number}.safetensors").write_bytes(b"other")
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *_: advised.append(os.fstat(file).st_size))
    reading = threading.Thread(target=node_module._read_ahead, args=([pipe, mine],), daemon=True)
    reading.start()
    reading.join(60.0)
    assert not reading.is_alive()  # a pipe without a writer would hold it for ever
    assert advised == [7]
    assert instance_module._bytes_of_weights(mine) == 7
    assert instance_module._bytes_of_weights(tmp_path) == 0


def test_a_zygote_that_ends_during_a_start_is_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        rig.zygote_ends, rig.cold_ends = 1, 1
        assert await rig.ask("a", "1") == "stream"
        assert rig.num_launches == 2
        rig.zygote_ends = 3
        with pytest.raises(CapacityError) as refused:
            await rig.ask("b", "1")
        assert refused.value.status == 503
        assert await rig.ask("b", "2") == "stream"  # it has not failed: no request waits five seconds
        rig.error = EngineDead("It died by itself.")
        with pytest.raises(EngineDead, match="by itself"):
            await rig.ask("c", "1")
        assert rig.num_launches == 7

    run(scenario)


def test_a_function_whose_adapter_changed_behind_a_death_starts_with_the_new_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        assert await rig.ask("a", "1") == "stream"
        first, function = rig.engines["a"], rig.node.functions["a"]
        function.observed(Observations(num_failed_loads=1))
        await settle()
        assert first.is_stopped and function.phase is FunctionPhase.ASLEEP
        assert await rig.ask("a", "2") == "stream"
        assert rig.engines["a"].submitted == ["2"]

    run(scenario)


def test_a_start_that_breaks_in_any_way_fails_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        rig.error = IndexError("no status")
        with pytest.raises(EngineDead, match="no status"):
            await rig.ask("a", "1")
        assert rig.node.functions["a"].phase is FunctionPhase.FAILED

    run(scenario)


def test_a_function_that_came_into_use_while_another_left_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        monkeypatch.setattr(FunctionInstance, "cold_start_s", 1.0)
        for name in ("a", "b", "c", "d"):
            await rig.ask(name, name)
            rig.finish(name)
        rig.node.functions["e"].own_bytes = 2 * PROCESS_BYTES  # two of them must leave
        hold = asyncio.Event()
        leaving: list[str] = []
        for name in ("a", "b", "c", "d"):
            stop = rig.engines[name].stop

            async def slow(error: ManyloraError, *, name: str = name, stop: Callable[..., Any] = stop) -> None:
                leaving.append(name)
                await hold.wait()
                await stop(error)

            rig.engines[name].stop = slow  # type: ignore[method-assign]
        waking = rig.ask("e", "e")
        await settle()
        assert len(leaving) == 1
        used = [name for name in ("a", "b", "c", "d") if name not in leaving]
        for name in used[:2]:
            await rig.ask(name, "again")
        hold.set()
        await asyncio.wait({waking}, timeout=0.0)
        await settle()
        assert not set(leaving) & set(used[:2])
        assert await waking == "stream"

    run(scenario)


def test_requests_of_a_function_that_is_removed_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        asked = rig.ask("a", "1")
        await asyncio.sleep(0)
        rig.node.configure({}, {}, NodeSpec(), ())
        with pytest.raises(CapacityError) as refused:
            await asked
        assert refused.value.status == 503

    run(scenario)


def test_memory_is_reserved_for_a_full_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        function = rig.node.functions["a"]
        assert rig.node.room.bytes_of(function) == PROCESS_BYTES
        function.spec = structs.replace(function.spec, kv_bytes=3 * PROCESS_BYTES)
        function.own_bytes = 1  # its pool is empty
        assert rig.node.room.bytes_of(function) == 3 * PROCESS_BYTES + 1
        function.own_bytes = 5 * PROCESS_BYTES
        assert rig.node.room.bytes_of(function) == 5 * PROCESS_BYTES

    run(scenario)


def test_a_start_is_charged_once_a_request_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        rig.may_start.clear()
        asked = rig.ask("a", "1")
        await settle()
        rig.node.take()
        await settle()
        _, accounts = rig.node.take()
        assert [(one.name, one.usage.idle_device_ns > 0) for one in accounts if one.name] == [("a", True)]
        rig.may_start.set()
        assert await asked == "stream"

    run(scenario)


def test_a_function_that_is_replaced_is_its_tenants_until_its_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        old, new = (structs.replace(rig.spec, tenant=tenant) for tenant in ("acme", "other"))
        node = NodeSpec(keep_alive_s=3600.0)
        rig.node.configure({}, {"a": old, "b": old}, node, ())
        await rig.ask("a", "1")
        first = rig.node.functions["a"]
        first.own_bytes = PROCESS_BYTES
        ended = FinishedRequest(adapter="a", reason="stop", num_prompt_tokens=3, num_output_tokens=2, e2e_s=1.0)
        first.observed(Observations(finished=[ended]))
        engine = rig.engines["a"]
        engine.may_stop.clear()
        rig.node.configure({}, {"a": new, "b": old}, node, ())
        assert await rig.ask("a", "2") == "stream"  # of the new one, while the other ends
        assert isinstance(engine.error, CapacityError)
        assert engine.error.status == 503
        assert rig.node.room.used_bytes == 2 * PROCESS_BYTES
        taken, accounts = rig.node.take()
        found = {(one.tenant, one.name): one for one in accounts if one.usage.active_device_ns or one.num_requests}
        assert {who: (one.num_requests, one.num_tokens) for who, one in found.items()} == {
            ("acme", "a"): (1, 5),
            ("other", "a"): (0, 0),
        }
        assert sum(one.usage.host_byte_ns for one in accounts) == taken.host_byte_ns
        await settle()
        _, accounts = rig.node.take()
        assert any(one.tenant == "acme" and one.usage.host_byte_ns for one in accounts)
        engine.may_stop.set()
        await settle()
        rig.node.take()
        await settle()
        _, accounts = rig.node.take()
        assert "acme" not in {one.tenant for one in accounts}
        assert rig.node.room.used_bytes == PROCESS_BYTES

    run(scenario)


def test_memory_of_a_function_that_ends_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        monkeypatch.setattr(room_module, "MAX_WAIT_S", 3600.0)
        for name in ("a", "b", "c", "d"):
            await rig.ask(name, name)
            rig.finish(name)
        rig.engines["a"].may_stop.clear()
        rig.node.configure({}, dict.fromkeys(("b", "c", "d", "e"), rig.spec), NodeSpec(keep_alive_s=0.0), ())
        await settle()
        asked = rig.ask("e", "e")
        await settle()
        assert not asked.done()
        rig.engines["a"].may_stop.set()
        assert await asked == "stream"
        assert not any(rig.engines[name].is_stopped for name in ("b", "c", "d"))

    run(scenario)


def test_a_backbone_leaves_once_its_last_function_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        node, choices = rig.node, 0

        def choose(held: list[Held], num_bytes: int) -> Offload | None:
            nonlocal choices
            choices += 1
            assert choices < 100, "it chooses again and again, and nothing else has its turn"
            return choose_offload(held, num_bytes)

        monkeypatch.setattr(room_module, "choose_offload", choose)
        other = structs.replace(rig.spec, backbone="other", kv_bytes=3 * PROCESS_BYTES)
        backbones = {"base": BackboneSpec(model=str(tmp_path)), "other": BackboneSpec(model=str(tmp_path))}
        node.configure(backbones, {"a": rig.spec, "z": other}, NodeSpec(), ())
        base = node.hosts["base"]
        base._backbone = cast(Any, SimpleNamespace(base=SimpleNamespace(num_bytes=2 * PROCESS_BYTES, file=-1)))
        base.is_ready = True
        await rig.ask("a", "1")
        rig.finish("a")
        rig.engines["a"].may_stop.clear()
        ending = asyncio.create_task(node.functions["a"].sleep("idle"))
        await settle()
        asked = rig.ask("z", "2")
        await settle()
        assert not asked.done()
        rig.engines["a"].may_stop.set()
        assert await asked == "stream"
        assert base.num_bytes == 0
        await ending

    run(scenario)


def test_a_second_costs_nothing_for_functions_that_have_not_been_awake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        await rig.ask("b", "1")
        visited: list[str] = []
        describe, read_memory = FunctionInstance.describe, NodeRoom.read_memory

        def visit_described(one: FunctionInstance, now: float) -> FunctionState:
            visited.append(one.name)
            return describe(one, now)

        def visit_read(room: NodeRoom, one: FunctionInstance) -> None:
            visited.append(one.name)
            read_memory(room, one)

        monkeypatch.setattr(FunctionInstance, "describe", visit_described)
        monkeypatch.setattr(NodeRoom, "read_memory", visit_read)
        monkeypatch.setattr(node_module, "TICK_S", 0.0)
        living = asyncio.create_task(rig.node.run())
        await settle()
        assert [one.name for one in rig.node.states()] == ["b"]
        assert set(visited) == {"b"}
        living.cancel()

    run(scenario)


def launcher(model: ModelConfig, adapter: Path, timeouts: Timeouts) -> Launcher:
    return Launcher(
        name="f",
        spec=FunctionSpec(backbone="base", adapter=str(adapter)),
        host=cast(Any, SimpleNamespace(name="base", backbone=SimpleNamespace(model=model))),
        log=cast(Any, None),
        users=cast(Any, None),
        timeouts=timeouts,
        observe=print,
    )


@pytest.mark.parametrize("shared", ["base", "tokenizer", "python"])
def test_an_adapter_in_a_folder_that_all_functions_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: str
) -> None:
    (tmp_path / shared / "mine").mkdir(parents=True)
    (tmp_path / "mine").symlink_to(tmp_path / shared / "mine")
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "python"))
    model = ModelConfig(model=str(tmp_path / "base"), tokenizer=str(tmp_path / "tokenizer"))
    with pytest.raises(AdapterError, match="every function reads"):
        asyncio.run(launcher(model, tmp_path / "mine", NO_TIMEOUTS).start_from(cast(Any, None)))


def test_a_request_waits_no_longer_for_a_process_than_it_may_be_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch, timeouts=Timeouts(hang_s=0.01, start_s=None))
        rig.node.functions["a"].spec = structs.replace(rig.spec, slo_s=0.001)
        rig.may_start.clear()
        with pytest.raises(CapacityError, match=r"'a' took no requests for 0.01 s: it is waking") as waking:
            await rig.ask("a", "1")
        rig.may_start.set()
        assert await rig.ask("a", "2") == "stream"
        rig.engines["a"].fleet.engines.state = EngineState.RESTARTING
        with pytest.raises(CapacityError, match="it is restarting") as restarting:
            await rig.ask("a", "3")
        assert [one.value.status for one in (waking, restarting)] == [503, 503]
        rig.node.functions["b"].spec = structs.replace(rig.spec, slo_s=0.001)
        assert await rig.ask("b", "4") == "stream"

    run(scenario)


def test_a_start_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process takes the adapter and never has read it."""
    given: dict[str, Any] = {}
    stopped: list[bool] = []

    class Stuck:
        def __init__(self, *_: object, **options: object) -> None:
            given.update(options)
            self.adapters = SimpleNamespace(warm=lambda name: asyncio.Event().wait())

        async def start(self, modules: object) -> None:
            pass

        async def stop(self) -> None:
            stopped.append(True)

    monkeypatch.setattr(launch_module, "Fleet", Stuck)
    timeouts = Timeouts.of(ServerConfig(hang_timeout_s=0.0, start_timeout_s=0.01))
    starting = launcher(ModelConfig(model=str(tmp_path / "base")), tmp_path / "mine", timeouts)

    async def scenario() -> None:
        with pytest.raises(CapacityError, match=r"'f' did not start within 0\.01 s") as found:
            await starting.start_from(cast(Any, None))
        assert found.value.status == 503

    run(scenario)
    assert stopped
    restarts = given["policy"].restarts
    assert (restarts.hang_timeout_s, restarts.start_timeout_s) == (None, 0.01)


def test_a_start_without_a_limit_fails_by_the_systems_own_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        def __init__(self, *_: object, **options: object) -> None:
            pass

        async def start(self, modules: object) -> None:
            raise TimeoutError(110, "Connection timed out")

        async def stop(self) -> None:
            pass

    monkeypatch.setattr(launch_module, "Fleet", Refusing)
    starting = launcher(ModelConfig(model=str(tmp_path / "base")), tmp_path / "mine", NO_TIMEOUTS)
    with pytest.raises(TimeoutError, match="Connection timed out"):
        asyncio.run(starting.start_from(cast(Any, None)))


def test_a_start_that_is_cancelled_while_a_dead_process_is_cleared_away_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clearing, may_clear, num_starts = asyncio.Event(), asyncio.Event(), 0
    zygote = SimpleNamespace(pid=1)

    class Dying:
        def __init__(self, *_: object, **options: object) -> None:
            pass

        async def start(self, modules: object) -> None:
            nonlocal num_starts
            num_starts += 1
            zygote.pid += 1
            raise EngineDead("The zygote ended.")

        async def stop(self) -> None:
            clearing.set()
            await may_clear.wait()

    async def ready() -> SimpleNamespace:
        return zygote

    async def scenario() -> None:
        starting = launcher(ModelConfig(model=str(tmp_path / "base")), tmp_path / "mine", NO_TIMEOUTS)
        starting.host.ready = ready  # type: ignore[assignment, method-assign]
        task = asyncio.create_task(starting.start("zygote"))
        await clearing.wait()
        task.cancel()
        await settle()
        may_clear.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert num_starts == 1

    monkeypatch.setattr(launch_module, "Fleet", Dying)
    run(scenario)


def test_a_function_that_woke_as_it_was_put_to_sleep_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        begun = asyncio.Event()

        async def start_from(launcher: Launcher, zygote: object) -> Engine:
            engine = rig.engines[launcher.name] = Engine()
            begun.set()
            with contextlib.suppress(asyncio.CancelledError):  # as ``wait_for`` does before Python 3.12
                await asyncio.Event().wait()
            return engine

        monkeypatch.setattr(Launcher, "start_from", start_from)
        asked = rig.ask("a", "1")
        await begun.wait()
        rig.node.configure({}, {}, NodeSpec(), ())
        with pytest.raises(CapacityError):
            await asked
        await settle()
        assert rig.engines["a"].is_stopped
        assert not rig.node._present

    run(scenario)


def test_a_base_that_is_to_be_loaded_has_a_zygote_as_large_as_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        (tmp_path / "model.safetensors").write_bytes(b"seven b")
        await rig.ask("a", "1")
        assert rig.node.room.used_bytes == PROCESS_BYTES + 7
        rig.node.hosts["other"] = cast(Any, SimpleNamespace(num_bytes=100, zygote_bytes=20))
        rig.node.room.changed(None)
        assert rig.node.room.used_bytes == PROCESS_BYTES + 27 + 120
        del rig.node.hosts["other"]
        assert rig.node.room.used_bytes == PROCESS_BYTES + 27  # also once it has left

    run(scenario)


def test_a_base_is_not_loaded_ahead_beyond_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have left for a function that runs, and is still to be held by the orders of the time before."""
    loaded: list[str] = []

    async def ready(host: BackboneHost) -> None:
        loaded.append(host.name)

    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        monkeypatch.setattr(BackboneHost, "ready", ready)
        (tmp_path / "model.safetensors").write_bytes(b"seven b")
        for num_bytes, found in ((6, []), (7, ["base"])):
            rig.node.configure({}, None, NodeSpec(memory_bytes=num_bytes), ["libraries:base"])
            await settle()
            assert loaded == found

    run(scenario)


def test_a_function_that_never_fits_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        rig.node.functions["a"].spec = structs.replace(rig.spec, kv_bytes=100 * PROCESS_BYTES)
        monkeypatch.setattr(room_module, "MAX_WAIT_S", 3600.0)
        large, small = rig.ask("a", "1"), rig.ask("b", "2")
        assert await small == "stream"
        with pytest.raises(CapacityError, match=f"of the node's {4 * PROCESS_BYTES}"):
            await large

    run(scenario)


def test_a_function_that_ends_slowly_keeps_no_other_awake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(node_module, "TICK_S", 0.0)
        rig = Rig(tmp_path, monkeypatch)
        for name in ("a", "b"):
            assert await rig.ask(name, name) == "stream"
        rig.engines["a"].may_stop.clear()
        for name in ("a", "b"):
            rig.finish(name)
        living = asyncio.create_task(rig.node.run())
        while rig.node.functions["b"].phase is not FunctionPhase.ASLEEP:
            await asyncio.sleep(0)
        assert rig.node.functions["a"].phase is FunctionPhase.ENDING
        rig.engines["a"].may_stop.set()
        living.cancel()

    run(scenario)


def test_orders_with_an_adapter_that_cannot_be_read_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, monkeypatch)
        missing = structs.replace(rig.spec, adapter=str(tmp_path / "gone"))
        rig.node.configure({}, {"f": missing, "a": rig.spec}, NodeSpec(), ())
        await asyncio.gather(*rig.node._beside)
        assert await rig.ask("a", "1") == "stream"

    run(scenario)
    assert f"function_unreadable name=f error=Got functions.f: adapter = '{tmp_path}/gone', which" in caplog.text
