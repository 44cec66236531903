"""Where the time of a step goes on a GPU: kernels of a replay, mixed steps, a long context, prompts, tokens, pauses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from gpu_rig import DTYPES, Engine, Sizes, captured, seconds, wait
from msgspec.structs import replace

from manylora.core.plan import StepPlan
from manylora.core.types import AdapterVersion, SamplingParams
from manylora.execution.attention.call import AttentionCall
from manylora.execution.attention.triton import TritonAttentionKernel
from manylora.execution.device import make_device_ops
from manylora.execution.sampling.draw import choose_fused, choose_tokens, row_numbers

Row = dict[str, Any]


class Where:
    """The sections of the call WHERE; each method returns the rows of one."""

    def __init__(self, engine: Engine, sizes: Sizes, device: torch.device) -> None:
        self.engine, self.sizes, self.device = engine, sizes, device
        self._batch = max(sizes.batches)

    def replay(self, versions: list[AdapterVersion], page: int) -> list[Row]:
        """Return the kernels of captured steps by time: of the base, and with adapters on all linears."""
        rows = []
        for what, chosen in (("base", []), (f"{len(versions)} adapters", versions)):
            plan = self.engine.plan(self._batch, chosen, page)
            self.engine.runner.run(plan)
            is_gpu = self.device.type == "cuda"
            kind = torch.profiler.ProfilerActivity.CUDA if is_gpu else torch.profiler.ProfilerActivity.CPU
            with torch.profiler.profile(activities=[kind]) as profile:
                for _ in range(self.sizes.rounds):
                    self.engine.runner.run(plan)
                wait(self.device)
            times: Counter[str] = Counter()
            counts: Counter[str] = Counter()
            for event in profile.events():
                took = event.device_time if is_gpu else event.cpu_time
                times[event.name] += took
                counts[event.name] += 1
            total = sum(times.values()) or 1.0
            for name, us in times.most_common(15):
                own = {"kernel": name[:70], "launches": counts[name] / self.sizes.rounds}
                rows.append({"step": what} | own | {"us": us / self.sizes.rounds, "share": us / total})
        return rows

    def mixed(self, versions: list[AdapterVersion], page: int) -> list[Row]:
        """Return steps of decoding beside a prompt, captured and eager."""
        rows = []
        runner, graphs = self.engine.runner, self.engine.runner._graphs
        for num_tokens in sorted({min(n, self.sizes.context) for n in (16, 64, 256, 384)}):
            plan = self.engine.plan(self._batch - 1, versions, page)  # one of the sequences that a step may have
            first = max(page for s in plan.sequences for page in s.pages) + 1
            (own,) = self.engine.prompt_plan().sequences
            pages = tuple(range(first, first + len(own.pages)))
            own = replace(own, seq_id=10**6, num_tokens=num_tokens, pages=pages)
            plan = StepPlan(step_id=1, sequences=(*plan.sequences, own))
            took = {}
            for how in ("captured", "eager"):
                runner._graphs = graphs if how == "captured" else None
                took[how] = self.engine.step_s(plan)
            runner._graphs = graphs
            rows.append(
                {
                    "decoding": self._batch - 1,
                    "prompt": num_tokens,
                    "captured ms": took["captured"] * 1e3,
                    "eager ms": took["eager"] * 1e3,
                    "eager over captured": took["eager"] / took["captured"],
                }
            )
        return rows

    def imbalance(self) -> list[Row]:
        """Return steps of short contexts with and without a long one among them."""
        most = self.engine.parts.base.max_model_len - 1
        short = self.engine.plan(self._batch, (), 0)
        pages = self.engine.parts.num_pages
        rows = []
        for length in sorted({min(times * self.sizes.context, most) for times in (1, 4, 16)}):
            # Its pages are those of others too: it is read, and its one write is overwritten.
            own = [page % pages for page in range(length // self.engine.base.page.block_size + 1)]
            long = replace(short.sequences[0], seq_id=10**6, start=length, tokens=[5] * (length + 1), pages=own)
            plan = StepPlan(step_id=1, sequences=(*short.sequences[1:], long))
            rows.append({"short": len(short.sequences) - 1, "long": length, "step ms": self.engine.step_s(plan) * 1e3})
        first = rows[0]["step ms"]
        return [row | {"over equal lengths": row["step ms"] / first} for row in rows]

    def prefill(self) -> list[Row]:
        """Return the attention of a prompt, ours over pages and the library's over contiguous tensors."""
        pool = self.engine.executor._copies.pages
        shape, dtype = pool.shape, DTYPES[self.sizes.dtype]
        heads, kv_heads = self.sizes.model["num_attention_heads"], shape.num_kv_heads
        rows = []
        most = self.engine.parts.base.max_model_len
        for num_tokens in sorted({min(n, most) for n in (512, 2048, 8192)}):
            (own,) = self.engine.prompt_plan().sequences
            pages = tuple(range(-(-num_tokens // shape.block_size)))
            plan = replace(own, num_tokens=num_tokens, tokens=[1] * num_tokens, pages=pages)
            kernel = TritonAttentionKernel(make_device_ops(self.device), pool, max_num_seqs=1, max_model_len=most)
            step = kernel.prepare([plan])
            query = torch.randn(heads, num_tokens, shape.head_dim, device=self.device).to(dtype)
            key, value = (
                torch.randn(kv_heads, num_tokens, shape.head_dim, device=self.device).to(dtype) for _ in range(2)
            )
            module: Any = SimpleNamespace(layer_idx=0)
            call = AttentionCall(module, query, key, value, 0.1, None, None, None, {})

            def ours(call: AttentionCall = call, step: Any = step) -> None:
                step.attend(call)

            def library(query: Any = query, key: Any = key, value: Any = value) -> None:
                torch.nn.functional.scaled_dot_product_attention(
                    query[None], key[None], value[None], is_causal=True, scale=0.1, enable_gqa=True
                )

            works = (captured(work, self.device) for work in (ours, library))
            own_s, library_s = (seconds(work, self.device, self.sizes.rounds) for work in works)
            operations = 2 * 2 * heads * shape.head_dim * num_tokens**2 / 2
            rows.append(
                {
                    "tokens": num_tokens,
                    "ours ms": own_s * 1e3,
                    "ours TFLOPS": operations / own_s / 1e12,
                    "library's ms": library_s * 1e3,
                    "ours over the library's": own_s / library_s,
                }
            )
        return rows

    def sampler(self) -> list[Row]:
        """Return the choice of tokens in one launch, and by the CPU's operations on the device."""
        vocab = self.sizes.model["vocab_size"]
        ops = make_device_ops(self.device)
        logits = torch.randn(self._batch, vocab, device=self.device) * 3
        own = self.engine.plan(self._batch, (), 0).sequences
        rows = []
        kinds = {
            "greedy": SamplingParams(temperature=0.0),
            "draw": SamplingParams(),
            "top-p": SamplingParams(top_p=0.9),
            "top-k and top-p": SamplingParams(top_k=50, top_p=0.9),
            "flat, top-p": SamplingParams(temperature=5.0, top_p=0.9),
        }
        for name, sampling in kinds.items():
            numbers = row_numbers([replace(s, sampling=sampling, seed=1) for s in own], vocab)

            def plain(numbers: Any = numbers) -> torch.Tensor:
                highest, best = logits.max(dim=-1)
                return choose_tokens(logits, highest, best, numbers)

            def fused(numbers: Any = numbers) -> torch.Tensor:
                return choose_fused(logits, logits, numbers, 0, ops)

            is_same = torch.equal(fused(), plain())
            took = {how: seconds(f, self.device, self.sizes.rounds) for how, f in (("fused", fused), ("plain", plain))}
            us = {f"{how} us": took_s * 1e6 for how, took_s in took.items()}
            rows.append({"rows": self._batch, "sampling": name} | us | {"same tokens": is_same})
        return rows

    def pauses(self) -> list[Row]:
        """Return what the host adds to a step: its wall time over the device's own."""
        rows = []
        runner = self.engine.runner
        graphs = runner._graphs
        for batch in self.sizes.batches:
            wall_s = self.engine.step_s(self.engine.plan(batch, (), 0))
            device_s = wall_s
            if graphs is not None and graphs._graphs:
                fitting = [shape for shape, _ in graphs._graphs if not shape.is_mixed and shape.num_rows >= batch]
                replay: Callable[[], None] = graphs._graphs[min(fitting), b""]
                device_s = seconds(replay, self.device, self.sizes.rounds)
            ms = {"step ms": wall_s * 1e3, "replay ms": device_s * 1e3}
            rows.append({"batch": batch} | ms | {"pause us": (wall_s - device_s) * 1e6})
        return rows
