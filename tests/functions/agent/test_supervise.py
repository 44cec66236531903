"""The supervisor tells why it ended."""

from __future__ import annotations

import asyncio

import pytest

from manylora.functions.agent.supervise import keep_until_stopped


def test_a_part_that_cannot_be_started_is_an_error_of_the_supervisor() -> None:
    class Child:
        def __init__(self, error: Exception | None = None) -> None:
            self.error = error
            self.is_stopped = False

        async def keep(self) -> None:
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()

        async def stop(self) -> None:
            self.is_stopped = True

    controller, agent = Child(), Child(FileNotFoundError("no interpreter"))
    with pytest.raises(FileNotFoundError, match="interpreter"):
        asyncio.run(keep_until_stopped(controller, agent))
    assert controller.is_stopped and agent.is_stopped
