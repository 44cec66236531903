"""Workers that share a model, as threads of one process: the same collectives over gloo, without pipes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from torch import distributed

from manylora.core.clock import Clock
from manylora.core.config import EngineConfig, ModelConfig
from manylora.core.ports import EngineParts
from manylora.execution.build import build_parts
from manylora.execution.collectives import Collectives
from manylora.execution.executor import TorchExecutor
from manylora.execution.model.load import LoadedModel, load_model
from manylora.execution.peers import Answer, Follower, Loaded, Message, SharedExecutor
from manylora.execution.storage.adapter_files import InlineReader

__all__ = ["ThreadPeer", "build_shared", "build_workers", "join"]


class ThreadPeer:
    """A worker in this process."""

    def __init__(self, parts: EngineParts) -> None:
        assert isinstance(parts.executor, TorchExecutor)
        self.parts = parts
        self.shared: SharedExecutor | None = None
        self._follower = Follower(parts.executor, self._answer)
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Handle a message at once."""
        with self._sending:
            self._follower.handle(message)

    def _answer(self, answer: Answer) -> None:
        assert self.shared is not None
        if isinstance(answer, Loaded):
            self.shared.answered(answer)
        else:
            self.shared.lose(repr(answer))


def build_workers(config: EngineConfig, clock: Clock, size: int) -> tuple[list[EngineParts], list[Collectives]]:
    """Return the parts and the collectives of each worker."""
    store: Any = distributed.HashStore()  # type: ignore[attr-defined]
    groups = [Collectives(lambda: store, rank, size) for rank in range(size)]
    # While transformers builds a model, parameters of every thread are made without weights: one at a time, then on.
    loading, all_loaded = threading.Lock(), threading.Barrier(size)
    config = replace(config, model=replace(config.model, tensor_parallel_size=size))

    def load(model: ModelConfig, workers: Collectives) -> LoadedModel:
        with loading:
            loaded = load_model(model, workers)
        all_loaded.wait()
        return loaded

    def build(group: Collectives) -> EngineParts:
        return build_parts(config, clock, load=load, workers=group, readers=[InlineReader()])

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(build, groups)), groups


def join(parts: list[EngineParts], clock: Clock) -> EngineParts:
    """Return the parts of all workers."""
    first, peers = parts[0], [ThreadPeer(one) for one in parts[1:]]
    assert isinstance(first.executor, TorchExecutor)
    shared = SharedExecutor(first.executor, peers, clock)
    for peer in peers:
        peer.shared = shared

    def close() -> None:
        for one in parts:
            one.close()

    return shared.join(first, close)


def build_shared(config: EngineConfig, clock: Clock, *, size: int, **_: object) -> EngineParts:
    """Return the parts of an engine of ``size`` workers."""
    return join(build_workers(config, clock, size)[0], clock)
