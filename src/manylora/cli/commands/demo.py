"""`manylora demo`: start the server, send prompts to all demo adapters at once, and check the answers."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from time import perf_counter
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from manylora.cli.options.values import DEMO
from manylora.cli.views.terminal import fail, is_interactive, note, out, progress_bar
from manylora.core.config import EngineConfig, ModelConfig, ServerConfig
from manylora.demo import EXAMPLE_PROMPTS, TASKS, check, demo_adapters, demo_model_path

__all__ = ["Answer", "ask_all", "demo", "print_answers"]

PROMPTS = tuple(prompt for prompt in EXAMPLE_PROMPTS if len(prompt) <= 12)
"""Prompts that were not trained on, short enough for a table."""

MAX_TOKENS = 64
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of an adapter, or of the base, to a prompt."""

    model: str
    prompt: str
    text: str
    num_tokens: int


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
        _print_adapters(_get(f"{server.url}/adapters")["data"])
        if wrong:
            fail(f"{wrong} answers of adapters are wrong", code=1)
        if once or not is_interactive():
            if not once:
                note("no terminal here, so the demo ends; `manylora serve demo` keeps serving")
            return
        _print_how_to(server.url, adapter=next(iter(adapters)), prompt=PROMPTS[0])
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


# -- output -----------------------------------------------------------------------------------------------------------


def print_answers(answers: Sequence[Answer], *, base: str, prompts: Sequence[str]) -> int:
    """Print a table of adapters by prompts with right or wrong answers; return the number of wrong answers.

    Answers of the base are not checked.
    """
    texts = {(answer.model, answer.prompt): answer.text for answer in answers}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("adapter", style="cyan", no_wrap=True)
    for prompt in prompts:
        table.add_column(f'"{prompt}"', overflow="fold")
    wrong = 0
    for model in dict.fromkeys(answer.model for answer in answers):
        cells = []
        for prompt in prompts:
            text = texts[model, prompt]
            if model == base:
                cells.append(Text(f"  {text}", style="dim"))
            elif check(model, prompt, text):
                cells.append(Text.assemble(("✓ ", "green"), text))
            else:
                wrong += 1
                cells.append(Text.assemble(("✗ ", "bold red"), text, (f" (not {TASKS[model].apply(prompt)})", "dim")))
        table.add_row(Text("(base alone)", style="dim") if model == base else model, *cells)
    out.print(table)
    return wrong


def _print_adapters(adapters: Sequence[Mapping[str, Any]]) -> None:
    """Print tier and size of every adapter, from `GET /adapters`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("adapter", style="cyan", no_wrap=True)
    table.add_column("tier")
    for title in ("rank", "modules", "KiB", "pages", "requests"):
        table.add_column(title, justify="right")
    table.add_column("task", style="dim")
    for adapter in sorted(adapters, key=lambda adapter: str(adapter["name"])):
        task = TASKS.get(adapter["name"])
        table.add_row(
            adapter["name"],
            adapter["tier"],
            str(adapter["rank"]),
            str(adapter["num_modules"]),
            f"{adapter['weight_bytes'] / 1024:.0f}",
            str(adapter["num_pages"]),
            str(adapter["num_requests"]),
            task.description if task else "",
        )
    out.print(table)


def _print_how_to(url: str, *, adapter: str, prompt: str) -> None:
    """Print commands that call the running server."""
    body = f'{{"model": "{adapter}", "messages": [{{"role": "user", "content": "{prompt}"}}], "temperature": 0}}'
    lines = [
        "The server is still running. Call it:",
        "",
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f"    -d '{body}'",
        "",
        "  from openai import OpenAI  # pip install openai",
        f'  client = OpenAI(base_url="{url}/v1", api_key="none")',
        f'  client.chat.completions.create(model="{adapter}", temperature=0,',
        f'      messages=[{{"role": "user", "content": "{prompt}"}}]).choices[0].message.content',
        "",
        f"Adapters: {url}/adapters   Metrics: {url}/metrics   Ctrl-C ends it.",
    ]
    out.print(Text("\n".join(lines)), soft_wrap=True)
