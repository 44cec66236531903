"""Load a base for the process that asks for it: ``python -m manylora.functions.processes.load PARENT ARGUMENTS...``.

The arguments are those of the program's own command. The kernel kills the loader when the thread that started it ends,
also if that was killed during the load: a loader that went on would hold the base for good.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from manylora.core.isolation.system import end_with_parent

__all__ = ["load_command", "main"]


def load_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs ``manylora ARGUMENTS`` until this process ends."""
    return [sys.executable, "-P", "-m", "manylora.functions.processes.load", str(os.getpid()), *arguments]


def main() -> int:
    """Run the command; return 1 if the parent has ended before."""
    end_with_parent()
    if os.getppid() != int(sys.argv[1]):
        return 1
    del sys.argv[1]
    runpy.run_module("manylora", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
