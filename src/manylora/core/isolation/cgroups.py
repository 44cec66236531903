"""Control groups and shares of processors: bounds on a function's process that are set from outside it.

Left to itself the kernel shares processors by thread, so a function with a hundred threads that compute would take the
time of its neighbours. It can share by session (``sched_autogroup``) or by control group first: the number of threads
then counts only within the function.

Source: the kernel's ``sched(7)``, "The autogroup feature", and ``Documentation/admin-guide/cgroup-v2.rst``.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["ROOT", "Cgroup", "ProcessorShare", "cpu_group_of", "enter_own_share", "remove_groups_of_the_dead"]

ROOT = Path("/sys/fs/cgroup")
_IS_ENABLED = Path("/proc/sys/kernel/sched_autogroup_enabled")


class Cgroup:
    """A control group below the group of this process, in version 1 or 2 of the interface.

    Its name is unique on the machine: letters, digits and ``-``. A process that needs more memory is ended by the
    kernel. With ``has_share`` it is a group for processor time without a limit of it; in version 1 of the interface,
    where controllers have hierarchies of their own, of no other controller: the process stays in its groups for them.
    ``OSError`` if groups cannot be made here; with the reason.
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
        """Put a process into the group; ``OSError`` if the process has ended."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the group; all its processes must have ended."""
        for folder in self._folders:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        self._folders.clear()


def remove_groups_of_the_dead(prefix: str, root: Path = ROOT) -> None:
    """Remove the groups ``PREFIX-PID-...`` that processes left behind when they ended; a group in use stays.

    A process that is killed leaves the groups that it has made.
    """
    for folder in (*root.glob(f"manylora-{prefix}-*-*"), *root.glob(f"*/manylora-{prefix}-*-*")):
        pid = folder.name.removeprefix(f"manylora-{prefix}-").partition("-")[0]
        if not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def cpu_group_of(pid: int | str, root: Path = ROOT) -> Path | None:
    """Return the folder of the group whose processor time a process shares; ``None`` for the group of all.

    ``OSError`` if the process has ended.
    """
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):  # version 1; sessions are grouped in its root alone
            return None if path == "/" else root / "cpu" / path[1:]
        # Version 2 comes last. Without the controller in its group, a process is in an ancestor's group: the group of
        # all here.
        if not controllers and (root / path[1:] / "cpu.max").exists():
            return root / path[1:]
    return None


def enter_own_share() -> None:
    """Make this process a session of its own, whose share does not grow with its threads.

    ``OSError`` if the kernel shares the processors by thread here.
    """
    os.setsid()
    if _group_of("self", ROOT) is None and not (_IS_ENABLED.exists() and _IS_ENABLED.read_text().strip() == "1"):
        raise OSError("threads count: neither kernel.sched_autogroup_enabled = 1 nor a control group by cgroup-cpus")


class ProcessorShare:
    """The share of one process that has entered its own; only root may change it.

    The kernel's file is opened once: after the end of the process a change fails, and does not reach another one that
    got its number. ``OSError`` if the process has ended, it has no share of its own, or this user may not.
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

        ``OSError`` if the process has ended.
        """
        if is_background != self._is_background:
            os.write(self._file, self._values[is_background])
            self._is_background = is_background

    def close(self) -> None:
        """Close the kernel's file."""
        os.close(self._file)


def _group_of(pid: int | str, root: Path) -> Path | None:
    """Return the control group, made here, that a process has for itself; ``None`` for the group of all."""
    group = cpu_group_of(pid, root)
    if group is not None and not group.name.startswith("manylora-"):
        raise OSError(f"the control group {group.name} shares its processor time by thread; cgroup-cpus gives its own")
    return group
