"""A cost profile made up by hand, for tests."""

from __future__ import annotations

from manylora.sim.profile import CostProfile, LoadCost, RowCost
from manylora.sim.shapes import llama_3_8b_shape

TRUTH = {
    "step": 3e-3,
    "context_token": 2e-7,
    "prompt_pair": 5e-9,
    "adapter": 1e-4,
    "rank": 2e-5,
    "decode_row_rank": 1e-6,
    "prompt_row_rank": 4e-7,
}
ROWS = RowCost(knots=(0, 16, 64), row_s=(1e-5, 4e-5, 8e-5))


def make_profile(**fields: object) -> CostProfile:
    known: dict[str, object] = {
        "base": llama_3_8b_shape(),
        "num_pages": 600,
        "machine": "a machine",
        "lora_kernel": "grouped",
        "command": "by hand",
        "terms": TRUTH,
        "rows": ROWS,
        "turn_s": 2e-4,
        "turn_sequence_s": 1e-6,
        "loads": {
            "host": LoadCost(fixed_s=2e-3, byte_s=1e-9, num_measured=9),
            "device": LoadCost(fixed_s=1e-3, byte_s=1e-10, num_measured=9),
        },
        "noise": {},
        "errors": (),
        "num_steps": 100,
    }
    return CostProfile(**{**known, **fields})  # type: ignore[arg-type]
