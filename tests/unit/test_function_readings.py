"""Memory that a function was forked with is the zygote's, whoever reads it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from manylora.hosting.node.readings import memory_of


@pytest.mark.skipif(sys.platform != "linux", reason="the readings are Linux's")
def test_a_reader_that_is_not_root_leaves_out_what_the_zygote_has(monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text

    def guarded(path: Path) -> str:
        if path.name == "smaps_rollup":
            raise PermissionError(13, "it hides its memory")
        if path.name == "statm":
            return "9000 5000 1000 0 0 0 0"
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", guarded)
    page = os.sysconf("SC_PAGE_SIZE")
    alone = memory_of(1)
    assert alone is not None and alone.own == alone.anonymous == 4000 * page
    forked = memory_of(1, 5, 3000 * page)
    assert forked is not None
    assert (forked.own, forked.pss, forked.anonymous) == (1000 * page, 1000 * page, 4000 * page)
    grown = memory_of(1, 5, 9000 * page)  # the zygote's were read later
    assert grown is not None and grown.own == 1
