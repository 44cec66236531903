"""Memory by owner, as the live page shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from manylora.core.engine.status import EngineStats
from manylora.serving.api import page
from manylora.serving.hosting.fleet.engines import Replica
from manylora.serving.hosting.fleet.keeper import EngineState


@pytest.mark.parametrize(("is_accelerated", "other"), [(False, 2 * 40), (True, 2 * 1050)])
def test_a_base_that_engines_share_is_there_once(
    monkeypatch: pytest.MonkeyPatch, is_accelerated: bool, other: int
) -> None:
    """Each of two processes has mapped it, beside five pages and 40 bytes that belong to nobody else."""
    info = SimpleNamespace(base_bytes=1000, page_bytes=2, is_accelerated=is_accelerated)
    replicas = [Replica(index=index, state=EngineState.SERVING, pid=10 + index) for index in range(2)]
    engines = SimpleNamespace(info=info, replicas=lambda: replicas)
    context = SimpleNamespace(fleet=SimpleNamespace(engines=engines), engine_config=SimpleNamespace(simulate=None))
    stats = SimpleNamespace(num_kv_pages=6, num_prefix_pages=2, num_adapter_pages=2, num_free_pages=9, host_bytes=0)
    monkeypatch.setattr(page, "_resident_bytes", lambda replica: 1050)
    owned = page._memory(cast(Any, context), cast(EngineStats, stats))
    assert (owned["base"], owned["other"]) == (1000, other)
