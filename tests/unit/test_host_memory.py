"""The memory a process may take: the machine's, or the room in the tightest group around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from manylora.execution.storage.host_memory import available_bytes


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
