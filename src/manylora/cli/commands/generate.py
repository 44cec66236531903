"""`manylora generate`: generate text on the terminal, without a server."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from manylora.cli.options.adapter_folders import collect_adapters
from manylora.cli.options.fields import Chosen, flags_of, with_flags
from manylora.cli.options.values import LoraDirs, LoraModules, ModelArgument, panel, parse_cache_dir, resolve_model
from manylora.cli.views.terminal import fail, note, out
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig
from manylora.core.errors import AdapterNotFound
from manylora.core.types import Constraint, SamplingParams

if TYPE_CHECKING:
    from manylora import Generation

__all__ = ["generate"]

BASE = "base"

_FLAGS = flags_of(
    *(ModelConfig, EngineConfig, AdapterConfig, MemoryConfig),
    only=(
        *("tokenizer", "revision", "dtype", "device", "max_model_len", "lora_kernel", "trust_remote_code"),
        *("seed", "adapter_dtype", "registries", "memory_bytes"),
    ),
)


@with_flags(_FLAGS)
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
    max_tokens: Annotated[int, typer.Option(help="Most tokens in an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many of the likeliest tokens; 0 is all.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer at this text. Repeatable.")] = None,
    json_schema: Annotated[str | None, typer.Option(help="JSON schema that answers must match.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer.")] = False,
) -> None:
    """Answer prompts and exit.

    Every prompt is sent to every adapter named, all in one batch.

    [bold]manylora generate demo "hello world" --chat --adapter all[/bold]
    """
    prompts = prompts or _prompts_from_stdin()
    options = chosen.all()
    typed = collect_adapters(lora_modules or (), lora_dir or (), registries=options.get("registries") or ())
    checkpoint, served_name, adapters = resolve_model(model, None, typed)
    names = _answerers(adapter or [BASE], adapters)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=tuple(stop or ()),
        constraint=None if json_schema is None else Constraint("json", json_schema),
    )
    note(f"loading {model}")
    from manylora import Engine  # imports torch

    if options.get("cache_dir") is not None:
        options["cache_dir"] = parse_cache_dir(options["cache_dir"])
    jobs = [(prompt, name) for prompt in prompts for name in names]
    with Engine(
        checkpoint,
        adapters={name: adapters[name] for name in names if name is not None},
        served_model_name=served_name,
        **options,
    ) as engine:
        named = [name for _, name in jobs]
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
