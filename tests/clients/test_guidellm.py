"""guidellm's benchmark of an adapter: by chats and by completions, one by one and several at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("guidellm")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("profile", ["kind=synchronous", "kind=concurrent,streams=3"])
def test_a_benchmark_of_an_adapter(url: str, tmp_path: Path, path: str, profile: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("hello world", "tiny llama")) * 6)
    report = tmp_path / "report.json"
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={url},model=upper,request_format={path}"]
    command += ["--data", f"kind=json_file,path={data}", "--profile", profile]
    command += ["--constraint", "kind=max_requests,count=8", "--output", f"kind=json,path={report}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (8, 0)
