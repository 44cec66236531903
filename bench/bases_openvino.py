"""The loads of `bases.py` in OpenVINO GenAI, run by an environment of its own: `PYTHON THIS FOLDER LOADS`.

The folder is what `optimum-cli export openvino --weight-format int8` (or `int4`) makes of the checkpoint, beside any
tokenizer: prompts are token ids. Everything else is as it comes: activations are rounded to 8 bits in groups and KV is
kept in 8 bits where the plug-in for the processor finds that quickest.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any


def main(folder: str, loads: list[list[int]]) -> None:
    import numpy as np
    import openvino  # type: ignore[import-not-found]
    import openvino_genai as genai  # type: ignore[import-not-found]

    tokens = max(streams * (prompt + answer) for streams, prompt, answer in loads)
    settings = genai.SchedulerConfig()
    settings.num_kv_blocks = tokens // 16 + 8 * max(streams for streams, _, _ in loads)
    settings.max_num_batched_tokens = 2048
    settings.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(folder, settings, "CPU")
    draw = random.Random(1)

    def run(streams: int, prompt: int, answer: int) -> tuple[float, float]:
        asked: Any = [
            openvino.Tensor(np.array([[draw.randrange(3, 250) for _ in range(prompt)]], np.int64))
            for _ in range(streams)
        ]
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = answer, True, False
        began = time.perf_counter()
        results = pipeline.generate(asked, [config] * streams)
        total_s = time.perf_counter() - began
        assert all(len(one.m_generation_ids[0]) == answer for one in results)
        return total_s, total_s - max(one.perf_metrics.get_ttft().mean for one in results) / 1e3

    if loads != [[1, 1, 1]]:
        for streams in sorted({streams for streams, _, _ in loads}):
            run(streams, 8, 2)
    times = [run(*load) for load in loads]
    print(json.dumps({"total_s": [total for total, _ in times], "decode_s": [decode for _, decode in times]}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
