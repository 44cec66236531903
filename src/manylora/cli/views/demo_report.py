"""Output of the demo: answers with a mark, adapters with their tiers, and how to call the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from manylora.cli.views.terminal import out
from manylora.demo import TASKS, check

__all__ = ["Answer", "print_adapters", "print_answers", "print_how_to"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of an adapter, or of the base, to a prompt."""

    model: str
    prompt: str
    text: str
    num_tokens: int


def print_answers(answers: Sequence[Answer], *, base: str, prompts: Sequence[str]) -> int:
    """Print a table of adapters by prompts with right or wrong answers; return the number of wrong ones.

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


def print_adapters(adapters: Sequence[Mapping[str, Any]]) -> None:
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


def print_how_to(url: str, *, adapter: str, prompt: str) -> None:
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
