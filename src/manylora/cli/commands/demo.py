"""`manylora demo`: start the server, send prompts to all demo adapters at once, and check the answers."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from time import perf_counter
from typing import Annotated, Any

import typer

from manylora.cli.options.shared import DEMO
from manylora.cli.views.demo_report import Answer, print_adapters, print_answers, print_how_to
from manylora.cli.views.terminal import fail, is_interactive, note, out, progress_bar
from manylora.core.config import EngineConfig, ModelConfig, ServerConfig
from manylora.demo import EXAMPLE_PROMPTS, demo_adapters, demo_model_path

__all__ = ["ask_all", "demo"]

PROMPTS = tuple(prompt for prompt in EXAMPLE_PROMPTS if len(prompt) <= 12)
"""Prompts that were not trained on, short enough for a table."""

MAX_TOKENS = 64
TIMEOUT_S = 120.0


def demo(
    once: Annotated[
        bool, typer.Option("--once", help="Exit after the table; exit code 1 if an answer is wrong.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = ServerConfig().host,
    port: Annotated[int, typer.Option(help="0 picks a free one.")] = 0,
) -> None:
    """Start the server with the demo model and its twelve adapters, and send prompts to all of them at once.

    On a terminal the server then runs until Ctrl-C. Otherwise the command exits after the table.
    """
    adapters = {name: str(path) for name, path in demo_adapters().items()}
    folder = demo_model_path().with_name("adapters")
    note(f"starting the server: one base model, {len(adapters)} adapters, two processes")
    from manylora.serving.server import BackgroundServer, LoraModule  # imports the web framework

    began = perf_counter()
    with BackgroundServer(
        EngineConfig(model=ModelConfig(model=str(demo_model_path()), served_model_name=DEMO)),
        ServerConfig(host=host, port=port, lora_dirs=(str(folder),)),
        [LoraModule(name, path) for name, path in adapters.items()],
    ) as server:
        note(f"ready at {server.url} after {perf_counter() - began:.1f} s")
        began = perf_counter()
        answers = ask_all(server.url, [DEMO, *adapters], PROMPTS)
        took_s = perf_counter() - began
        wrong = print_answers(answers, base=DEMO, prompts=PROMPTS)
        num_tokens = sum(answer.num_tokens for answer in answers)
        out.print(
            f"{len(answers)} requests in flight at once over {len(adapters)} adapters and the base: "
            f"{num_tokens} tokens in {took_s:.2f} s, {num_tokens / took_s:,.0f} tokens/s"
        )
        print_adapters(_get(f"{server.url}/adapters")["data"])
        if wrong:
            fail(f"{wrong} answers of adapters are wrong", code=1)
        if once or not is_interactive():
            if not once:
                note("no terminal here, so the demo ends; `manylora serve demo` keeps serving")
            return
        print_how_to(server.url, adapter=next(iter(adapters)), prompt=PROMPTS[0])
        try:
            server.wait()
        except KeyboardInterrupt:
            note("stopping")


def ask_all(url: str, models: Sequence[str], prompts: Sequence[str]) -> list[Answer]:
    """Send every prompt to every model, all at the same time; return the answers, model by model."""
    asked = list(product(models, prompts))
    with (
        progress_bar("answers", len(asked)) as update,
        ThreadPoolExecutor(len(asked), thread_name_prefix="client") as pool,
    ):

        def ask(model: str, prompt: str) -> Answer:
            answer = _ask(url, model, prompt)
            update(advance=1)
            return answer

        return [future.result() for future in [pool.submit(ask, *one) for one in asked]]


def _ask(url: str, model: str, prompt: str) -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    reply = _get(f"{url}/v1/chat/completions", body)
    return Answer(model, prompt, reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens"])


def _get(url: str, body: Mapping[str, object] | None = None) -> Any:
    """Get JSON, or post it with a body; with the standard library, so that the demo needs no client."""
    request = urllib.request.Request(url, headers={"Content-Type": "application/json"})
    if body is not None:
        request.data = json.dumps(body).encode()
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        return json.load(reply)
