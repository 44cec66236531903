"""EleutherAI's lm-eval: a log-likelihood and a generate task on local data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'lm-eval[api]'")

ROOT = Path(__file__).parents[2]
TASKS = {"capitals_choice": "acc,none", "capitals_generate": "exact_match,none"}


def run_lm_eval(url: str, model: str, output: Path) -> dict[str, float]:
    """Return the score of each task, by lm-eval's own command line."""
    arguments = {
        "model": model,
        "base_url": f"{url}/v1/completions",
        "tokenizer": str(ROOT / "src/manylora/demo/assets/base"),
        "tokenizer_backend": "huggingface",
        "num_concurrent": "2",
        "max_length": "256",
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", ",".join(TASKS)]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
    command += ["--include_path", "tests/clients/lm_eval_tasks", "--batch_size", "8", "--output_path", str(output)]
    environment = {**os.environ, "OPENAI_API_KEY": "none", "HF_HOME": str(output / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = output.rglob("results_*.json")
    results = json.loads(found.read_text())["results"]
    return {task: results[task][metric] for task, metric in TASKS.items()}


def test_a_log_likelihood_and_a_generate_task(url: str, tmp_path: Path) -> None:
    assert run_lm_eval(url, "upper", tmp_path / "upper") == dict.fromkeys(TASKS, 1.0)
    assert run_lm_eval(url, "demo", tmp_path / "base") == dict.fromkeys(TASKS, 0.0)
