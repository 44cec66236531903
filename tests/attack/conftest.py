"""The server that most cases attack."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from attack_target import Target, running


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running(tmp_path_factory.mktemp("target"), is_timed=True) as one:
        yield one
