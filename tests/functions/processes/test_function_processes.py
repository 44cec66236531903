"""Isolated functions, live: they answer as plain engines do, on one sealed base, and reach nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from bad_adapters import tiny_base, write_good_adapter
from live_model import VOCAB_SIZE, write_model
from msgspec import structs

from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.errors import CapacityError, ConfigError, EngineDead, ManyloraError
from manylora.core.isolation.landlock import landlock_version
from manylora.core.types import Output, Request, SamplingParams
from manylora.execution.model.base_weights import share_weights
from manylora.execution.model.freeze import load_weights
from manylora.execution.model.load import load_model
from manylora.functions.deployment import FunctionSpec
from manylora.functions.node.launch import AwakeFunction, Launcher, Timeouts
from manylora.functions.processes.backbone import fetch_backbone
from manylora.functions.processes.frames import FrameBuffer, FrameError, frame
from manylora.functions.processes.holder import BackboneSocket
from manylora.functions.processes.link import FunctionLink, FunctionLog
from manylora.functions.processes.messages import Backbone, FunctionPlace
from manylora.functions.processes.zygote import Zygote
from manylora.serving.hosting.fleet.adapter_book import LoraModule
from manylora.serving.hosting.fleet.fleet import Fleet
from manylora.serving.hosting.fleet.keeper import EngineState
from manylora.serving.hosting.links.thread import ThreadLink
from manylora.serving.hosting.protocol import EngineSpec

PATIENCE_S = 120.0
ATTACKS = "isolation_attacks:attack"
NOBODY = 65534

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or landlock_version() < 4, reason="needs a Linux kernel with Landlock 4"
)


@pytest.fixture(scope="module")
def model() -> Iterator[ModelConfig]:
    with tempfile.TemporaryDirectory(prefix="manylora-functions-") as made:  # pytest's are closed to other users
        folder = Path(made).resolve()
        write_model(folder / "base")
        for seed in range(2):
            write_good_adapter(folder / f"lora-{seed}", tiny_base(vocab=VOCAB_SIZE), seed=seed)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield ModelConfig(model=str(folder / "base"), device="cpu")


@pytest.fixture(scope="module")
def backbone(model: ModelConfig) -> Iterator[Backbone]:
    _, weights = load_weights(model, load_model)
    shared = share_weights(weights)
    assert shared is not None
    yield Backbone(model=model, base=shared)


def spec(model: ModelConfig) -> EngineSpec:
    config = EngineConfig(model=model, memory=MemoryConfig(num_pages=64))
    return EngineSpec(config=config, served_name="base", builder="", num_threads=2)


def adapter(model: ModelConfig, number: int) -> LoraModule:
    return LoraModule(f"lora-{number}", str(Path(model.model).parent / f"lora-{number}"))


def place(module: LoraModule) -> FunctionPlace:
    return FunctionPlace(readable=[module.path], uid=NOBODY if os.geteuid() == 0 else None)


@contextlib.asynccontextmanager
async def running(make_link: object, module: LoraModule) -> AsyncIterator[Fleet]:
    fleet = Fleet([make_link], served_name="base", observe=lambda observed: None)  # type: ignore[list-item]
    try:
        await asyncio.wait_for(fleet.start([module]), PATIENCE_S)
        keeping = asyncio.create_task(fleet.run())
        yield fleet
    finally:
        await fleet.stop()
    await keeping


async def answer(fleet: Fleet, name: str, prompt: Sequence[int] = (5, 9, 40), request_id: str = "r") -> list[int]:
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    stream = await fleet.requests.submit(
        [Request(request_id=request_id, prompt=tuple(prompt), model=name, sampling=sampling)]
    )
    tokens: list[int] = []

    def consume(outputs: list[Output]) -> None:
        for output in outputs:
            tokens.extend(token.token_id for token in output.tokens)
            if output.finish is not None:
                stream.close()

    await asyncio.wait_for(stream.deliver(consume), PATIENCE_S)
    return tokens


async def plain_answer(model: ModelConfig, module: LoraModule) -> list[int]:
    plain = EngineSpec(config=spec(model).config, served_name="base", builder="manylora.execution.build:build_parts")
    async with running(lambda: ThreadLink(plain), module) as fleet:
        return await answer(fleet, module.name)


def test_a_function_over_a_rounded_base_answers_as_a_plain_engine(model: ModelConfig) -> None:
    rounded = replace(model, base_dtype="int8")
    module = adapter(model, 0)

    async def scenario() -> None:
        expected = await plain_answer(rounded, module)
        _, weights = load_weights(rounded, load_model)
        shared = share_weights(weights)
        assert shared is not None
        zygote = Zygote(Backbone(model=rounded, base=shared))
        try:
            async with running(lambda: FunctionLink(spec(rounded), zygote, place(module)), module) as fleet:
                assert await answer(fleet, module.name) == expected
        finally:
            await zygote.stop()

    asyncio.run(scenario())


def test_functions_answer_as_plain_engines_and_come_back(model: ModelConfig, backbone: Backbone) -> None:
    modules = [adapter(model, number) for number in range(2)]
    before = os.pread(backbone.base.file, backbone.base.num_bytes, 0)

    async def scenario() -> None:
        expected = [await plain_answer(model, module) for module in modules]
        assert expected[0] != expected[1]
        zygote = Zygote(backbone)
        links: list[FunctionLink] = []

        def make(module: LoraModule) -> object:
            def make_link() -> FunctionLink:
                links.append(FunctionLink(spec(model), zygote, place(module)))
                return links[-1]

            return make_link

        try:
            async with contextlib.AsyncExitStack() as stack:
                fleets = [await stack.enter_async_context(running(make(one), one)) for one in modules]
                found = await asyncio.gather(*map(answer, fleets, (one.name for one in modules)))
                assert found == expected

                report = links[0].report
                assert report is not None
                assert list(report.took_s) == ["fork", "confine", "map", "build"]
                off = {one.name for one in report.measures if not one.is_on}
                assert "memory_limit" in off  # its place has none
                off -= {"memory_limit", "share"}  # the latter in a container without sessions of its own
                assert off <= (set() if os.geteuid() == 0 else {"user", "network", "root", "processes"})

                pid = links[0].pid
                assert pid is not None
                assert os.getsid(pid) == pid  # its threads share the time of one process
                if os.geteuid() == 0:  # a function hides its memory from its own user
                    assert private_bytes_of_base(pid) == 0
                os.kill(pid, signal.SIGKILL)
                async with asyncio.timeout(PATIENCE_S):
                    while fleets[0].engines.num_restarts == 0 or fleets[0].engines.state is not EngineState.SERVING:
                        await asyncio.sleep(0.01)
                assert await answer(fleets[0], modules[0].name, request_id="again") == expected[0]
                assert await answer(fleets[1], modules[1].name, request_id="again") == expected[1]
                assert len(links) == 3
                assert os.pread(backbone.base.file, backbone.base.num_bytes, 0) == before
        finally:
            await zygote.stop()

    asyncio.run(scenario())


def test_a_function_that_is_stopped_ends_its_own_requests_alone(
    model: ModelConfig, backbone: Backbone, tmp_path: Path
) -> None:
    """Its process neither answers nor ends; then its adapter is gone when the next one starts."""
    modules = [adapter(model, number) for number in range(2)]
    files = tmp_path / "elsewhere"

    async def scenario() -> None:
        zygote = Zygote(backbone)
        spec = FunctionSpec(backbone="base", adapter=modules[0].path)
        host = SimpleNamespace(name="base", backbone=backbone)
        users = SimpleNamespace(take=lambda: place(modules[0]).uid, give_back=lambda uid: None)

        async def start(module: LoraModule) -> AwakeFunction:
            launcher = Launcher(
                name=module.name,
                spec=structs.replace(spec, adapter=module.path, threads=1),
                host=cast(Any, host),
                log=FunctionLog(module.name),
                users=cast(Any, users),
                timeouts=Timeouts(hang_s=2.0, start_s=PATIENCE_S),
                observe=lambda observed: None,
            )
            return await launcher.start_from(zygote)

        awake = [await start(one) for one in modules]
        try:
            expected = [await answer(one.fleet, module.name) for one, module in zip(awake, modules, strict=True)]
            assert awake[0].pid is not None
            os.kill(awake[0].pid, signal.SIGSTOP)
            held = asyncio.create_task(answer(awake[0].fleet, modules[0].name, request_id="held"))
            assert await answer(awake[1].fleet, modules[1].name, request_id="other") == expected[1]
            with pytest.raises(CapacityError, match=f"'{modules[0].name}': .*it hangs") as found:
                await held
            assert found.value.status == 503
            async with asyncio.timeout(PATIENCE_S):
                while awake[0].fleet.engines.state is not EngineState.SERVING:
                    await asyncio.sleep(0.01)
            assert await answer(awake[0].fleet, modules[0].name, request_id="again") == expected[0]

            Path(modules[0].path).rename(files)
            assert awake[0].pid is not None
            os.kill(awake[0].pid, signal.SIGKILL)
            with pytest.raises(ManyloraError) as lost:
                await answer(awake[0].fleet, modules[0].name, request_id="lost")
            assert lost.value.status >= 500
            assert await answer(awake[1].fleet, modules[1].name, request_id="last") == expected[1]
        finally:
            if files.exists():
                files.rename(modules[0].path)
            for one in awake:
                await one.stop(EngineDead("The end of the test."))
            await zygote.stop()

    asyncio.run(scenario())


def private_bytes_of_base(pid: int) -> int:
    """Return the bytes of a process's mappings of the base that it does not share; it must have some mapping."""
    lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if "manylora-weights" in line]
    assert starts
    fields = [line.split() for start in starts for line in lines[start + 1 : start + 20]]
    return sum(int(size) for name, size, *_ in fields if name == "Private_Dirty:")


@pytest.mark.parametrize("as_root", [True, False])
def test_a_compromised_function_reaches_nothing(
    model: ModelConfig, backbone: Backbone, as_root: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_root and os.geteuid() != 0:
        pytest.skip("needs root")
    secret = adapter(model, 1).path + "/adapter_model.safetensors"
    attacks = Path(__file__).parents[2] / "support"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(attacks), *filter(None, sys.path)]))
    monkeypatch.setenv("MANYLORA_API_KEY", "secret")
    told = {"parent": os.getpid(), "sealed": backbone.base.file, "secret": secret, "own": adapter(model, 0).path}

    async def scenario() -> dict[str, str]:
        zygote = Zygote(backbone, builder=ATTACKS)
        # The attacks are told by the name of the served model, and tell by the reason to refuse it.
        engine = EngineSpec(
            config=EngineConfig(model=ModelConfig(model=json.dumps(told))), served_name="base", builder=""
        )
        where = FunctionPlace(readable=[adapter(model, 0).path], uid=NOBODY if as_root else None, memory_bytes=1 << 30)
        log = FunctionLog("ada")
        fleet = Fleet(
            [lambda: FunctionLink(engine, zygote, where, log=log)], served_name="base", observe=lambda observed: None
        )
        try:
            with pytest.raises(ConfigError) as refused:
                await asyncio.wait_for(fleet.start(), PATIENCE_S)
            found: dict[str, str] = json.loads(str(refused.value))
            async with asyncio.timeout(PATIENCE_S):
                while not (lines := log.take()):
                    await asyncio.sleep(0.01)
            assert "attacks begin" in lines
            return found
        finally:
            await fleet.stop()
            await zygote.stop()

    found = asyncio.run(scenario())
    reached = {name for name, result in found.items() if not result.startswith("refused")}
    if not as_root:
        reached.discard("take threads without end")  # the limit is of a user, which others have
    if os.geteuid() == 0 and not as_root:
        reached.discard("become root")  # it never was another user
    assert len(found) > 20
    assert not reached


def test_a_backbone_hands_its_memory_out_and_it_ends_with_its_last_reader(model: ModelConfig, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    process = subprocess.Popen(
        [sys.executable, "-m", "manylora", "backbone", model.model, "--socket", str(path), "--base-dtype", "int8"],
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if b"serving" in line:
                break
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="another backbone"):
            BackboneSocket(path)
        found = fetch_backbone(path)
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert not path.exists()
    assert (found.model.model, found.model.base_dtype) == (model.model, "int8")
    file = found.base.file
    inode = os.fstat(file).st_ino
    assert any(os.pread(file, found.base.num_bytes, 0))  # it outlives the process that made it
    with pytest.raises(PermissionError):
        os.pwrite(file, b"x", 0)
    os.close(file)
    assert not list(_holders(inode))
    with pytest.raises(ConfigError, match="does not answer"):
        fetch_backbone(path)


def _holders(inode: int) -> Iterator[str]:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if any(f" {inode} " in line and "manylora-weights" in line for line in maps.read_text().splitlines()):
                yield str(maps)


def test_frames_are_bounded() -> None:
    buffer = FrameBuffer(max_bytes=8)
    stream = frame(b"one") + frame(b"") + frame(b"12345678")
    found = [body for byte in stream for body in buffer.feed(bytes([byte]))]
    assert found == [b"one", b"", b"12345678"]
    with pytest.raises(FrameError, match="9 bytes"):
        buffer.feed(frame(b"123456789"))
