"""A function without requests computes only when no other process does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from manylora.core.isolation.cgroups import cpu_group_of
from manylora.functions.node.launch import AwakeFunction

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
    awake = AwakeFunction(cast(Any, None), cast(Any, None), cast(Any, [first]))
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
