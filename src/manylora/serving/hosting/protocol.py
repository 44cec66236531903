"""The messages between the API process and the engine process: msgpack, one struct per message.

Commands go to the engine, messages come from it, each on its own socket, in order. A command with an answer has a
``call`` number, which the ``Reply`` repeats. All tokens of one turn of the engine's loop are in one ``Turn``, so that a
message is paid per step and not per token.

::

    API process                                engine process
    AddRequests(call=7, [r1, r2])   ------>             on the wire, shared fields are sent once
                                    <------    Reply(call=7)                  both accepted, or neither
                                    <------    Turn([Output(r1, ...), Output(r2, ...)])
    Cancel([r2])                    ------>
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

import manylora.core.errors as errors
from manylora.core.config import EngineConfig
from manylora.core.engine.status import AdapterStatus, EngineStats
from manylora.core.isolation.confine import Measure
from manylora.core.ports import SharedBase
from manylora.core.types import AdapterKey, Output, Request, Tier
from manylora.serving.hosting.request_fields import RequestFields
from manylora.serving.hosting.sockets import EngineSockets

__all__ = [
    "AdapterIdentity",
    "AdapterMove",
    "AddRequests",
    "Cancel",
    "ChangeAdapter",
    "Command",
    "Ending",
    "EngineInfo",
    "EngineRoom",
    "EngineSpec",
    "Fault",
    "FinishedRequest",
    "LoadAdapter",
    "LoadAdapters",
    "Message",
    "Observations",
    "ProcessSetup",
    "Ready",
    "Reply",
    "StartRefused",
    "StartReport",
    "TakeSnapshot",
    "Turn",
    "decode_command",
    "decode_message",
    "encode",
]

T = TypeVar("T")

ByName: TypeAlias = Annotated[dict[str, T], Meta(max_length=2**18)]
"""Values by name, more than an engine has adapters. A decoder takes microseconds for each, and counts them first."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The engine behind a link."""

    config: EngineConfig
    served_name: str  # the base model's name in the API
    builder: Any  # builds the engine's parts: a ``service.Builder``; for an engine in another process, a name
    is_observed: bool = True  # whether the engine sends ``Observations``, which cost a few percent of an empty step
    # Threads for the CPU's work of an engine with a process of its own; ``None`` leaves the choice to the libraries.
    num_threads: int | None = None


class ProcessSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The set-up that a new engine process reads from its standard input."""

    engine: EngineSpec
    sockets: EngineSockets  # its sockets for commands and messages
    log_level: int  # level of its log on standard error
    # The base's weights, if another engine has loaded them; the process inherits the file.
    base: SharedBase | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and sizes of an engine that is ready; constant while it runs."""

    max_model_len: int
    vocab_size: int
    block_size: int
    page_bytes: int
    eos_token_ids: tuple[int, ...] = ()  # tokens that end an answer
    base_bytes: int = 0  # size of the base's weights; 0 where there are none
    is_accelerated: bool = False  # whether base and pages are in memory of a device beside the machine's


class Ending(NamedTuple):
    """The end of an engine, as its link saw it."""

    reason: str
    is_external: bool = False  # whether the engine was killed from outside, so that no request can have caused it


class AddRequests(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Add requests: with ``each`` every valid request, and otherwise all of them, or none if one is refused."""

    call: int
    requests: list[Request]
    each: bool = False


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Cancel requests, without a reply.

    ``stopped``: their text reached a stop string, which is a normal end. ``refused``: others of their submission were
    refused, by another engine, so that they are reported nowhere.
    """

    request_ids: list[str]
    stopped: bool = False
    refused: bool = False


class LoadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read an adapter and register it, by its header alone if so asked: then its weights are read later."""

    call: int
    name: str
    path: str
    replace: bool
    by_header: bool = False


class AdapterIdentity(msgspec.Struct, frozen=True, array_like=True):
    """An adapter's version as the first engine of a fleet registered it; all others take it over.

    Without it, an engine that has read the weights would know them by content, and one that has not by their files.
    """

    rank: int
    key: AdapterKey
    file_key: str  # identity of its files; while it is the same, so is the version
    source: str  # its directory, or its URL; that of a hub in the commit that was read


class LoadAdapters(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Check adapters by their headers and register those that pass; their weights are read later."""

    call: int
    # Name and path of each, whether it may replace one of that name, and the identity by which another engine knows it.
    adapters: list[tuple[str, str, bool, AdapterIdentity | None]]


class ChangeAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Unregister an adapter (requests in flight finish on it), pin or unpin it, or start to copy it to the device.

    ``point`` gives the version of another name to it.
    """

    call: int
    name: str
    change: Literal["unload", "pin", "unpin", "warm", "point"]
    to: str = ""  # the other name, for ``point``


class TakeSnapshot(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report counters and the state of adapters: of every adapter, or of those that the fields select."""

    call: int
    num_adapters: int | None = None  # this many adapters, the busiest; None for all
    # Adapters that metrics report: with requests since the start, pages or a failure, or pinned.
    only_in_use: bool = False
    name: str | None = None  # the adapter of this name; none if no adapter has it


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A ``ManyloraError`` as a message: the name of its class, and its constructor's arguments."""

    kind: str
    message: str
    param: str | None = None
    adapter: str = ""
    reason: str = ""
    retry_after_s: float = 1.0
    every_s: float = 0.0
    status: int = 500

    @classmethod
    def of(cls, error: errors.ManyloraError) -> Fault:
        """Return the fault of an error."""
        own = ("param", "adapter", "reason", "retry_after_s", "every_s", "status")
        fields = {name: getattr(error, name) for name in own if hasattr(error, name)}
        return cls(kind=type(error).__name__, message=str(error), **fields)

    def to_error(self) -> errors.ManyloraError:
        """Return the error."""
        kind = getattr(errors, self.kind) if self.kind in errors.__all__ else errors.ManyloraError
        assert isinstance(kind, type)
        if issubclass(kind, errors.AdapterError):
            return kind(self.adapter, self.reason)
        if issubclass(kind, errors.RequestError):
            return kind(self.message, param=self.param)
        if issubclass(kind, errors.CapacityError):
            error = kind(self.message, retry_after_s=self.retry_after_s, status=self.status)
            error.every_s = self.every_s
            return error
        assert issubclass(kind, errors.ManyloraError)
        return kind(self.message)


class FinishedRequest(msgspec.Struct, frozen=True, array_like=True):
    """An ended request, for histograms; ``adapter`` is a name, empty for the base.

    ``prefill_s`` is from the admission to the first token and ``decode_s`` from there to the end; ``None`` for a
    request that ended before. ``max_tokens`` is the limit in effect. ``engine_s`` is its part of the seconds of steps.
    ``load_s`` is the part of its wait in which it lacked its adapter alone.
    """

    adapter: str
    reason: str
    e2e_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    max_tokens: int = 0
    prefill_s: float | None = None
    decode_s: float | None = None
    num_preemptions: int = 0
    tenant: str = ""
    engine_s: float = 0.0
    request_id: str = ""
    load_s: float = 0.0


class AdapterMove(msgspec.Struct, frozen=True, array_like=True):
    """A version of an adapter came to a tier, left one, or could not be loaded."""

    key: AdapterKey
    tier: Tier
    kind: Literal["loaded", "evicted", "failed"]
    took_s: float = 0.0  # duration of the load
    error: str = ""


class Observations(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The events since the last message, as numbers for histograms; times in seconds."""

    queue_s: list[float] = msgspec.field(default_factory=list)  # waiting time of each admitted request
    # Times to first token, by adapter's name; the base has the empty name.
    ttft_s: ByName[list[float]] = msgspec.field(default_factory=dict)
    # Gaps between tokens, by adapter's name.
    inter_token_s: ByName[list[float]] = msgspec.field(default_factory=dict)
    finished: list[FinishedRequest] = msgspec.field(default_factory=list)
    device_loads_s: list[float] = msgspec.field(default_factory=list)  # durations of adapter copies to the device
    host_loads_s: list[float] = msgspec.field(default_factory=list)  # durations of adapter reads to the host tier
    num_failed_loads: int = 0
    step_tokens: list[int] = msgspec.field(default_factory=list)
    moves: list[AdapterMove] = msgspec.field(default_factory=list)  # of adapters between tiers, the first few


class StartReport(msgspec.Struct, frozen=True, kw_only=True):
    """The start of an isolated function."""

    took_s: ByName[float]  # seconds of each stage, in order: ``fork``, ``confine``, ``map``, ``build``
    measures: tuple[Measure, ...]  # the measures of isolation, and whether each is in force


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine serves."""

    info: EngineInfo
    base: SharedBase | None = None  # its base's weights, if others can map them
    start: StartReport | None = None  # its start, if it is an isolated function


class StartRefused(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start with this configuration; its last message."""

    fault: Fault


class EngineRoom(msgspec.Struct, frozen=True, array_like=True):
    """How many more requests the engine would take, until its next turn."""

    num: int  # requests; of those with an answer of the mean length if their wait is limited
    beyond: Fault  # the error of the next one


class Turn(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The outputs of one turn of the loop, and its observations."""

    outputs: list[Output]
    observations: Observations  # the observations since the last message
    room: EngineRoom | None = None  # the room for new requests; ``None`` for more than arrive in a turn


class Reply(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The answer to a call: an error, or the result."""

    call: int
    fault: Fault | None = None
    # Errors of requests that were not added, by id, or of adapters that were not registered, by name.
    refused: ByName[Fault] = msgspec.field(default_factory=dict)
    # The adapters of ``LoadAdapters`` that were registered, by name.
    registered: ByName[AdapterIdentity] = msgspec.field(default_factory=dict)
    statuses: tuple[AdapterStatus, ...] = ()
    stats: EngineStats | None = None
    observations: Observations | None = None  # the observations since the last message


Command: TypeAlias = AddRequests | Cancel | LoadAdapter | LoadAdapters | ChangeAdapter | TakeSnapshot
Message: TypeAlias = Ready | StartRefused | Turn | Reply

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command | RequestFields)
_message_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Command | Message | ProcessSetup | EngineSpec) -> bytes:
    """Return the message as msgpack."""
    if type(message) is AddRequests and len(message.requests) > 1:
        return _encoder.encode(RequestFields.of(message.call, message.requests, message.each))
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Return the command in ``data``."""
    command = _command_decoder.decode(data)
    if type(command) is RequestFields:
        return AddRequests(command.call, command.to_requests(), command.each)
    return command  # type: ignore[no-any-return]


def decode_message(data: bytes) -> Message:
    """Return the message in ``data``."""
    return _message_decoder.decode(data)  # type: ignore[no-any-return]
