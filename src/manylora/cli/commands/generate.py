"""`manylora generate`: generate text on the terminal, without a server."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from manylora.cli.options.adapter_folders import collect_adapters
from manylora.cli.options.fields import Chosen, flags_of, with_flags
from manylora.cli.options.values import LoraDirs, LoraModules, ModelArgument, panel, resolve_model
from manylora.cli.views.terminal import fail, note, out
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig
from manylora.core.errors import AdapterNotFound
from manylora.core.options import option
from manylora.core.types import Constraint, SamplingParams

if TYPE_CHECKING:
    from manylora import Generation

__all__ = ["AnswerOptions", "generate"]

BASE = "base"

_option = partial(option, panel="Options")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """The sampling of answers."""

    max_tokens: int = _option(128, help="Most tokens in an answer.")
    temperature: float = _option(0.0, help="0 is greedy.")
    top_p: float = _option(1.0, help="Sample from the likeliest tokens with this total probability.")
    top_k: int = _option(0, help="Sample from this many of the likeliest tokens; 0 is all.")
    stop: tuple[str, ...] = _option((), help="End the answer at this text. Repeatable.")
    json_schema: str | None = _option(None, help="JSON schema that answers must match.")

    def sampling(self) -> SamplingParams:
        """Return the parameters of a request."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
            constraint=None if self.json_schema is None else Constraint("json", self.json_schema),
        )


_ENGINE = flags_of(
    *(ModelConfig, EngineConfig, AdapterConfig, MemoryConfig),
    only=(
        *("tokenizer", "revision", "dtype", "device", "max_model_len", "lora_kernel", "trust_remote_code"),
        *("seed", "adapter_dtype", "registries", "memory_bytes"),
    ),
)


@with_flags((*flags_of(AnswerOptions), *_ENGINE))
def generate(
    model: ModelArgument,
    chosen: Chosen,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="By default the lines of standard input.", show_default=False),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        panel("Adapters", "An adapter, [bold]base[/bold] or [bold]all[/bold]. Repeatable.", metavar="NAME"),
    ] = None,
    lora_modules: LoraModules = None,
    lora_dir: LoraDirs = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Apply the chat template, with each prompt as a user message.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message; implies --chat.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer.")] = False,
) -> None:
    """Answer prompts and exit.

    Every prompt is sent to every adapter named, all in one batch.

    [bold]manylora generate demo "hello world" --chat --adapter all[/bold]
    """
    prompts = prompts or _prompts_from_stdin()
    settings = chosen.all(ModelConfig, EngineConfig, AdapterConfig, MemoryConfig)
    typed = collect_adapters(lora_modules or (), lora_dir or (), registries=settings["registries"])
    checkpoint, served_name, adapters = resolve_model(model, None, typed)
    names = _answerers(adapter or [BASE], adapters)
    sampling = chosen.make(AnswerOptions).sampling()
    note(f"loading {model}")
    from manylora import Engine  # imports torch

    jobs = [(prompt, name) for prompt in prompts for name in names]
    named = [name for _, name in jobs]
    paths = {name: adapters[name] for name in names if name is not None}
    with Engine(checkpoint, adapters=paths, served_model_name=served_name, **settings) as engine:
        if chat or system is not None:
            first = [] if system is None else [{"role": "system", "content": system}]
            turns = [[*first, {"role": "user", "content": prompt}] for prompt, _ in jobs]
            answers = engine.chat(turns, adapter=named, sampling=sampling)
        else:
            answers = engine.generate([prompt for prompt, _ in jobs], adapter=named, sampling=sampling)
    for (prompt, name), answer in zip(jobs, answers, strict=True):
        _show(prompt, name or BASE, answer, as_json=as_json, is_only=len(jobs) == 1)
    errors = [answer.error for answer in answers if answer.error is not None]
    if errors:
        fail(f"{len(errors)} of {len(answers)} answers failed: {errors[0]}", code=1)


def _prompts_from_stdin() -> list[str]:
    if sys.stdin.isatty():
        note("one prompt per line, end with Ctrl-D")
    prompts = [line for line in sys.stdin.read().splitlines() if line.strip()]
    if not prompts:
        raise typer.BadParameter("none given, and none on standard input", param_hint="PROMPT")
    return prompts


def _answerers(wanted: list[str], adapters: dict[str, str]) -> list[str | None]:
    """Resolve `base` and `all`; the base is `None`, as in the offline API."""
    names: list[str | None] = []
    for name in wanted:
        if name in adapters:
            names.append(name)
        elif name == "all":
            names.extend([None, *adapters])
        elif name == BASE:
            names.append(None)
        else:
            known = ", ".join(adapters) or "none: give --lora-modules or --lora-dir"
            raise AdapterNotFound(name, f"not among the adapters given ({known})")
    return list(dict.fromkeys(names))


def _show(prompt: str, name: str, answer: Generation, *, as_json: bool, is_only: bool) -> None:
    if as_json:
        fields = {
            "model": name,
            "prompt": prompt,
            "text": answer.text,
            "num_tokens": len(answer.token_ids),
            "finish_reason": answer.finish_reason,
            "error": answer.error,
        }
        sys.stdout.write(json.dumps(fields, ensure_ascii=False) + "\n")
    elif is_only:
        sys.stdout.write(answer.text + "\n")
    else:
        out.print(Text.assemble((f"{name}  ", "bold cyan"), (prompt, "dim")), soft_wrap=True)
        out.print(Text(f"  {answer.text}"), soft_wrap=True)
