"""What the host does before a captured decode step can be replayed, without a GPU: numbers into buffers.

    python bench/graph_inputs.py

Llama-3-8B's 129 groups, contexts of 700 tokens, every sequence with an adapter of its own of rank 32 on all linears.
*inputs* is every step's; *adapters* only when the batch changes; *table* once per adapter, when it arrives. The copies
to a device are not in it. Medians of 60 rounds; the least as well, for machines that are not quiet. Writes
`bench/results/graph_inputs.json` and `.md`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from publishing import publish, table

from manylora.core.adapters.layout import lay_out
from manylora.core.adapters.shape import PageShape
from manylora.core.plan import PlannedSequence
from manylora.core.types import SamplingParams
from manylora.execution.attention.page_tables import PageTables
from manylora.execution.decode_graphs import DecodeGraphs
from manylora.execution.device import DeviceOps, describe_machine
from manylora.execution.lora.batch import StepContext
from manylora.execution.lora.comparison import apply_naive
from manylora.execution.lora.tables import LoraSpace, StepTables, measure
from manylora.execution.storage.page_tensor import PageTensor
from manylora.execution.storage.tile_tables import AdapterTable, GroupDirectory, make_template
from manylora.lab.catalog.models import base_shape

CONTEXT, RANK, BLOCK = 700, 32, 16


def microseconds(work: Callable[[], object]) -> tuple[float, float]:
    times = []
    for _ in range(60):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times), min(times)


def main() -> None:
    base, cpu = base_shape("llama-3-8b"), torch.device("cpu")
    # Only the numbers matter, so the pages are small.
    page = PageShape(block_size=BLOCK, num_layers=1, num_kv_heads=1, head_dim=1, element_bytes=4, dtype="float32")
    pool = PageTensor(page, 8000, cpu)
    directory = GroupDirectory.of(base)
    space = LoraSpace(directory, pool.flat)
    layout = lay_out(dict.fromkeys(base.all_linear, RANK), base)
    template = make_template(layout, directory)
    adapter_pages = range(layout.num_pages)
    rows = []
    for batch in (1, 32, 64, 128):
        graphs = DecodeGraphs(
            ops=DeviceOps(cpu),
            model=torch.nn.Identity(),
            step=StepContext(apply_naive),
            pages=pool,
            tables=PageTables(DeviceOps(cpu), num_lines=160, width=512),
            vocab_size=8,
            max_num_seqs=128,
            space=space,
        )
        per_sequence = CONTEXT // BLOCK + 1
        sequences = [
            PlannedSequence(
                seq_id=i,
                tokens=[1] * (CONTEXT + 1),
                num_prompt_tokens=1,
                start=CONTEXT,
                num_tokens=1,
                pages=list(range(i * per_sequence, (i + 1) * per_sequence)),
                adapter=None,
                rank=0,
                sampling=SamplingParams(),
                is_sampled=True,
                seed=0,
            )
            for i in range(batch)
        ]
        lines = [(i, i + 1, AdapterTable.put(template, adapter_pages, page.num_elements, cpu)) for i in range(batch)]
        tables = StepTables(space, measure(lines, 16), 16)
        work: dict[str, Callable[[], object]] = {
            "inputs": partial(graphs._write_inputs, sequences, batch),
            "adapters": partial(tables.write, lines),
            "table": partial(template.place, adapter_pages, page.num_elements),
        }
        row: dict[str, float] = {"batch": batch}
        for name, one in work.items():
            row[f"{name} us"], row[f"{name} us, least"] = microseconds(one)
        rows.append(row)
    report = {"command": "python bench/graph_inputs.py", "machine": describe_machine(cpu), "rows": rows}
    head = f"# The host's share of a captured decode step\n\n{report['machine']}; `{report['command']}`.\n"
    lines_of_text = table(list(rows[0]), ([f"{value:.0f}" for value in row.values()] for row in rows), left=0)
    publish("graph_inputs", report, "\n".join([head, *lines_of_text]))


if __name__ == "__main__":
    main()
