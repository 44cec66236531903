"""Compare every sampled row with transformers + PEFT and write the table.

    python bench/oracle.py

Writes ``bench/results/oracle.json`` and ``bench/results/oracle.md``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import peft
import torch
import transformers

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
    results = ROOT / "bench" / "results"
    results.mkdir(exist_ok=True)
    content = {"tolerance": TOLERANCE, "versions": versions, "architectures": rows}
    (results / "oracle.json").write_text(json.dumps(content, indent=2) + "\n")
    (results / "oracle.md").write_text(_table(rows, versions))
    is_ok = all(row["max_error"] <= TOLERANCE and row["num_wrong_tokens"] == 0 for row in rows)
    print("ok" if is_ok else "NOT EQUAL")
    return 0 if is_ok else 1


def _table(rows: list[dict[str, object]], versions: dict[str, str]) -> str:
    lines = [
        "# Logits against transformers + PEFT",
        "",
        "`python bench/oracle.py`: per architecture a tiny random model in fp32, 16 requests over 12 adapters (plain,",
        "rsLoRA, rank and alpha patterns, single layers, attention only, MLP only, all linears, embedding, head, both,",
        "regex, rank above the hidden size) and the base, in one engine with chunked prompts, prefix cache and",
        "pre-emptions; 64 greedy tokens each. Every sampled row is compared with `PeftModel` on that sequence alone.",
        "",
        "| architecture | rows | max difference | std of logits | other greedy tokens | pre-emptions | cached tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['architecture']} | {r['num_rows']} | {r['max_error']:.1e} | {r['logit_std']:.2f} | "
        f"{r['num_wrong_tokens']} | {r['num_preemptions']} | {r['num_cached_tokens']} |"
        for r in rows
    ]
    lines += ["", "On the CPU with " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
