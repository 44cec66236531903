"""A function that computes or talks without requests takes nothing from others."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from manylora.core.config import EngineConfig, ModelConfig
from manylora.core.isolation import ProcessorShare
from manylora.core.isolation import cgroups as share_module
from manylora.core.isolation.cgroups import Cgroup, cpu_group_of
from manylora.core.types import Request
from manylora.functions.node.launch import Awake
from manylora.functions.processes import checks as checks_module
from manylora.functions.processes import link as link_module
from manylora.functions.processes.checks import MAX_BUSY_SHARE, MAX_IDLE_SHARE, MAX_PAUSE_S, WINDOW_S, TimeBudget
from manylora.functions.processes.link import FunctionLink
from manylora.functions.processes.messages import FunctionPlace
from manylora.serving.hosting.protocol import AddRequests, EngineSpec

AUTOGROUP = Path("/proc/self/autogroup")


@pytest.fixture
def session() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is a session of its own."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def nice_of(pid: int) -> str:
    return Path(f"/proc/{pid}/autogroup").read_text().split()[-1]


@pytest.mark.skipif(
    not AUTOGROUP.exists() or os.geteuid() != 0 or cpu_group_of("self") is not None,
    reason="needs root, and sessions that the kernel schedules as groups",
)
def test_each_process_of_a_function_has_its_share_while_it_has_requests(session: subprocess.Popen[bytes]) -> None:
    first, starting = (SimpleNamespace(pid=session.pid, report=one) for one in (object(), None))
    awake = Awake(cast(Any, None), cast(Any, None), cast(Any, [first]))
    awake.weigh(True)
    assert nice_of(session.pid) == "0"
    awake.weigh(False)
    assert nice_of(session.pid) == "19"
    awake.links.append(cast(Any, starting))  # not confined yet, so perhaps in the session of its zygote
    awake.weigh(True)
    awake.weigh(False)
    starting.report = object()
    awake.weigh(True)
    assert awake._weighed is cast(Any, starting)
    session.kill()
    session.wait()
    awake.weigh(False)  # which has ended


def test_a_control_group_of_its_own_is_idle_without_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "manylora-function-1-1"
    group.mkdir()
    (group / "cpu.idle").write_text("0")
    monkeypatch.setattr(share_module, "cpu_group_of", lambda pid, root: group)
    share = ProcessorShare(os.getpid())
    share.set_background(True)
    assert (group / "cpu.idle").read_text() == "1"
    share.set_background(False)
    assert (group / "cpu.idle").read_text() == "10"  # one after the other, in a file that is not the kernel's
    share.close()
    monkeypatch.setattr(share_module, "cpu_group_of", lambda pid, root: tmp_path)
    with pytest.raises(OSError, match="shares its processor time by thread"):  # a container's, with other processes
        ProcessorShare(os.getpid())


def test_messages_take_little_time_without_requests() -> None:
    budget = TimeBudget()
    assert budget.spend(0.0, MAX_BUSY_SHARE * WINDOW_S, is_busy=True) == 0.0
    assert budget.spend(0.0, MAX_IDLE_SHARE * WINDOW_S, is_busy=False) == 0.0
    assert budget.spend(0.1, MAX_IDLE_SHARE * WINDOW_S, is_busy=False) == pytest.approx(2 * WINDOW_S - 0.1)
    assert budget.spend(0.2, MAX_BUSY_SHARE * WINDOW_S, is_busy=True) == pytest.approx(2 * WINDOW_S - 0.2)
    assert budget.spend(0.3, MAX_BUSY_SHARE * WINDOW_S, is_busy=True) == 0.0  # another window
    assert budget.spend(0.3, 1e6, is_busy=False) == MAX_PAUSE_S


def test_a_flood_of_messages_is_not_read_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "MAX_PAUSE_S", 1e-6)
    times = iter([0.0, 0.0, 0.0, 1.0, 1.0, 1.0 + 0.9 * MAX_BUSY_SHARE * WINDOW_S])
    monkeypatch.setattr(link_module, "time", SimpleNamespace(thread_time=lambda: next(times)))
    calls: list[str] = []

    async def scenario() -> None:
        reads = asyncio.Event()
        engine = EngineSpec(config=EngineConfig(model=ModelConfig(model="m")), served_name="base", builder="")
        link = FunctionLink(engine, cast(Any, None), FunctionPlace(readable=[]))
        transport = SimpleNamespace(
            is_closing=lambda: False,
            pause_reading=lambda: calls.append("pause"),
            resume_reading=reads.set,
            get_write_buffer_size=lambda: 0,
            write=lambda body: None,
        )
        link.connection_made(cast(Any, transport))
        link.data_received(b"")
        assert not calls
        link.data_received(b"")
        assert calls == ["pause"]
        await reads.wait()
        link.send(AddRequests(1, [Request(request_id="r", prompt=(1,))]))
        link.data_received(b"")
        assert calls == ["pause"]  # with a request it may say more

    asyncio.run(scenario())


def test_a_group_for_a_share_alone_leaves_a_process_where_it_is_for_all_else(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    group = Cgroup("function-1-1", has_share=True, root=tmp_path)
    assert [path.name for path in (tmp_path / "cpu").iterdir()] == ["manylora-function-1-1"]
    group.close()
    assert not list((tmp_path / "cpu").iterdir())
    (tmp_path / "cgroup.controllers").touch()
    with pytest.raises(OSError, match="version 1"):
        Cgroup("function-1-1", has_share=True, root=tmp_path)
