"""Shares of the processors: a control group or a session that takes only the time that no other wants."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manylora.core.isolation import cgroups as share_module
from manylora.core.isolation.cgroups import Cgroup, ProcessorShare


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


def test_a_group_for_a_share_alone_leaves_a_process_where_it_is_for_all_else(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    group = Cgroup("function-1-1", has_share=True, root=tmp_path)
    assert [path.name for path in (tmp_path / "cpu").iterdir()] == ["manylora-function-1-1"]
    group.close()
    assert not list((tmp_path / "cpu").iterdir())
    (tmp_path / "cgroup.controllers").touch()
    with pytest.raises(OSError, match="version 1"):
        Cgroup("function-1-1", has_share=True, root=tmp_path)
