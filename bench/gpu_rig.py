"""What the GPU benchmarks share: a model of random weights, adapters of random weights, clocks and a report."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from publishing import table
from transformers import AutoModelForCausalLM, LlamaConfig

from manylora.core.adapters.layout import lay_out
from manylora.core.adapters.shape import BaseShape
from manylora.core.clock import WallClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.plan import AdapterLoad, PlannedSequence, StepPlan
from manylora.core.ports import EngineParts
from manylora.core.types import AdapterVersion, SamplingParams, Tier
from manylora.execution.attention.call import ATTENTION_NAME, register_attention
from manylora.execution.build import build_parts
from manylora.execution.executor import TorchExecutor
from manylora.execution.lora.kernels import LORA_KERNELS, TABLE_KERNELS
from manylora.execution.lora.tables import LoraSpace
from manylora.execution.model.load import LoadedModel
from manylora.execution.storage.arrival import Arrival
from manylora.execution.storage.host_tier import HostAdapter
from manylora.execution.storage.tile_tables import make_template
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.workloads import AdapterSpec

ALL_LINEAR = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

QV = ("q_proj", "v_proj")


@dataclass(frozen=True)
class Sizes:
    """How large everything is: Llama-3-8B on a GPU, or a toy that walks the same code on a CPU."""

    model: dict[str, Any]
    dtype: str
    batches: tuple[int, ...]
    adapters: tuple[int, ...]
    ranks: tuple[int, ...]
    context: int
    step_tokens: int
    rounds: int
    num_pages: int | None  # ``None``: as many as fit
    copy_bytes: int
    live_adapters: int
    live_s: float  # of arrivals, in each of ``live_rounds``
    live_rounds: int = 5
    sweep_s: float = 25.0  # of the calibration whose costs are simulated beside it


LLAMA_3_8B = Sizes(
    model={
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    dtype="bfloat16",
    batches=(1, 32, 64, 128),
    adapters=(1, 8, 64),
    ranks=(8, 16, 32, 64, 128),
    context=512,
    step_tokens=2048,
    rounds=20,
    num_pages=None,  # 64 adapters of rank 128 on all linears are 43 GB, beside KV of the largest batch
    copy_bytes=1 << 30,
    live_adapters=500,
    live_s=8.0,
)

QUICK = replace(
    LLAMA_3_8B,
    model=LLAMA_3_8B.model | {"num_hidden_layers": 2},
    rounds=2,
    num_pages=32768,
    live_adapters=40,
    live_s=2.0,
    live_rounds=2,
    sweep_s=1.0,
)

SMOKE = Sizes(
    model={
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    },
    dtype="float32",
    batches=(1, 3),
    adapters=(1, 2),
    ranks=(4, 20),
    context=9,
    step_tokens=32,
    rounds=1,
    num_pages=120,
    copy_bytes=1 << 16,
    live_adapters=4,
    live_s=0.2,
    live_rounds=2,
)


@dataclass
class Report:
    """Figures by section, on disk after each, so that a section that fails takes no other with it."""

    folder: Path
    call: str
    content: dict[str, Any] = field(default_factory=dict)

    def put(self, section: str, value: Any) -> None:
        self.content[section] = value
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"gpu_{self.call}.json").write_text(json.dumps(self.content, indent=1) + "\n")
        (self.folder / f"gpu_{self.call}.md").write_text(self.markdown())

    def markdown(self) -> str:
        parts = [f"# GPU figures: {self.call}\n"]
        for section, value in self.content.items():
            parts.append(f"\n## {section}\n\n")
            rows = value if isinstance(value, list) else [value]
            if not rows:
                continue
            names = list(dict.fromkeys(name for row in rows for name in row))
            cells = ([_cell(row.get(name, "")) for name in names] for row in rows)
            parts += [f"{line}\n" for line in table(names, cells, left=len(names))]
        return "".join(parts)


def _cell(value: object) -> str:
    if isinstance(value, list):  # of rounds
        return f"{statistics.median(value):.4g} ({min(value):.4g} to {max(value):.4g})"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the median time of ``work``, after two rounds to warm up; with device events where there is a device."""
    for _ in range(2):
        work()
    wait(device)
    times: list[float] = []
    for _ in range(rounds):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        else:
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def wall_seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the median wall time of ``work`` to the end of what it gave the device."""
    times = []
    for number in range(-2, rounds):
        began = time.perf_counter()
        work()
        wait(device)
        if number >= 0:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def captured(work: Callable[[], None], device: torch.device) -> Callable[[], object]:
    """Return a replay of ``work`` as one graph, so that launches are not what is timed; ``work`` itself on a CPU."""
    work()
    if device.type != "cuda":
        return work
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class Engine:
    """A model of random weights, on the very parts that serve."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        self.device = device
        self.clock = WallClock()
        self.config = EngineConfig(
            model=ModelConfig(
                model="random",
                device=device.type,
                dtype=sizes.dtype,
                lora_kernel="ragged",
                attention_kernel="triton",
                decode_graphs="on",
            ),
            memory=MemoryConfig(num_pages=sizes.num_pages, prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=max(sizes.batches), max_num_batched_tokens=sizes.step_tokens),
            adapters=AdapterConfig(look_ahead=10),
        )
        self.parts: EngineParts = build_parts(
            self.config, self.clock, load=self._make_model, is_checked=device.type != "cuda"
        )
        assert isinstance(self.parts.executor, TorchExecutor)
        self.executor = self.parts.executor
        self.runner = self.executor.runner
        self.base: BaseShape = self.parts.base
        pool = self.executor._copies.pages.flat
        for page in range(0, pool.shape[0], 512):  # never time zeros
            pool[page : page + 512].normal_(0.0, 0.02)
        self._images: dict[int, HostAdapter] = {}
        self._served = (self.runner._graphs, self.runner._step.space)

    def _make_model(self, config: ModelConfig) -> LoadedModel:
        register_attention()
        dtype = DTYPES[self.sizes.dtype]
        torch.manual_seed(0)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(
                LlamaConfig(**self.sizes.model), attn_implementation=ATTENTION_NAME, dtype=dtype
            )
        model.requires_grad_(False)
        # A decode step reads all but the embedding's table. Counted here: an engine's weights are no parameters.
        table = model.get_input_embeddings().weight
        self.weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p is not table)
        return LoadedModel(name="random", model=model.eval(), text_config=model.config, dtype=dtype, device=self.device)

    def versions(self, specs: Sequence[AdapterSpec]) -> dict[str, AdapterVersion]:
        """Return adapters of random weights, on the host's shelf; those of a rank share their numbers."""
        versions = adapter_versions(specs, self.base)
        rng = np.random.default_rng(0)
        for spec in specs:
            kind = hash((spec.rank, spec.targets))
            if kind not in self._images:
                ranks = {m.name: spec.rank for m in self.base.modules if m.name.rpartition(".")[2] in spec.targets}
                layout = lay_out(ranks, self.base)
                values = torch.empty(layout.num_pages, self.base.page.num_elements, dtype=DTYPES[self.sizes.dtype])
                block = torch.from_numpy(rng.standard_normal(1 << 16, dtype=np.float32) * 0.01).to(values.dtype)
                flat = values.view(-1)
                for start in range(0, flat.numel(), block.numel()):
                    flat[start : start + block.numel()] = block[: flat.numel() - start]
                image = values.pin_memory() if self.device.type == "cuda" else values
                space = self._served[1]
                assert space is not None
                arrival = Arrival(len(image))
                arrival.advance(len(image))
                self._images[kind] = HostAdapter(layout, image, arrival, make_template(layout, space.directory))
            # One image for all of a rank: page-locking hundreds of gigabytes would take longer than the run.
            self.executor._host._adapters[versions[spec.name].key] = self._images[kind]
        return versions

    def load(self, version: AdapterVersion, first_page: int) -> int:
        """Copy an adapter to pages from ``first_page`` on; return the first page behind it."""
        stop = first_page + version.num_pages
        work = self.executor.load_adapter(
            AdapterLoad(version=version, tier=Tier.DEVICE, pages=tuple(range(first_page, stop))), 0.0
        )
        while (result := work.poll(0.0)) is None:
            time.sleep(0.0005)
        assert result.error is None, result.error
        return stop

    def plan(self, batch: int, versions: Sequence[AdapterVersion], first_page: int) -> StepPlan:
        """Return a step in which ``batch`` sequences decode, over ``versions`` in turn; the base if there are none."""
        pages_each = -(-(self.sizes.context + 1) // self.base.page.block_size)
        sequences = []
        for row in range(batch):
            version = versions[row * len(versions) // batch] if versions else None
            first = first_page + row * pages_each
            pages = range(first, first + pages_each)
            sequences.append(self._sequence(row, self.sizes.context, 1, pages, version))
        return StepPlan(step_id=1, sequences=tuple(sequences))

    def prompt_plan(self) -> StepPlan:
        """Return a step of one prompt, as long as the context of ``plan``."""
        pages = range(-(-self.sizes.context // self.base.page.block_size))
        return StepPlan(step_id=1, sequences=(self._sequence(0, 0, self.sizes.context, pages, None),))

    def _sequence(
        self, row: int, start: int, num_tokens: int, pages: Sequence[int], version: AdapterVersion | None
    ) -> PlannedSequence:
        return PlannedSequence(
            seq_id=row,
            tokens=[3 + row % 40] * (start + num_tokens),
            num_prompt_tokens=1 if start else num_tokens,
            start=start,
            num_tokens=num_tokens,
            pages=tuple(pages),
            adapter=version.key if version else None,
            rank=version.rank if version else 0,
            sampling=SamplingParams(temperature=0.0),
            is_sampled=True,
            seed=0,
        )

    def step_s(self, plan: StepPlan) -> float:
        """Return the median wall time of the whole step: inputs, model, sampling, tokens on the host.

        The order of its rows is there before, as in a step that is planned ahead.
        """
        order = self.runner.arrange(plan.sequences)
        return wall_seconds(lambda: self.runner.run(plan, order=order), self.device, self.sizes.rounds)

    def forget_groups(self, narrow_after: int = 0) -> None:
        """Let graphs be captured for the groups that the next step's adapters change, not for all there ever were.

        They are captured once the graph of all groups was replayed ``narrow_after`` times.
        """
        if (graphs := self.runner._graphs) is not None:
            graphs._present = np.zeros_like(graphs._present)
            graphs._templates = set()
            graphs.narrow_after = narrow_after

    def use_kernel(self, name: str | None) -> None:
        """Run adapters by another kernel, without graphs; ``None`` goes back to what serves."""
        runner = self.runner
        if name is None:
            runner._graphs, runner._step.space = self._served
            name = "ragged"
        else:
            runner._graphs = None
            space, blocks = self._served[1], TABLE_KERNELS.get(name)
            runner._step.space = LoraSpace(space.directory, space.pool, blocks) if space and blocks else None
        runner._step.kernel = LORA_KERNELS[name]
        runner._last_lora = None
