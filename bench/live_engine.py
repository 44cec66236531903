"""An engine with its core and its loop, without a server, which is kept from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.types import AdapterVersion, Request
from manylora.execution.build import build_parts
from manylora.lab.measure import Recorder


class LiveEngine:
    """The engine of a configuration, with the adapters of some folders registered under their names."""

    def __init__(self, config: EngineConfig, folders: Sequence[Path]) -> None:
        self.clock = WallClock()
        self.parts = build_parts(config, self.clock)
        self._recorder = Recorder()
        self.core = EngineCore(self.parts, config, sinks=[lambda event: self._recorder(event)])
        self.versions: list[AdapterVersion] = []
        for folder in folders:
            version = self.parts.reader.read(folder.name, str(folder))
            self.core.adapters.register(folder.name, version, self.clock.now())
            self.versions.append(version)

    def serve(self, requests: Sequence[tuple[float, Request]]) -> Recorder:
        """Serve requests that arrive at their times, in seconds from now; return what was recorded when all ended."""
        recorder = self._recorder = Recorder()
        start = self.clock.now()
        arrivals = [(start + after_s, request) for after_s, request in requests]
        EngineLoop(self.core, self.clock, on_outputs=lambda outputs, now: None, arrivals=arrivals).run()
        self.settle()
        return recorder

    def settle(self) -> None:
        """Wait until no load or step is under way."""
        while self.core.has_pending_work:
            self.clock.wait_until(self.clock.now() + 0.01)
            self.core.collect(self.clock.now())
