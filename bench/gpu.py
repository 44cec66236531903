"""Everything that needs a GPU, in four calls of less than nine and a half minutes each; see `gpu.sh`.

    python bench/gpu.py --call RIGHT|SPEED|WHERE|LOADS [--out DIR] [--minutes 9] [--sections ...] [--cpu-smoke|--quick]

::

    RIGHT  kernel_tests  every kernel against its reference, compiled
           device_tests  whole steps: graphs, launches and torch; tokens beside loads and evictions
           sanitizer     kernels that follow tables, under compute-sanitizer where there is one
    SPEED  machine       copy bandwidth, host link
           kernels       LoRA, attention, and the base's products in 16, 8 and 4 bits, against the copy's bandwidth
           steps         decoding with adapters against the base alone, and against the floor
           families      naive, grouped, padded, ragged, captured
    WHERE  replay        kernels of a captured step by time
           mixed         steps of decoding beside a prompt, captured and eager
           imbalance     127 short contexts and a long one
           prefill       attention of prompts against the library's
           sampler       tokens by one launch, and by many
           pauses        what the host adds to a step
    LOADS  machine
           loads         adapter copies, and what decoding feels of them
           assist        prompts whose adapter is computed by the CPU: handoff, and against synchronous calls
           live          Chameleon against FIFO without a cache, in rounds, and what simulators predict of them

Each section writes its rows at once to `gpu_CALL.json` and `.md`; one that fails leaves its error in its place. The
last line is the verdict, and the exit status is 1 unless it is good. `--cpu-smoke` walks the same code on a toy model
in Triton's interpreter, ``--quick`` on two layers of the model on a GPU: their figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_live import live_rows
from gpu_rig import (
    ALL_LINEAR,
    DTYPES,
    LLAMA_3_8B,
    QUICK,
    QV,
    SMOKE,
    Engine,
    Report,
    Sizes,
    captured,
    seconds,
    wait,
    wall_seconds,
)
from gpu_where import Where

from manylora.core.types import AdapterVersion
from manylora.execution.attention.call import AttentionCall, Rotation
from manylora.execution.attention.triton import TritonAttention, TritonAttentionKernel
from manylora.execution.device import find_device, make_device_ops
from manylora.execution.fusion.layers import FusedNorm, activate
from manylora.execution.kernels.linear import BaseLinear
from manylora.execution.kernels.row_weight import RowWeight, write_rows
from manylora.execution.lora.tables import BatchTables, StepTables
from manylora.execution.storage.tile_tables import GroupSpan
from manylora.lab.workloads import AdapterSpec

CODES = (("int8", 128, False), ("int4", 32, False), ("int4", 128, True), ("float8_e4m3fn", 128, False))
"""Kinds of codes, inputs that share a scale, and whether they have shifts."""


CALLS = {
    "RIGHT": ("kernel_tests", "device_tests", "sanitizer"),
    "SPEED": ("machine", "kernels", "steps", "families"),
    "WHERE": ("replay", "mixed", "imbalance", "prefill", "sampler", "pauses"),
    "LOADS": ("machine", "loads", "assist", "live"),
}

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/execution"
KERNEL_TESTS = {
    "lora/test_triton_lora.py": 3,
    "attention/test_triton_attention.py": 4,
    "kernels/test_row_weight.py": 8,
    "fusion/test_triton_norm.py": 1,
    "fusion/test_triton_gate.py": 1,
    "fusion/test_triton_fused.py": 2,
    "sampling/test_sampler.py": 3,
    "assist/test_assist_cuda.py": 1,
    "model/test_device_memory.py": 1,
}
"""Files of tests, and the processes that share one's: most of their time is compilation."""

DEVICE_TESTS = {"test_on_device.py": 3}

SANITIZED_TESTS = {"lora/test_triton_lora.py": 1, "attention/test_triton_attention.py": 1}
"""Without processes of their own: under the sanitizer those cannot open files."""


class Bench:
    """The sections; each is a method and returns its rows."""

    def __init__(self, sizes: Sizes, device: torch.device, report: Report, ends_at: float) -> None:
        self.sizes, self.device, self.report, self.ends_at = sizes, device, report, ends_at
        self.copy_bytes_per_s = self.link_bytes_per_s = 1.0
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = Engine(self.sizes, self.device)
        return self._engine

    def adapters(self, num: int, rank: int | None, targets: tuple[str, ...]) -> tuple[list[AdapterVersion], int]:
        """Load ``num`` adapters of a rank (of every rank in turn if ``None``); return them and the next free page.

        Raises:
            MemoryError: They do not fit.
        """
        ranks = self.sizes.ranks if rank is None else (rank,)
        specs = []
        for i in range(num):
            own = ranks[i % len(ranks)]
            specs.append(AdapterSpec(name=f"{len(targets)}-{own}-{i}", rank=own, targets=targets))
        versions = list(self.engine.versions(specs).values())
        page = 0
        if sum(version.num_pages for version in versions) > self.engine.parts.num_pages * 7 // 8:
            raise MemoryError(f"{num} adapters of rank {rank or 'mixed'} do not fit beside the KV of a batch")
        for version in versions:
            page = self.engine.load(version, page)
        return versions, page

    def kernel_tests(self) -> list[dict[str, Any]]:
        # On a CPU one is enough: all have run by themselves.
        return self._tests(
            "kernel_tests", KERNEL_TESTS if self.device.type == "cuda" else {"fusion/test_triton_gate.py": 1}, 300.0
        )

    def device_tests(self) -> list[dict[str, Any]]:
        return self._tests("device_tests", DEVICE_TESTS, 150.0)

    def sanitizer(self) -> list[dict[str, Any]]:
        program = shutil.which("compute-sanitizer")
        if program is None:
            return [{"left out": "there is no compute-sanitizer"}]
        # Its report of refused calls of the driver would count torch's questions for what a driver has.
        before = (program, "--report-api-errors", "no", "--error-exitcode", "9")
        return self._tests("sanitizer", SANITIZED_TESTS, 150.0, before=before)

    def _tests(
        self, section: str, files: dict[str, int], limit_s: float, before: tuple[str, ...] = ()
    ) -> list[dict[str, Any]]:
        """Run tests by file, each in processes of its own and all at once: one that crashes takes no other with it."""
        ends_at = min(self.ends_at, time.monotonic() + limit_s)
        is_gpu = self.device.type == "cuda"
        environment = {**os.environ, "TRITON_INTERPRET": str(int(not is_gpu)), "ON_DEVICE": self.device.type}
        settings = ("-p", "no:cacheprovider", "--noconftest", "-o", "addopts=", "-o", "filterwarnings=default")
        running = {}
        self.report.folder.mkdir(parents=True, exist_ok=True)
        for file, num in files.items():
            is_parallel = num > 1 and find_spec("xdist") and is_gpu and not before
            parallel = ("-n", str(num)) if is_parallel else ()
            log = self.report.folder / f"{section}_{Path(file).stem}.log"
            with log.open("w") as output:
                running[file, log] = subprocess.Popen(
                    (*before, sys.executable, "-m", "pytest", "-q", *settings, *parallel, f"{TESTS}/{file}"),
                    cwd=ROOT,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        rows: list[dict[str, Any]] = []
        for (file, log), process in running.items():
            try:
                status = process.wait(max(1.0, ends_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
            rows.append(_test_row(file, log.read_text(), status))
            self.report.put(section, rows)
        return rows

    @property
    def where(self) -> Where:
        return Where(self.engine, self.sizes, self.device)

    def _some(self) -> tuple[list[AdapterVersion], int]:
        """Return adapters of every rank, as many as a usual step has."""
        return self.adapters(self.sizes.adapters[-1], None, QV)

    def replay(self) -> list[dict[str, Any]]:
        return self.where.replay(*self._some())

    def mixed(self) -> list[dict[str, Any]]:
        return self.where.mixed(*self._some())

    def imbalance(self) -> list[dict[str, Any]]:
        return self.where.imbalance()

    def prefill(self) -> list[dict[str, Any]]:
        return self.where.prefill()

    def sampler(self) -> list[dict[str, Any]]:
        return self.where.sampler()

    def pauses(self) -> list[dict[str, Any]]:
        return self.where.pauses()

    def machine(self) -> list[dict[str, Any]]:
        num = self.sizes.copy_bytes
        source, target = (torch.empty(num, dtype=torch.uint8, device=self.device).random_() for _ in range(2))
        took = seconds(lambda: target.copy_(source), self.device, self.sizes.rounds)
        self.copy_bytes_per_s = 2 * num / took
        host = torch.zeros(num // 4, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        part = target[: num // 4]
        self.link_bytes_per_s = host.numel() / seconds(
            lambda: part.copy_(host, non_blocking=True), self.device, self.sizes.rounds
        )
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU, Triton interpreted"
        return [
            {
                "device": name,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "copy GB/s (read + written)": self.copy_bytes_per_s / 1e9,
                "host link GB/s": self.link_bytes_per_s / 1e9,
            }
        ]

    def kernels(self) -> list[dict[str, Any]]:
        return [*self._base_kernels(), *self._lora_kernels(), *self._attention_kernels(), *self._row_kernels()]

    def _base_kernels(self) -> list[dict[str, Any]]:
        """Return products of the base's linears by precision, and the error of those with codes.

        ``over 16 bits`` is the time beside that of the same linear in 16 bits, by cuBLAS.
        """
        rows = []
        dtype = DTYPES[self.sizes.dtype]
        width, inner = self.sizes.model["hidden_size"], self.sizes.model["intermediate_size"]
        for name, (num_out, num_in) in {
            "o": (width, width),
            "gate, up": (2 * inner, width),
            "down": (width, inner),
        }.items():
            num = max(1, min(32, self.sizes.copy_bytes // (2 * num_out * num_in)))  # more than the cache holds
            inputs = {batch: torch.randn(batch, num_in, device=self.device).to(dtype) for batch in self._product_rows()}
            plain = [torch.randn(num_out, num_in, device=self.device).to(dtype) for _ in range(num)]
            of_plain = {}
            for batch, x in inputs.items():
                took = self._product_s([BaseLinear(weight, None) for weight in plain], x)
                of_plain[batch] = took
                what = {"kernel": f"{self.sizes.dtype} {name}", "rows": batch}
                rows.append(what | self._speed(took, num * plain[0].nbytes, num))
            del plain
            for numbers, group, has_shift in CODES:
                weights = [_random_codes(numbers, group, has_shift, num_out, num_in, dtype, self.device)]
                weights += [RowWeight(weights[0].data.clone(), weights[0].form) for _ in range(num - 1)]
                chosen = torch.arange(0, num_out, max(1, num_out // 64), device=self.device)
                for batch, x in inputs.items():
                    took = self._product_s([BaseLinear(weight, None) for weight in weights], x)
                    exact = x.float() @ weights[0].rows(chosen).float().T
                    error = (weights[0].product(x)[:, chosen].float() - exact).norm() / exact.norm()
                    own = {"over 16 bits": took / of_plain[batch], "relative error": float(error)}
                    what = {"kernel": f"{numbers}/{group}{' shifted' * has_shift} {name}", "rows": batch}
                    rows.append(what | self._speed(took, num * weights[0].nbytes, num) | own)
        return rows

    def _product_rows(self) -> tuple[int, ...]:
        return (*self.sizes.batches, 4 * max(self.sizes.batches), 256)

    def _product_s(self, linears: list[BaseLinear], x: torch.Tensor) -> float:
        def work() -> None:
            for one in linears:
                one.product(x)

        return seconds(captured(work, self.device), self.device, self.sizes.rounds)

    def _lora_kernels(self) -> list[dict[str, Any]]:
        rows = []
        engine = self.engine
        space = engine.runner._step.space
        assert space is not None
        batch = max(self.sizes.batches) if self.device.type == "cpu" else 64
        for num in self.sizes.adapters:
            for rank in (self.sizes.ranks[0], self.sizes.ranks[len(self.sizes.ranks) // 2], None):
                versions, _ = self.adapters(num, rank, ALL_LINEAR)
                held = [engine.runner.resident[v.key].table for v in versions]
                tables = [table for table in held if table is not None]
                spans = [(batch * i // num, batch * (i + 1) // num, table) for i, table in enumerate(tables)]
                step = BatchTables(space, [span for span in spans if span[1] > span[0]]).step
                for family in sorted({name.rpartition(".")[2] for name in space.directory.groups} - {"lm_head"}):
                    chosen = [g for name, g in space.directory.groups.items() if name.endswith(f".{family}")]
                    width = sum(columns for _, columns in chosen[0].modules)
                    dtype = DTYPES[self.sizes.dtype]
                    x = torch.randn(batch, chosen[0].in_features, device=self.device).to(dtype)
                    out = torch.zeros(batch, width, device=self.device, dtype=dtype)

                    def work(
                        step: StepTables = step,
                        x: torch.Tensor = x,
                        out: torch.Tensor = out,
                        chosen: list[GroupSpan] = chosen,
                    ) -> None:
                        for span in chosen:  # every layer: more than the cache holds
                            step.apply(x, out, span)

                    took = seconds(captured(work, self.device), self.device, self.sizes.rounds)
                    num_elements = sum(_table_elements(table.template, g.index) for table in tables for g in chosen)
                    num_bytes = num_elements * dtype.itemsize
                    what = {"kernel": f"lora {family}", "rows": batch, "adapters": num, "rank": rank or "mixed"}
                    rows.append(what | self._speed(took, num_bytes, len(chosen)))
        return rows

    def _speed(self, took: float, num_bytes: int, num_layers: int) -> dict[str, float]:
        bytes_per_s = num_bytes / took
        share = bytes_per_s / self.copy_bytes_per_s
        return {"us per layer": took / num_layers * 1e6, "GB/s": bytes_per_s / 1e9, "share of copy": share}

    def _attention_kernels(self) -> list[dict[str, Any]]:
        rows = []
        engine, pool = self.engine, self.engine.executor._copies.pages
        shape, dtype = pool.shape, pool.dtype
        heads = self.sizes.model["num_attention_heads"]
        for batch in self.sizes.batches:
            plan = engine.plan(batch, (), 0)
            ops, most = make_device_ops(self.device), engine.base.max_model_len
            step = TritonAttentionKernel(ops, pool, max_num_seqs=batch, max_model_len=most).prepare(plan.sequences)
            query = torch.randn(heads, batch, shape.head_dim, device=self.device).to(dtype)
            key, value = (
                torch.randn(shape.num_kv_heads, batch, shape.head_dim, device=self.device).to(dtype) for _ in range(2)
            )
            angles = Rotation(*(torch.rand(batch, shape.head_dim, device=self.device).to(dtype) for _ in range(2)))
            calls = [
                AttentionCall(SimpleNamespace(layer_idx=i), query, key, value, 0.1, None, None, None, {}, angles)  # type: ignore[arg-type]
                for i in range(shape.num_layers)
            ]

            def work(step: TritonAttention = step, calls: list[AttentionCall] = calls) -> None:
                for call in calls:
                    step.attend(call)

            took = seconds(captured(work, self.device), self.device, self.sizes.rounds)
            num_bytes = batch * (self.sizes.context + 1) * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim
            num_bytes *= dtype.itemsize
            what = {"kernel": f"rotation, KV write, attention to {self.sizes.context} tokens", "rows": batch}
            rows.append(what | self._speed(took, num_bytes, shape.num_layers))
        return rows

    def _row_kernels(self) -> list[dict[str, Any]]:
        """Return what goes row by row: a sum with its norm, a gated activation; few bytes, so nearly all launch."""
        rows = []
        dtype = DTYPES[self.sizes.dtype]
        width, inner = self.sizes.model["hidden_size"], self.sizes.model["intermediate_size"]
        norm = FusedNorm(torch.nn.Parameter(torch.ones(width, dtype=dtype, device=self.device)), 1e-5, is_offset=False)
        for batch in self.sizes.batches:
            x, y = (torch.randn(batch, width, device=self.device).to(dtype) for _ in range(2))
            both = torch.randn(batch, 2 * inner, device=self.device).to(dtype)
            for name, work, num_elements in (
                ("sum and norm", lambda x=x, y=y: norm.add(x, y), 4 * x.numel()),
                ("gate", lambda both=both: activate(*both.chunk(2, dim=-1), is_gelu=False), both.numel() * 3 // 2),
            ):

                def layers(work: Callable[[], object] = work) -> None:
                    for _ in range(self.sizes.model["num_hidden_layers"]):
                        work()

                num_layers = self.sizes.model["num_hidden_layers"]
                took = seconds(captured(layers, self.device), self.device, self.sizes.rounds)
                num_bytes = num_layers * num_elements * dtype.itemsize
                rows.append({"kernel": name, "rows": batch} | self._speed(took, num_bytes, num_layers))
        return rows

    def steps(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        engine, sizes = self.engine, self.sizes
        alone: dict[int, tuple[float, float]] = {}
        for batch in sizes.batches:
            base_s = engine.step_s(engine.plan(batch, (), 0))
            kv_bytes = batch * sizes.context * engine.base.page.num_bytes // engine.base.page.block_size
            floor_s = (engine.weight_bytes + kv_bytes) / self.copy_bytes_per_s
            alone[batch] = (base_s, floor_s)
            rows.append({"batch": batch, "adapters": 0} | _against_floor(batch, base_s, floor_s))
        for targets in (QV, ALL_LINEAR):
            engine.forget_groups()
            for batch, (base_s, floor_s) in alone.items():
                for rank in (*sizes.ranks[::2], None):
                    for num in (num for num in sizes.adapters if num <= batch):
                        rows.append(self._step_row(batch, num, rank, targets, base_s, floor_s))
                        self.report.put("steps", rows)
        return rows

    def _step_row(
        self, batch: int, num: int, rank: int | None, targets: tuple[str, ...], base_s: float, floor_s: float
    ) -> dict[str, Any]:
        try:
            versions, page = self.adapters(num, rank, targets)
        except MemoryError as error:
            return {"batch": batch, "adapters": num, "rank": rank or "mixed", "left out": str(error)}
        step_s = self.engine.step_s(self.engine.plan(batch, versions, page))
        added_floor_s = sum(version.weight_bytes for version in versions) / self.copy_bytes_per_s
        what = {
            "batch": batch,
            "adapters": num,
            "rank": rank or "mixed",
            "targets": "q, v" if targets is QV else "all linears",
        }
        added = {"added": step_s / base_s - 1.0, "added at least (bytes)": added_floor_s / base_s}
        return what | _against_floor(batch, step_s, floor_s + added_floor_s) | added

    def families(self) -> list[dict[str, Any]]:
        """Return what adapters add to a step by kernel: published 169 / 30 / 10.9 % at batch 128, 40 adapters."""
        engine = self.engine
        batch = max(self.sizes.batches)
        num = min(40, self.sizes.adapters[-1])
        engine.forget_groups()
        versions, page = self.adapters(num, self.sizes.ranks[1], QV)
        base, mixed = engine.plan(batch, (), page), engine.plan(batch, versions, page)
        rows = []
        for kernel in ("naive", "grouped", "padded", "ragged", None):
            engine.use_kernel(kernel)
            base_s, mixed_s = engine.step_s(base), engine.step_s(mixed)
            rows.append(
                {
                    "kernel": kernel or "ragged, captured",
                    "batch": batch,
                    "adapters": num,
                    "rank": self.sizes.ranks[1],
                    "base ms": base_s * 1e3,
                    "added ms": (mixed_s - base_s) * 1e3,
                    "added": mixed_s / base_s - 1.0,
                }
            )
        return rows

    def loads(self) -> list[dict[str, Any]]:
        engine = self.engine
        rank = self.sizes.ranks[len(self.sizes.ranks) // 2]
        (version,), page = self.adapters(1, rank, ALL_LINEAR)
        copy_s = wall_seconds(lambda: engine.load(version, 0), self.device, self.sizes.rounds)
        plan = engine.plan(max(self.sizes.batches), (), page)
        alone_s = engine.step_s(plan)
        is_done = threading.Event()

        def keep_loading() -> None:
            while not is_done.is_set():
                engine.load(version, 0)

        thread = threading.Thread(target=keep_loading)
        thread.start()
        beside_s = engine.step_s(plan)
        is_done.set()
        thread.join()
        num_bytes = version.num_pages * engine.base.page.num_bytes
        return [
            {
                "rank": rank,
                "MB": num_bytes / 1e6,
                "ms": copy_s * 1e3,
                "GB/s": num_bytes / copy_s / 1e9,
                "share of link": num_bytes / copy_s / self.link_bytes_per_s,
                "step alone ms": alone_s * 1e3,
                "step beside loads ms": beside_s * 1e3,
                "slower": beside_s / alone_s - 1.0,
            }
        ]

    def assist(self) -> list[dict[str, Any]]:
        from gpu_assist import assist_rows

        ranks = self.sizes.ranks[1::2]
        by_rank = {}
        for rank in ranks:
            (version,), page = self.adapters(1, rank, ALL_LINEAR)
            by_rank[rank] = (version, page)
        return assist_rows(self.engine, self.sizes, by_rank, self.device)

    def live(self) -> list[dict[str, Any]]:
        return live_rows(self.engine, self.sizes, self.report.folder)


def _test_row(file: str, output: str, status: int) -> dict[str, Any]:
    """Return what a file's tests came to, by their output and exit status."""
    print(output[-3000:], flush=True)
    counts = {name: int(number) for number, name in re.findall(r"([1-9]\d*) (passed|failed|skipped|error)", output)}
    missing = re.search(r"No module named '?([\w.]+)", output)
    if status == 5 or (missing and not counts.get("failed")):
        return {"file": file, "left out": f"{missing[1]} is missing" if missing else "no test was chosen"}
    row: dict[str, Any] = {"file": file, "passed": 0, "failed": 0, "skipped": 0} | counts
    if status == -signal.SIGKILL:
        row["error"] = "not done in time"
    elif status:
        lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
        row["error"] = f"exit status {status}: {' '.join(lines)[:300] or output[-300:]}"
    return row


def _against_floor(batch: int, step_s: float, floor_s: float) -> dict[str, float]:
    times = {"step ms": step_s * 1e3, "tokens/s": batch / step_s}
    return times | {"floor ms": floor_s * 1e3, "floor over step": floor_s / step_s}


def _random_codes(
    numbers: str, group: int, has_shift: bool, num_out: int, num_in: int, dtype: torch.dtype, device: torch.device
) -> RowWeight:
    codes = torch.randint(0, 16 if numbers == "int4" else 256, (num_out, num_in), dtype=torch.uint8)
    if numbers == "float8_e4m3fn":
        codes &= 0xF7  # no code of no number
    scales = torch.full((num_out, -(-num_in // group)), 0.01, dtype=torch.float16)
    shifts = scales if has_shift else None
    form, data = write_rows(
        numbers, codes, group=group, scales=scales, shifts=shifts, table=None, order=None, dtype=dtype
    )
    return RowWeight(torch.from_numpy(data).to(device), form)


def _table_elements(template: Any, group: int) -> int:
    """Return the elements of a group's tiles."""
    header = template.header[group]
    first = template.header.size
    total = 0
    for start, count in [(header[0], header[1]), *zip(header[3::2], header[4::2], strict=True)]:
        lines = template.tiles[(start - first) // 6 : (start - first) // 6 + count]
        total += int((lines[:, 2] * lines[:, 4]).sum())
    return total


def verdict(call: str, sections: tuple[str, ...], content: dict[str, Any]) -> tuple[str, bool]:
    """Return the last line of a call, and whether all of it ran without a failure."""
    rows = {name: content.get(name, [{"left out": "not begun"}]) for name in sections}
    failed = [name for name, own in rows.items() if any("error" in row for row in own)]
    left_out = [name for name, own in rows.items() if any(row.get("left out") for row in own)]
    is_good = not failed and not any(content.get(name) in (None, NO_TIME) for name in sections)
    parts = [f"{len(sections) - len(failed) - len(left_out)} of {len(sections)} sections whole"]
    for what, names in (("failed", failed), ("left out in part", left_out)):
        parts += [f"{what}: {', '.join(names)}"] * bool(names)
    return f"VERDICT {call}: {'good' if is_good else 'NOT GOOD'}; {'; '.join(parts)}", is_good


NO_TIME = [{"left out": "no time"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", choices=CALLS, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--minutes", type=float, default=9.0, help="no section starts after this")
    parser.add_argument("--sections", help="some of the call's, divided by commas")
    parser.add_argument("--cpu-smoke", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two layers and few rounds: does the script work here?")
    options = parser.parse_args()
    if not (options.cpu_smoke or torch.cuda.is_available()):
        raise SystemExit("There is no GPU; --cpu-smoke shows that the script works")
    sections = CALLS[options.call] if options.sections is None else tuple(options.sections.split(","))
    ends_at = time.monotonic() + 60 * options.minutes
    device = find_device("cpu" if options.cpu_smoke else "cuda")
    report = Report(options.out, options.call)
    bench = Bench(SMOKE if options.cpu_smoke else QUICK if options.quick else LLAMA_3_8B, device, report, ends_at)
    # Not inference mode: adapters are copied on threads that are not in it, and could not write to its tensors.
    with torch.no_grad():
        for section in sections:
            if time.monotonic() > ends_at:
                report.put(section, NO_TIME)
                continue
            run: Callable[[], list[dict[str, Any]]] = getattr(bench, section)
            at = time.monotonic()
            try:
                report.put(section, run())
            except Exception as error:
                traceback.print_exc()
                # What was measured before it failed stays.
                rows = report.content.get(section, [])
                report.put(section, [*rows, {"error": f"{type(error).__name__}: {error}"[:500]}])
            wait(device)
            gc.collect()
            print(f"{section}: {time.monotonic() - at:.1f} s", flush=True)
    if bench._engine is not None:
        bench._engine.parts.close()
    print(report.markdown())
    line, is_good = verdict(options.call, sections, report.content)
    report.put("verdict", [{"verdict": line}])
    print(line, flush=True)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
