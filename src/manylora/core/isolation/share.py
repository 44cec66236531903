"""The share of a process in the machine's processors: that of every other one, or the time that no other wants.

Left to itself the kernel shares by thread, so a function with a hundred threads that compute would take the time of its
neighbours. It can share by session (``sched_autogroup``) or by control group first: the number of threads then counts
within a function alone.

Source: the kernel's ``sched(7)``, "The autogroup feature", and ``Documentation/admin-guide/cgroup-v2.rst``.
"""

from __future__ import annotations

import os
from pathlib import Path

from manylora.core.isolation.cgroups import ROOT, cpu_group_of, is_own_group

__all__ = ["ProcessorShare", "enter_own_share"]

_IS_ENABLED = Path("/proc/sys/kernel/sched_autogroup_enabled")


def enter_own_share() -> None:
    """Make this process a session of its own, whose share does not grow with its threads.

    Raises:
        OSError: The kernel shares the processors by thread here.
    """
    os.setsid()
    if _group_of("self", ROOT) is None and not (_IS_ENABLED.exists() and _IS_ENABLED.read_text().strip() == "1"):
        raise OSError("threads count: neither kernel.sched_autogroup_enabled = 1 nor a control group by cgroup-cpus")


class ProcessorShare:
    """The share of one process that has entered its own; only root may change it.

    The kernel's file is opened once: after the end of the process a change fails, and does not reach another one that
    got its number.

    Args:
        pid: The process.
        root: Where the kernel shows groups.

    Raises:
        OSError: It has ended, it has no share of its own, or this user may not.
    """

    def __init__(self, pid: int, root: Path = ROOT) -> None:
        group = _group_of(pid, root)
        if group is not None:
            path, self._values = group / "cpu.idle", (b"0", b"1")
        else:
            path, self._values = Path(f"/proc/{pid}/autogroup"), (b"0", b"19")  # a nice value for the session
        self._file = os.open(path, os.O_WRONLY)
        self._is_background = False

    def set_background(self, is_background: bool) -> None:
        """Leave the process the time that no other one wants, or give it its share again; cheap without a change.

        Raises:
            OSError: It has ended.
        """
        if is_background != self._is_background:
            os.write(self._file, self._values[is_background])
            self._is_background = is_background

    def close(self) -> None:
        """Close the kernel's file."""
        os.close(self._file)


def _group_of(pid: int | str, root: Path) -> Path | None:
    """Return the control group that a process has for itself; ``None`` for the group of all, where sessions count."""
    group = cpu_group_of(pid, root)
    if group is not None and not is_own_group(group):
        raise OSError(f"the control group {group.name} shares its processor time by thread; cgroup-cpus gives its own")
    return group
