"""The functions of one backbone, as the server sees engines: a function is a model name."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from manylora.core.errors import (
    AdapterForbidden,
    CapacityError,
    ConfigError,
    ManyloraError,
    ModelNotFound,
    RequestError,
)
from manylora.core.types import Request
from manylora.functions.node.instance import FunctionInstance
from manylora.functions.node.launch import AwakeFunction
from manylora.functions.node.node import FunctionNode
from manylora.serving.hosting.fleet.adapter_book import LoadedAdapter, UnavailableAdapter
from manylora.serving.hosting.fleet.engines import Replica
from manylora.serving.hosting.fleet.keeper import EngineState
from manylora.serving.hosting.fleet.requests import AnswersInProgress
from manylora.serving.hosting.fleet.resumption import ResumeStats
from manylora.serving.hosting.fleet.snapshot import Snapshot
from manylora.serving.hosting.fleet.versions import NumberedVersion
from manylora.serving.hosting.links.in_flight import OutputStream
from manylora.serving.hosting.protocol import EngineInfo
from manylora.serving.metrics.status_report import FunctionState

__all__ = ["BackboneFleet", "describe_base"]

SNAPSHOT_S = 2.0  # longest wait for the snapshot of a function


_WHERE = "functions are registered with the controller: in its configuration, or over its REST"


def _refusing(reason: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return a method that refuses to change an adapter."""

    async def refuse(self: BackboneFleet, name: str, *given: object, **terms: object) -> NoReturn:
        raise AdapterForbidden(name, reason)

    return refuse


class BackboneFleet:
    """A ``FleetPort`` of functions: its own engines, requests and adapters. Only for the event loop's thread."""

    scaling = None

    def __init__(self, name: str, node: FunctionNode, model: str) -> None:
        self.served_name = name
        self.engines = self.requests = self.adapters = self  # the functions, by what the server asks of them
        self.info = describe_base(name, model)
        self.in_progress = AnswersInProgress()
        self._node = node
        self._is_draining = False
        self._loaded: dict[str, LoadedAdapter] = {}
        self._num_changes_seen = -1

    # -- requests ----------------------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Wake the function if it sleeps, and submit requests, which all name the same function.

        Errors are those of ``FunctionInstance.submit``; ``ModelNotFound`` if the caller may not know of it as well.
        """
        self.check_serving()
        instance = self._instance(requests[0].model)
        if not instance.spec.may_call(requests[0].tenant):
            raise _no_such(requests[0].model)
        return await instance.submit(requests)

    def cancel(self, request_ids: Sequence[str], *, stopped: bool = False) -> None:
        """Cancel requests, in the queue or in a function."""
        self._node.cancel(self.served_name, request_ids, stopped=stopped)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._is_draining = True

    # -- adapters: functions are registered with the controller alone -------------------------------------------------

    unavailable: Mapping[str, UnavailableAdapter] = MappingProxyType({})
    """None: a function's adapter is read where the function starts."""

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        """The functions."""
        if self._num_changes_seen != self._node.num_changes:
            self._num_changes_seen = self._node.num_changes
            at = int(time.time())
            self._loaded = {
                one.name: self._loaded.get(one.name) or LoadedAdapter(path=one.spec.adapter, loaded_at=at)
                for one in self._instances()
            }
        return self._loaded

    @property
    def num_changes(self) -> int:
        """Changes of the functions."""
        return self._node.num_changes

    load = publish = unload = _refusing(_WHERE)
    pin = _refusing("functions are not pinned; keep-alive and pre-loading decide")
    warm = _refusing("functions are not warmed; pre-loading decides")

    def take(self, model: str) -> None:
        """Take no version: a function has one while it runs."""

    def give(self, version: NumberedVersion) -> None:
        """Never called: none is taken."""

    def versions_of(self, name: str) -> Sequence[NumberedVersion]:
        """Return none."""
        return ()

    def find(self, model: str) -> None:
        """Return none."""

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """Serving, whether functions are awake or not."""
        return EngineState.DRAINING if self._is_draining else EngineState.SERVING

    @property
    def num_serving(self) -> int:
        """Number of functions that are awake and serve."""
        return sum(engine.fleet.engines.state is EngineState.SERVING for engine in self._awake().values())

    @property
    def resumes(self) -> ResumeStats:
        """Counters of requests that outlived a process of a function, since the start."""
        ended = self._node.ended_resumes.get(self.served_name, ResumeStats())
        return ResumeStats.sum_of([ended, *(engine.fleet.resumes for engine in self._awake().values())])

    def hidden_from(self, tenant: str) -> frozenset[str]:
        """Return the names of functions whose callers do not include a tenant."""
        return frozenset([one.name for one in self._instances() if not one.spec.may_call(tenant)])

    def check_room(self) -> None:
        """Return: each function has a queue of its own, and the model of the request is not known yet."""

    def check_serving(self) -> None:
        """Raise ``CapacityError`` once the node drains."""
        if self._is_draining:
            message = "The server is shutting down and takes no new requests."
            raise CapacityError(message, retry_after_s=10.0, status=503)

    def functions(self) -> list[FunctionState]:
        """Return the state of every function that has been awake."""
        return self._node.states(self.served_name)

    async def snapshots(
        self, num_adapters: int | None = None, *, only_in_use: bool = False, name: str | None = None
    ) -> dict[int, Snapshot]:
        """Return the snapshot of each function that is awake and answers, by its number.

        ``CapacityError`` if no function is awake.
        """
        taking = {
            index: asyncio.wait_for(
                engine.fleet.engines.snapshots(num_adapters, only_in_use=only_in_use, name=name), SNAPSHOT_S
            )
            for index, engine in self._awake().items()
        }
        found: dict[int, Snapshot] = {}
        for index, taken in zip(taking, await asyncio.gather(*taking.values(), return_exceptions=True), strict=True):
            if not isinstance(taken, BaseException):
                found[index] = taken[0]
            elif not isinstance(taken, ManyloraError | TimeoutError):  # a function that answers wrongly is left out
                raise taken
        if not found:
            raise CapacityError("No function is awake.", retry_after_s=1.0, status=503)
        return found

    def replicas(self) -> list[Replica]:
        """Return the engine of every function; a function that sleeps has an idle one."""
        return [
            Replica(index=one.number, state=EngineState.IDLE)
            if one.engine is None
            else Replica(
                index=one.number,
                state=one.engine.fleet.engines.state,
                pid=one.pid,
                num_restarts=one.engine.fleet.engines.num_restarts,
                num_in_flight=one.engine.num_in_flight,
            )
            for one in self._instances()
        ]

    async def drain_replica(self, index: int, timeout_s: float) -> None:
        """Refuse: functions are not drained by number."""
        raise RequestError(f"Got replica {index}, expected no call of this kind: functions sleep by themselves")

    def _instances(self) -> list[FunctionInstance]:
        return [one for one in self._node.functions.values() if one.host.name == self.served_name]

    def _awake(self) -> dict[int, AwakeFunction]:
        """Return the engines of functions that are awake, by the number of the function."""
        return {one.number: one.engine for one in self._instances() if one.engine is not None}

    def _instance(self, model: str) -> FunctionInstance:
        for name in (model, model.removeprefix(f"{self.served_name}:")):
            found = self._node.functions.get(name)
            if found is not None and found.host.name == self.served_name:
                return found
        raise _no_such(model)


def _no_such(model: str) -> ModelNotFound:
    return ModelNotFound(f"The model `{model[:200]}` does not exist.", param="model")


def describe_base(name: str, model: str) -> EngineInfo:
    """Return the limits of a base by its configuration, before any engine runs on it; an engine may have smaller ones.

    ``ConfigError`` if the configuration cannot be read, or lacks the limits.
    """
    try:
        config = json.loads((Path(model) / "config.json").read_text())
        text = config.get("text_config", config)
        vocab_size = int(text["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"Got backbones.{name}: model = {model!r}, which has no configuration: {error!r}") from None
    return EngineInfo(
        max_model_len=int(text.get("max_position_embeddings", 2**31 - 1)),
        vocab_size=vocab_size,
        block_size=0,
        page_bytes=0,
    )
