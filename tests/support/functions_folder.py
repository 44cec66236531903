"""A folder with a tiny base, three adapters and a file of functions, and requests to them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
from bad_adapters import tiny_base, write_good_adapter
from live_model import VOCAB_SIZE, write_model

NAMES = ("f0", "f1", "f2")
PATIENCE_S = 240.0


@contextlib.contextmanager
def functions_folder() -> Iterator[Path]:
    """Make the folder, open to all users; pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="manylora-functions-") as made:
        folder = Path(made).resolve()
        write_model(folder / "base")
        lines = ['[backbones.tiny]\nmodel = "base"\n[node]\npreload = false\nkeep-alive-s = 3600\n']
        for seed, name in enumerate(NAMES):
            write_good_adapter(folder / name, tiny_base(vocab=VOCAB_SIZE), seed=seed)
            lines.append(
                f'[functions.{name}]\nbackbone = "tiny"\nadapter = "{name}"\ntenant = "t{seed % 2}"\nthreads = 1\n'
            )
        (folder / "functions.toml").write_text("".join(lines))
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield folder


def ask(url: str, model: str, num_tokens: int = 24, *, key: str = "") -> httpx.Response:
    body = {"model": model, "prompt": "one two three", "max_tokens": num_tokens, "temperature": 0.8, "seed": 7}
    body |= {"logprobs": 0, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(url + "/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)


def tokens_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    tokens: list[str] = answer.json()["choices"][0]["logprobs"]["tokens"]
    return tokens
