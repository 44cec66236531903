"""What tests of the core share: a small base, made-up adapter versions, and an engine on the fake executor."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from fake_executor import FakeExecutor

from manylora.core.adapters.shape import BaseShape, PageShape
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.engine.core import EngineCore
from manylora.core.events import Event, EventSink
from manylora.core.memory import BlockTable
from manylora.core.ports import CoreParts, Executor
from manylora.core.scheduling import LengthPredictor, Nearness, PolicyContext, Sequence
from manylora.core.scheduling.prediction.predictor import OraclePredictor
from manylora.core.types import AdapterKey, AdapterVersion, Output, Request, SamplingParams, Tier
from manylora.lab.catalog.dims import ModelDims
from manylora.lab.catalog.models import base_shape
from manylora.serving.hosting.protocol import EngineInfo

VOCAB_SIZE = 1000


def tiny_base(*, max_model_len: int) -> BaseShape:
    """Return a base with modules, for simulations: its steps cost next to nothing."""
    return base_shape(
        ModelDims(
            name="tiny",
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=4,
            head_dim=16,
            intermediate_size=128,
            vocab_size=500,
            max_model_len=max_model_len,
        )
    )


def engine_info(*, vocab_size: int) -> EngineInfo:
    """Return what a made-up engine tells its client at the start."""
    return EngineInfo(
        max_model_len=100,
        vocab_size=vocab_size,
        block_size=16,
        page_bytes=1,
    )


def small_base(*, block_size: int = 4, max_model_len: int = 256, eos: tuple[int, ...] = ()) -> BaseShape:
    """Return a base without modules: the core asks for sizes only."""
    return BaseShape(
        name="base",
        architecture="llama",
        fingerprint="f" * 16,
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        num_layers=2,
        max_model_len=max_model_len,
        page=PageShape(
            block_size=block_size, num_layers=2, num_kv_heads=1, head_dim=8, element_bytes=4, dtype="float32"
        ),
        modules=(),
        all_linear=(),
        eos_token_ids=eos,
    )


def version(key: str, num_pages: int = 2, rank: int = 8, invocation: tuple[int, ...] = ()) -> AdapterVersion:
    """Return a made-up adapter version."""
    return AdapterVersion(
        key=AdapterKey(key),
        source=f"/adapters/{key}",
        rank=rank,
        num_modules=1,
        target_modules=("q_proj",),
        num_pages=num_pages,
        weight_bytes=num_pages * 500,
        host_bytes=num_pages * 512,
        disk_bytes=num_pages * 500,
        invocation=invocation,
    )


def request(
    request_id: str,
    num_prompt: int = 5,
    max_tokens: int | None = 4,
    model: str = "",
    *,
    tenant: str = "",
    weight: float = 1.0,
    **sampling: object,
) -> Request:
    """Return a request whose prompt depends on its id."""
    start = sum(request_id.encode())
    return Request(
        request_id=request_id,
        prompt=tuple((start + i) % VOCAB_SIZE for i in range(num_prompt)),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),  # type: ignore[arg-type]
        model=model,
        tenant=tenant,
        weight=weight,
    )


def sequence(
    seq_id: int,
    *,
    num_prompt: int = 5,
    max_tokens: int = 4,
    adapter: AdapterVersion | None = None,
    arrived_at: float = 0.0,
    block_size: int = 4,
    tenant: str = "",
    weight: float = 1.0,
) -> Sequence:
    """Return a waiting sequence, for policies by themselves; its adapter's name is its key."""
    return Sequence(
        seq_id=seq_id,
        request=request(f"r{seq_id}", num_prompt, max_tokens, tenant=tenant, weight=weight),
        version=adapter,
        name=adapter.key if adapter else "",
        table=BlockTable(b"", block_size),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        seed=0,
        arrived_at=arrived_at,
    )


def policy_context(
    *,
    num_pages: int = 64,
    block_size: int = 4,
    predictor: LengthPredictor | None = None,
    nearness: Callable[[Sequence], Nearness] = lambda one: Nearness.DEVICE,
    num_claimable_pages: Callable[[bool], int] = lambda is_first: 0,
    prompt_s: Callable[[Sequence], float] = lambda one: 0.001 * one.num_to_run,
    options: object = None,
    **scheduler: object,
) -> PolicyContext:
    """Return what a policy may know, without an engine: lengths are the caps."""
    return PolicyContext(
        config=SchedulerConfig(**scheduler),  # type: ignore[arg-type]
        num_pages=num_pages,
        block_size=block_size,
        predictor=predictor or OraclePredictor(),
        nearness=nearness,
        num_claimable_pages=num_claimable_pages,
        prompt_s=prompt_s,
        options=options,
    )


def check_reports(core: EngineCore, now: float) -> None:
    """Read all that clients may ask about a core; nothing of it may raise or name an adapter that is not loaded."""
    names = [status.name for status in core.adapters.statuses(now)]
    for some in (core.adapters.in_use(now), core.adapters.busiest(2, now), core.adapters.busiest(100, now)):
        assert {status.name for status in some} <= set(names)
    assert {*core.stats().running_adapters, *core.stats().waiting_adapters} <= set(names)


@dataclass
class Rig:
    """An engine core on the fake executor, with everything it emitted."""

    core: EngineCore
    executor: FakeExecutor
    events: list[Event]
    now: float = 0.0
    outputs: dict[str, list[Output]] = field(default_factory=dict)

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.core.add_request(one, self.now)

    def register(
        self,
        name: str,
        num_pages: int = 2,
        *,
        key: str | None = None,
        replace: bool = False,
        is_unread: bool = False,
        invocation: tuple[int, ...] = (),
    ) -> None:
        made = version(key or f"key-{name}", num_pages, invocation=invocation)
        if not is_unread:
            self.executor.host.add(made.key)
        tier = Tier.DISK if is_unread else Tier.HOST
        self.core.adapters.register(name, made, self.now, replace=replace, tier=tier)

    def turn(self) -> None:
        """Collect and launch."""
        self.now += 1.0
        for output in self.core.collect(self.now):
            self.outputs.setdefault(output.request_id, []).append(output)
        self.core.launch(self.now)

    def step(self) -> None:
        """Complete whatever is in flight, then take a turn."""
        while self.executor.loads:
            self.executor.complete_load()
        if self.executor.plan is not None:
            self.executor.complete_step()
        self.turn()

    def drain(self, max_steps: int = 10_000) -> None:
        """Step until no request is left."""
        self.turn()
        for _ in range(max_steps):
            if not self.core.has_requests and not self.core.has_pending_work:
                return
            assert self.core.has_pending_work, f"stalled: {self.core.stats()}"
            self.step()
        raise AssertionError(f"requests are left after {max_steps} steps: {self.core.stats()}")

    def tokens(self, request_id: str) -> list[int]:
        return [token.token_id for output in self.outputs[request_id] for token in output.tokens]

    def finish(self, request_id: str) -> str | None:
        reason = self.outputs[request_id][-1].finish
        return reason.value if reason else None


def make_rig(
    *,
    num_pages: int = 64,
    block_size: int = 4,
    max_model_len: int = 256,
    eos: tuple[int, ...] = (),
    prefix_caching: bool = True,
    adapters: AdapterConfig | None = None,
    reads_host: bool = False,
    waits_by_layer: bool = False,
    is_accelerated: bool = False,
    executor: Callable[[FakeExecutor], Executor] = lambda fake: fake,
    sinks: Seq[EventSink] = (),
    **scheduler: object,
) -> Rig:
    """Make an engine on the fake executor, or on what ``executor`` makes of it."""
    fake = FakeExecutor(vocab_size=VOCAB_SIZE, block_size=block_size)
    events: list[Event] = []
    core = EngineCore(
        CoreParts(
            base=small_base(block_size=block_size, max_model_len=max_model_len, eos=eos),
            num_pages=num_pages,
            executor=executor(fake),
            reads_host=reads_host,
            waits_by_layer=waits_by_layer,
            is_accelerated=is_accelerated,
        ),
        EngineConfig(
            model=ModelConfig(model="base"),
            scheduler=SchedulerConfig(**{"plan_ahead": False, **scheduler}),  # type: ignore[arg-type]
            memory=MemoryConfig(block_size=block_size, prefix_caching=prefix_caching),
            adapters=adapters or AdapterConfig(),
        ),
        served_name="base",
        sinks=[events.append, *sinks],
    )
    return Rig(core, fake, events)
