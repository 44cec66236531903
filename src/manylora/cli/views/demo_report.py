"""What the demo prints: answers with a mark, adapters and where they are, and how to go on."""

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
    """What one model said to one prompt.

    Args:
        model: The adapter, or the base.
        prompt: What was asked.
        text: What came back.
        num_tokens: Tokens generated.
    """

    model: str
    prompt: str
    text: str
    num_tokens: int


def print_answers(answers: Sequence[Answer], *, base: str, prompts: Sequence[str]) -> int:
    """Print adapters by prompts, each answer with a mark of right or wrong; the base has nothing to be right about.

    Returns:
        How many answers of adapters are wrong.
    """
    said = {(answer.model, answer.prompt): answer.text for answer in answers}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("adapter", style="cyan", no_wrap=True)
    for prompt in prompts:
        table.add_column(f'"{prompt}"', overflow="fold")
    wrong = 0
    for model in dict.fromkeys(answer.model for answer in answers):
        cells = []
        for prompt in prompts:
            text = said[model, prompt]
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
    """Print where every adapter is and what it takes, as `GET /adapters` tells it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("adapter", style="cyan", no_wrap=True)
    table.add_column("tier")
    for title in ("rank", "modules", "KiB", "pages", "requests"):
        table.add_column(title, justify="right")
    table.add_column("what it does", style="dim")
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
    """Print how to talk to the server that is still running."""
    body = f'{{"model": "{adapter}", "messages": [{{"role": "user", "content": "{prompt}"}}], "temperature": 0}}'
    lines = [
        "The server is still running. Talk to it:",
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
