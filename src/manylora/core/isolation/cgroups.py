"""A control group of one function: bounds on memory, processor time and threads, set from outside its process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["ROOT", "Cgroup", "cpu_group_of", "is_own_group", "remove_groups_of_the_dead"]

ROOT = Path("/sys/fs/cgroup")


class Cgroup:
    """A group below the one of this process, in either version of the interface.

    Args:
        name: Unique on the machine; letters, digits and ``-``.
        memory_bytes: Most memory; a process that needs more is ended by the kernel.
        cpus: Most processors, as 0.5 or 2.
        num_tasks: Most threads and processes.
        has_share: Whether it is a group for processor time without a limit of it; in version 1 of the interface, where
            controllers have hierarchies of their own, alone: the process stays in its groups for all else.
        root: Where the kernel shows groups.

    Raises:
        OSError: Groups cannot be made here; with the reason.
    """

    def __init__(
        self,
        name: str,
        *,
        memory_bytes: int | None = None,
        cpus: float | None = None,
        num_tasks: int | None = None,
        has_share: bool = False,
        root: Path = ROOT,
    ) -> None:
        self._folders: list[Path] = []
        is_unified = (root / "cgroup.controllers").exists()
        wanted: list[tuple[str, dict[str, str]]] = []
        if memory_bytes is not None:
            limit = "memory.max" if is_unified else "memory.limit_in_bytes"
            wanted.append(("memory", {limit: str(memory_bytes)}))
        if cpus is not None:
            quota = str(int(cpus * 100_000))
            files = {"cpu.max": f"{quota} 100000"} if is_unified else {"cpu.cfs_quota_us": quota}
            wanted.append(("cpu", files))
        elif has_share:
            if is_unified:
                raise OSError("groups for processor time alone need version 1 of the interface")
            wanted.append(("cpu", {}))
        if num_tasks is not None:
            wanted.append(("pids", {"pids.max": str(num_tasks)}))
        try:
            for controller, files in wanted:
                folder = (root if is_unified else root / controller) / f"manylora-{name}"
                folder.mkdir(exist_ok=True)
                if folder not in self._folders:
                    self._folders.append(folder)
                for file, text in files.items():
                    (folder / file).write_text(text)
        except OSError:
            self.close()
            raise

    def add(self, pid: int) -> None:
        """Put a process into the group.

        Raises:
            OSError: It has ended.
        """
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the group; its processes have ended."""
        for folder in self._folders:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        self._folders.clear()


def remove_groups_of_the_dead(prefix: str, root: Path = ROOT) -> None:
    """Remove the groups ``PREFIX-PID-...`` of processes that have ended without; one that is in use stays.

    A process that is killed leaves the groups that it has made.
    """
    for folder in (*root.glob(f"manylora-{prefix}-*-*"), *root.glob(f"*/manylora-{prefix}-*-*")):
        pid = folder.name.removeprefix(f"manylora-{prefix}-").partition("-")[0]
        if not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def cpu_group_of(pid: int | str, root: Path = ROOT) -> Path | None:
    """Return the folder of the group whose processor time a process shares; ``None`` for the group of all.

    Raises:
        OSError: The process has ended.
    """
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):  # version 1; sessions are grouped in its root alone
            return None if path == "/" else root / "cpu" / path[1:]
        # Version 2 comes last. Without the controller in its group, a process is in that of an ancestor: of all here.
        if not controllers and (root / path[1:] / "cpu.max").exists():
            return root / path[1:]
    return None


def is_own_group(group: Path) -> bool:
    """Whether a group was made here, for one function."""
    return group.name.startswith("manylora-")
