"""The ledger of usage: it adds up to the engine's seconds, and outlives a kill and a full disk."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import small_base, version

from manylora.cli.commands.tenant import usage
from manylora.core.clock import VirtualClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.errors import ConfigError
from manylora.core.events import Event, StepFinished
from manylora.core.ports import CoreParts
from manylora.core.types import Request, SamplingParams
from manylora.lab.costs.model import FixedCost
from manylora.lab.sim.run.executor import SimulatedExecutor
from manylora.serving.hosting.engine.observer import Observer
from manylora.serving.hosting.protocol import FinishedRequest, Observations
from manylora.serving.metrics import usage as usage_module
from manylora.serving.metrics.usage import COLUMNS, UsageLedger, read_usage


def observed(tenant: str = "t", adapter: str = "a", engine_s: float = 0.5) -> Observations:
    return Observations(finished=[FinishedRequest(adapter, "stop", 1.0, 10, 20, 4, tenant=tenant, engine_s=engine_s)])


def test_seconds_add_up_to_the_engines(tmp_path):
    events: list[Event] = []
    observer = Observer()
    core = EngineCore(
        CoreParts(
            base=small_base(max_model_len=64), num_pages=30, executor=SimulatedExecutor(FixedCost(), vocab_size=1000)
        ),
        EngineConfig(
            model=ModelConfig(model="base"),
            scheduler=SchedulerConfig(policy="fair", max_num_seqs=4, max_num_batched_tokens=16),
            memory=MemoryConfig(block_size=4),
        ),
        sinks=[events.append, observer],
    )
    core.adapters.register("a", version("k"), 0.0)
    arrivals = [
        (
            0.05 * index,
            Request(
                request_id=str(index),
                prompt=tuple(range(1 + index % 20)),
                sampling=SamplingParams(max_tokens=1 + index % 13, ignore_eos=True),
                model="a" if index % 2 else "",
                tenant=f"t{index % 3}",
            ),
        )
        for index in range(90)
    ]
    EngineLoop(core, VirtualClock(), on_outputs=lambda outputs, now: None, arrivals=arrivals).run()
    ledger = UsageLedger(tmp_path / "usage.db", epoch_s=lambda: 86400.0)
    ledger.observe(observer.take())
    asyncio.run(ledger.close())
    rows = read_usage(tmp_path / "usage.db", ("day", "tenant", "adapter"))
    assert {row[:3] for row in rows} == {("1970-01-02", f"t{one}", name) for one in range(3) for name in ("", "a")}
    sums = Counter({name: sum(row[3 + place] for row in rows) for place, name in enumerate(COLUMNS)})
    assert sums["requests"] == 90 and sums["output_tokens"] == sum(1 + index % 13 for index in range(90))
    assert sums["prompt_tokens"] == sum(1 + index % 20 for index in range(90))
    busy_s = sum(event.took_s for event in events if isinstance(event, StepFinished))
    assert sums["engine_s"] == pytest.approx(busy_s, rel=0.01)


def test_it_outlives_a_kill(tmp_path):
    """What was gathered before the last flush is there, though the process had no time to close it."""
    program = """
import asyncio, os, signal, sys
from pathlib import Path
from test_usage import observed
from manylora.serving.metrics import usage
usage.FLUSH_S = 0.01

async def main():
    ledger = usage.UsageLedger(Path(sys.argv[1]))
    ledger.observe(observed())
    asyncio.create_task(ledger.run())
    while not usage.read_usage(Path(sys.argv[1]), ("tenant",)):
        await asyncio.sleep(0.01)
    ledger.observe(observed())
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    file = tmp_path / "usage.db"
    paths = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", program, str(file)], env={"PYTHONPATH": ":".join(paths)}, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    assert read_usage(file, ("tenant",)) == [("t", 1, 10, 4, 20, 0.5)]
    again = UsageLedger(file)
    again.observe(observed(tenant="u", engine_s=1.5))
    again.observe(observed(engine_s=0.25))
    asyncio.run(again.close())
    assert read_usage(file, ("tenant",)) == [("u", 1, 10, 4, 20, 1.5), ("t", 2, 20, 8, 40, 0.75)]
    day = read_usage(file, ("day",))[0][0]
    for since, is_there in (("9999-01-01", False), (str(day), True), (str(day).replace("-", ""), True)):
        assert bool(read_usage(file, ("day",), since=since)) is is_there
    with pytest.raises(ConfigError, match="since = '2026-1-5', expected a day"):
        read_usage(file, ("day",), since="2026-1-5")


def test_what_could_not_be_written_is_written_later(tmp_path, monkeypatch, caplog):
    ledger = UsageLedger(tmp_path / "usage.db")

    def full(pending: object) -> None:
        ledger.observe(observed())  # meanwhile
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(ledger, "_write", full)
        ledger.observe(observed())
        asyncio.run(ledger._flush())
    assert "usage_not_written num=1" in caplog.text
    asyncio.run(ledger.close())
    assert read_usage(tmp_path / "usage.db", ("tenant",)) == [("t", 2, 20, 8, 40, 1.0)]


def test_a_write_that_has_not_begun_is_not_lost_with_its_writer(tmp_path, monkeypatch):
    """Every thread is busy as the server stops."""
    monkeypatch.setattr(usage_module, "FLUSH_S", 0.0)
    ledger = UsageLedger(tmp_path / "usage.db")
    is_over = threading.Event()

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        busy = asyncio.create_task(asyncio.to_thread(is_over.wait))
        await asyncio.sleep(0)
        ledger.observe(observed())
        running = asyncio.create_task(ledger.run())
        while ledger._pending:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        closing = asyncio.create_task(ledger.close())
        await asyncio.sleep(0)
        is_over.set()
        await asyncio.gather(busy, closing)

    asyncio.run(scenario())
    assert read_usage(tmp_path / "usage.db", ("tenant",)) == [("t", 1, 10, 4, 20, 0.5)]


def test_the_command_prints_a_line_for_each_tenant(tmp_path, capsys):
    ledger = UsageLedger(tmp_path / "usage.db")
    ledger.observe(observed(engine_s=1234.5))
    ledger.observe(observed(tenant="u"))
    asyncio.run(ledger.close())
    usage(tmp_path / "usage.db", by="tenant, adapter", since="", as_csv=True)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "tenant,adapter,requests,prompt_tokens,cached_tokens,output_tokens,engine_s"
    assert lines == ["t,a,1,10,4,20,1234.5", "u,a,1,10,4,20,0.5"]
    usage(tmp_path / "usage.db", by="tenant", since="", as_csv=False)
    assert capsys.readouterr().out.splitlines()[1].split() == ["t", "1", "10", "4", "20", "1,234.5"]


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ConfigError, match="Got by = 'nonsense', expected some of day, tenant, adapter"):
        read_usage(tmp_path / "usage.db", ("tenant", "nonsense"))
    with pytest.raises(ConfigError, match="there is no such file"):
        read_usage(tmp_path / "usage.db", ("tenant",))
    (tmp_path / "text.db").write_text("no database " * 100)
    with pytest.raises(ConfigError, match="cannot be read: file is not a database"):
        read_usage(tmp_path / "text.db", ("tenant",))
    with pytest.raises(ConfigError, match=r"Got usage = .* cannot be opened"):
        UsageLedger(tmp_path / "text.db")
