"""Compare every sampled row with transformers + PEFT and write the table.

    python bench/oracle.py

Writes ``bench/results/oracle.json`` and ``bench/results/oracle.md``.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import peft
import torch
import transformers
from publishing import publish, table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "parity"))

from parity_cases import ARCHITECTURES, FURTHER_ARCHITECTURES, run_oracle  # noqa: E402

TOLERANCE = 1e-4


def main() -> int:
    rows = []
    for architecture in [*ARCHITECTURES, *FURTHER_ARCHITECTURES]:
        with tempfile.TemporaryDirectory() as folder:
            result = run_oracle(architecture, Path(folder))
        rows.append(asdict(result))
        print(f"{architecture:12} max |difference| {result.max_error:.1e}  wrong tokens {result.num_wrong_tokens}")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    publish("oracle", {"tolerance": TOLERANCE, "versions": versions, "architectures": rows}, _report(rows, versions))
    is_ok = all(row["max_error"] <= TOLERANCE and row["num_wrong_tokens"] == 0 for row in rows)
    print("ok" if is_ok else "NOT EQUAL")
    return 0 if is_ok else 1


def _report(rows: list[dict[str, object]], versions: dict[str, str]) -> str:
    lines = [
        "# Logits against transformers + PEFT",
        "",
        "`python bench/oracle.py`: per architecture a tiny random model in fp32, 16 requests over 12 adapters (plain,",
        "rsLoRA, rank and alpha patterns, single layers, attention only, MLP only, all linears, embedding, head, both,",
        "regex, rank above the hidden size) and the base, in one engine with chunked prompts, prefix cache and",
        "pre-emptions; 64 greedy tokens each. Every sampled row is compared with `PeftModel` on that sequence alone.",
        "",
    ]
    heads = (
        "architecture",
        "rows",
        "max difference",
        "std of logits",
        "other greedy tokens",
        "pre-emptions",
        "cached tokens",
    )
    fields = ("num_rows", "max_error", "logit_std", "num_wrong_tokens", "num_preemptions", "num_cached_tokens")
    forms = ("{}", "{:.1e}", "{:.2f}", "{}", "{}", "{}")
    cells = ([form.format(row[field]) for form, field in zip(forms, fields, strict=True)] for row in rows)
    lines += table(heads, ([row["architecture"], *of_row] for row, of_row in zip(rows, cells, strict=True)))
    return "\n".join([*lines, "", f"On the CPU with {', '.join(map(' '.join, versions.items()))}."])


if __name__ == "__main__":
    raise SystemExit(main())
