"""`manylora check`: an adapter's folder, tensor by tensor, and whether a server answers with it as PEFT does."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from manylora.cli.options.values import parse_cache_dir, resolve_model
from manylora.cli.views.adapter_report import show_report
from manylora.cli.views.answer_source import AnswerSource
from manylora.cli.views.terminal import fail, note, out
from manylora.core.adapters.remote import Registry
from manylora.core.adapters.report import AdapterReport, ModuleVerdict, explain_adapter, inspect_adapter
from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.sources import is_url, registry_of
from manylora.core.clock import WallClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig
from manylora.core.errors import AdapterError, ConfigError

if TYPE_CHECKING:
    from manylora.execution.reference import ComparedAnswer, GivenAnswer
    from manylora.serving.text import Tokenizer

__all__ = ["check", "describe_base"]

PROMPTS = (
    "The three most important things about a good answer are",
    "def fibonacci(n):",
    "Question: Which city is the capital of France?\nAnswer:",
    "Once upon a time, in a land far away,",
)
NUM_PAGES = 8  # a small page allocator, which loading a model requires
MAX_SHOWN = 40  # modules with a fault that are shown one by one
SHOWN_CHARS = 60  # characters of the text before a difference that are shown


class Question(NamedTuple):
    """The adapter's name on a server, the prompts, and the tokens of each answer."""

    model: str
    prompts: tuple[str, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderCheck:
    """What was found in a folder."""

    report: AdapterReport | None  # its contents; ``None`` if no base can serve them
    modules: tuple[ModuleVerdict, ...]  # each module's tensors, and whether they would be applied
    problem: str | None  # the first fault, if there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCheck:
    """Answers of a server beside those of PEFT."""

    model: str  # the adapter's name on the server
    prompts: tuple[str, ...]
    answers: tuple[ComparedAnswer, ...]  # the comparison of each answer
    # Of each answer, its text before the first difference, the server's token and PEFT's.
    texts: tuple[tuple[str, str, str] | None, ...]
    explanation: str | None  # a mistake that explains all answers of the server, if there is one
    has_ids: bool  # whether the server named tokens by id: if not, its text was tokenised again


def check(
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER", help="An adapter's folder, as PEFT saves it, or its URL.")
    ],
    base: Annotated[
        str | None, typer.Option(metavar="DIR", help="The base: which tensors apply to it, and the size on the device.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A server with OpenAI's API: whether it answers as PEFT does. Needs --base."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The adapter's name there; by default found in its list of models."),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A prompt in place of the built-in ones. Repeatable.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Tokens of each answer.")] = 32,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Difference of log-probabilities that counts as rounding.")
    ] = 0.2,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Check an adapter: its tensors, its size, and the answers of a server; exit code 1 if anything is wrong.

    [bold]manylora check /adapters/sql --base /models/llama --against http://127.0.0.1:8000[/bold]
    """
    if against is not None and (base is None or is_url(adapter)):
        raise ConfigError("--against needs --base, the base that the server has, and a folder, no URL: PEFT reads both")
    place = adapter if is_url(adapter) else str(Path(adapter).expanduser())
    shape = None if base is None else describe_base(base)
    folder = _check_folder(place, shape)
    if not as_json:
        _show_folder(folder, shape)
    answers = None
    if against is not None and base is not None:
        source = AnswerSource(against, api_key)
        asked = Question(name or source.name_of(place), tuple(prompt or PROMPTS), max_tokens)
        answers = _check_answers(place, base, source, asked, tolerance)
        if not as_json:
            _show_answers(answers, source.url)
    if as_json:
        found = {**asdict(folder), "server": None if answers is None else asdict(answers)}
        sys.stdout.write(json.dumps(found, indent=2, default=bytes.hex) + "\n")
    is_different = answers is not None and any(one.first is not None for one in answers.answers)
    if folder.problem is not None or is_different:
        raise typer.Exit(1)


def _open_registry(path: str) -> Registry | None:
    """Return the reader of an adapter's URL; ``None`` for a folder."""
    if not is_url(path):
        return None
    from manylora.execution.storage.registry_process import REGISTRY_FOLDER, RegistryTerms

    cache = os.path.join(parse_cache_dir(None) or "", REGISTRY_FOLDER)
    return RegistryTerms((registry_of(path),), 120.0, cache, AdapterConfig().registry_cache_bytes).open()


def describe_base(model: str) -> BaseShape:
    """Load a model and return its shape."""
    note(f"loading {model}")
    from manylora.execution.build import build_parts  # imports torch

    checkpoint, _, _ = resolve_model(model, None, {})
    memory = MemoryConfig(num_pages=NUM_PAGES)
    config = EngineConfig(model=ModelConfig(model=checkpoint, max_model_len=memory.block_size), memory=memory)
    parts = build_parts(config, WallClock())
    parts.close()
    return parts.base


def _check_folder(place: str, shape: BaseShape | None) -> FolderCheck:
    registry, max_bytes = _open_registry(place), AdapterConfig().max_adapter_bytes
    modules = explain_adapter(place, shape, max_bytes=max_bytes, registry=registry)
    try:
        report = inspect_adapter(place, shape, max_bytes=max_bytes, registry=registry)
    except AdapterError as error:
        return FolderCheck(report=None, modules=modules, problem=error.reason)
    return FolderCheck(report=report, modules=modules, problem=report.problem)


def _show_folder(found: FolderCheck, shape: BaseShape | None) -> None:
    if found.report is not None:
        show_report(found.report, shape)
    else:
        out.print(Text.assemble(("refused: ", "bold red"), str(found.problem)))
    wrong = [one for one in found.modules if one.problem is not None]
    out.print(f"tensors of {len(found.modules) - len(wrong)} of {len(found.modules)} modules apply")
    if not wrong:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("module", style="cyan", overflow="fold")
    table.add_column("tensors", justify="right")
    table.add_column("why they do not apply", overflow="fold")
    for one in wrong[:MAX_SHOWN]:
        table.add_row(Text(one.module), str(len(one.tensors)), Text(str(one.problem)))
    if len(wrong) > MAX_SHOWN:
        table.add_row(f"and {len(wrong) - MAX_SHOWN} more (--json has all)", "", "")
    out.print(table)


def _check_answers(place: str, base: str, source: AnswerSource, asked: Question, tolerance: float) -> AnswerCheck:
    checkpoint, _, _ = resolve_model(base, None, {})
    note(f"asking {source.url} for {asked.model}, and PEFT in float32 on the CPU")
    try:
        import peft  # noqa: F401
    except ModuleNotFoundError:
        fail("--against needs peft, which is not installed: pip install peft", code=1)
    from manylora.execution.reference import Reference, compare
    from manylora.serving.text import Tokenizer

    tokenizer = Tokenizer.load(checkpoint)
    reference = Reference(checkpoint, place)
    given, has_ids = [], True
    for text in asked.prompts:
        prompt = (*tokenizer.encode(text), *reference.invocation)
        answer, is_named = _ask(source, tokenizer, asked, prompt)
        given.append(answer)
        has_ids = has_ids and is_named
    compared = [compare(one, reference.logprobs(one), tolerance) for one in given]
    is_different = any(one.first is not None for one in compared)
    return AnswerCheck(
        model=asked.model,
        prompts=asked.prompts,
        answers=tuple(compared),
        texts=tuple(_texts(tokenizer, one, seen) for one, seen in zip(given, compared, strict=True)),
        explanation=reference.explain(given, tolerance) if is_different else None,
        has_ids=has_ids,
    )


def _ask(
    source: AnswerSource, tokenizer: Tokenizer, asked: Question, prompt: tuple[int, ...]
) -> tuple[GivenAnswer, bool]:
    """Return a server's answer in token ids, and whether it named them."""
    from manylora.execution.reference import GivenAnswer

    served = source.answer(asked.model, prompt, asked.max_tokens)
    tokens, logprobs = served.token_ids(), None
    if tokens is not None and served.logprobs is not None:
        values = [value for value in served.logprobs.token_logprobs if value is not None]
        logprobs = tuple(values) if len(values) == len(tokens) else None
    ids = tokenizer.encode(served.text, add_special_tokens=False) if tokens is None else tokens
    if any(not 0 <= one < tokenizer.vocab_size for one in ids):
        raise ConfigError(f"{source.url} answered with a token that is not in the vocabulary of the base")
    return GivenAnswer(prompt=prompt, tokens=tuple(ids), logprobs=logprobs), tokens is not None


def _texts(tokenizer: Tokenizer, given: GivenAnswer, seen: ComparedAnswer) -> tuple[str, str, str] | None:
    if (first := seen.first) is None:
        return None
    before = tokenizer.decode(given.tokens[: first.position], skip_special_tokens=False)
    return before, tokenizer.token_text(first.token), tokenizer.token_text(first.expected)


def _show_answers(found: AnswerCheck, url: str) -> None:
    num_tokens = sum(one.num_tokens for one in found.answers)
    num_equal = sum(one.num_equal for one in found.answers)
    errors = [one.largest_error for one in found.answers if one.largest_error is not None]
    said = f"{num_equal} of {num_tokens} tokens of {found.model} at {url} are PEFT's most likely ones"
    if errors:
        said += f"; log-probabilities differ by at most {max(errors):.2g}"
    out.print(said)
    if not found.has_ids:
        out.print("the server names no token ids: its texts were tokenised again")
    for prompt, one, texts in zip(found.prompts, found.answers, found.texts, strict=True):
        if (first := one.first) is None or texts is None:
            continue
        before, token, expected = texts
        served = "" if first.logprob is None else f" ({first.logprob:.3f})"
        where = f"at token {first.position} of the answer to {prompt!r}"
        out.print(Text.assemble(("first difference ", "bold red"), where))
        out.print(f"  after     {before[-SHOWN_CHARS:]!r}")
        out.print(f"  server    {token!r}{served}; PEFT gives it {first.reference:.3f}")
        out.print(f"  PEFT      {expected!r} ({first.best:.3f})")
    if found.explanation is not None:
        out.print(Text.assemble(("the server answers as ", "bold red"), found.explanation))
