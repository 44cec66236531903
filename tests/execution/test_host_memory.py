"""The memory and the cores a process may take: the machine's, or those of the tightest group around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from manylora.core.config import EngineConfig, ModelConfig
from manylora.core.errors import ConfigError
from manylora.core.machine import available_bytes, count_cores
from manylora.execution.assist.workers import count_workers
from manylora.execution.build import _host_bytes


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1_024_000),
        ({"proc/self/cgroup": "0::/"}, 1_024_000),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/box/memory.max": "max\n",
                "sys/fs/cgroup/pod/box/memory.current": "5000\n",
                "sys/fs/cgroup/pod/memory.max": "9000\n",
                "sys/fs/cgroup/pod/memory.current": "6000\n",
            },
            3000,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu:/docker/abc\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "7000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "8000\n",
            },
            0,
        ),
        ({"proc/meminfo": "nothing of use\n"}, None),
    ],
    ids=["no groups", "no limits", "version 2", "version 1", "unknown"],
)
def test_the_least_room_counts(files: dict[str, str], expected: int | None, tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, files)) == expected


def test_this_machine_has_some() -> None:
    found = available_bytes()
    assert found is None or found > 1 << 20


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n"}, 64),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/box/cpu.max": "3250000 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "1650000 100000\n",
            },
            16,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
    ],
    ids=["no groups", "no limits", "version 2", "version 1"],
)
def test_the_fewest_cores_count(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(64))
    assert count_cores(machine(tmp_path, files)) == expected


def test_engines_share_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora.execution.assist.workers.count_cores", lambda: 64)
    assert [count_workers(num) for num in (1, 4, 8, 64)] == [16, 14, 6, 1]
    monkeypatch.setattr("manylora.execution.build.available_bytes", lambda: 1 << 30)
    assert [_host_bytes(num) for num in (1, 4)] == [1 << 28, 1 << 26]
    with pytest.raises(ConfigError, match="num_engines"):
        EngineConfig(model=ModelConfig(model="demo"), num_engines=0)
