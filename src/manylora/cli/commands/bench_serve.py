"""`manylora bench serve`: load for a server with OpenAI's API, and the latency that its clients see."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer.core import TyperCommand

from manylora.cli.options.values import panel, parse_address, repeat_option
from manylora.cli.views.terminal import note, out, progress_bar
from manylora.core.errors import ConfigError
from manylora.lab.measure import Slo
from manylora.lab.measure.plots import can_plot, plot_latencies, plot_rates
from manylora.lab.measure.tables import FigureTable, compare
from manylora.lab.workloads import AdapterSet, Workload, WorkloadSpec, make_workload, read_workload_spec
from manylora.lab.workloads.arrivals import ArrivalProcess, GammaArrivals, PoissonArrivals
from manylora.lab.workloads.lengths import Distribution, FixedTokens, ParametricLengths, UniformTokens
from manylora.lab.workloads.popularity import GeometricShares, Popularity, TurnTaking, UniformShares, ZipfShares

if TYPE_CHECKING:
    from manylora.lab.bench.ask import LoadRequest
    from manylora.lab.bench.load import LoadRun
    from manylora.lab.bench.report import LoadReport
    from manylora.lab.bench.target import ModelNames, Target

__all__ = ["BenchServeCommand", "bench_serve", "parse_goodput"]

POPULARITIES: dict[str, Popularity] = {
    "geometric": GeometricShares(),
    "random": UniformShares(),
    "round-robin": TurnTaking(),
    "zipf": ZipfShares(),
}

OBJECTIVES = {"e2el": "e2e_s", "tbt": "tbt_s", "tpot": "tpot_s", "ttft": "ttft_s"}
"""Names of SLOs in `--goodput`, and the fields of `Slo`."""

NUM_SEEN = 8
"""Columns of a comparison that a client can measure; the others need the server."""

ALL_AT_ONCE = 1e9
"""Requests per second that stand for an infinite rate."""


class BenchServeCommand(TyperCommand):
    """A command whose options accept several values, as in `vllm bench serve`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat `--goodput` and `--models` before each of their values."""
        return super().parse_args(ctx, repeat_option(args, ("--goodput", "--models")))


def parse_goodput(objectives: Sequence[str]) -> Slo:
    """Return the SLO of texts like `ttft:500 tpot:50`, in milliseconds; ``ConfigError`` for a wrong one."""
    limits: dict[str, float] = {}
    for objective in objectives:
        name, _, number = objective.partition(":")
        try:
            limits[OBJECTIVES[name]] = float(number) / 1e3
        except (KeyError, ValueError):
            raise ConfigError(
                f"Got the SLO {objective!r}, expected {'|'.join(OBJECTIVES)} and milliseconds, as ttft:500"
            ) from None
    return Slo(**limits)


def bench_serve(
    url: Annotated[str, panel("Server", "Address of the server.")] = "http://127.0.0.1:8000",
    models: Annotated[
        list[str] | None,
        panel("Server", "Adapters to request, several in a row; by default all that /v1/models lists."),
    ] = None,
    base_model: Annotated[str | None, panel("Server", "The base's name; by default the first model listed.")] = None,
    chat: Annotated[bool, panel("Server", "Send chat completions.", "--chat")] = False,
    api_key: Annotated[str | None, panel("Server", "Sent as a bearer token.", envvar="OPENAI_API_KEY")] = None,
    no_ignore_eos: Annotated[
        bool,
        panel("Server", "Do not send ignore_eos, for servers without it: answers may end early.", "--no-ignore-eos"),
    ] = False,
    extra_body: Annotated[str | None, panel("Server", "JSON object of more fields for every request.")] = None,
    num_prompts: Annotated[int, panel("Load", "Requests to send.", min=1)] = 1000,
    duration: Annotated[float | None, panel("Load", "Stop sending after this many seconds.")] = None,
    request_rate: Annotated[float, panel("Load", "Requests per second; inf sends all at once.")] = 4.0,
    burstiness: Annotated[
        float, panel("Load", "Shape of the gamma distribution of gaps: 1 is Poisson, less is burstier.")
    ] = 1.0,
    random_input_len: Annotated[int, panel("Load", "Tokens of a prompt.", min=1)] = 256,
    random_output_len: Annotated[int, panel("Load", "Tokens of an answer.", min=1)] = 64,
    random_range_ratio: Annotated[
        float, panel("Load", "Lengths vary by up to this share, up and down.", min=0.0, max=0.99)
    ] = 0.0,
    popularity: Annotated[
        str, panel("Load", "Distribution of requests over adapters.", metavar="|".join(POPULARITIES))
    ] = "random",
    base_share: Annotated[float, panel("Load", "Share of requests for the base.", min=0.0, max=1.0)] = 0.0,
    workload: Annotated[
        Path | None,
        panel("Load", "A workload in TOML, in place of the options above: traces, arrivals, locality.", metavar="FILE"),
    ] = None,
    traces: Annotated[Path | None, panel("Load", "Folder of the traces that it names.", metavar="DIR")] = None,
    seed: Annotated[int, panel("Load", "Seed of all random draws.", min=0)] = 0,
    tokenizer: Annotated[
        str | None, panel("Prompts", "Tokenizer of the model, for prompts as text; by default text is short words.")
    ] = None,
    text: Annotated[
        bool,
        panel("Prompts", "Send prompts as text, for servers without token ids; chats always are text.", "--text"),
    ] = False,
    vocab_size: Annotated[int, panel("Prompts", "Token ids are below this.", min=16)] = 100,
    goodput: Annotated[
        list[str] | None,
        panel("Figures", "SLOs in milliseconds, several in a row: ttft:500 tpot:50 tbt:100 e2el:9000."),
    ] = None,
    base_run: Annotated[
        bool,
        panel("Figures", "Repeat the load on the base, to measure the cost of adapters.", "--base-run"),
    ] = False,
    num_warmups: Annotated[int, panel("Figures", "Requests before the run, not measured.", min=0)] = 1,
    warm_up: Annotated[float, panel("Figures", "Seconds at the start that are not measured.", min=0.0)] = 0.0,
    retries: Annotated[int, panel("Figures", "Times that a refused request (429, 503) is sent again.", min=0)] = 0,
    timeout: Annotated[float, panel("Figures", "Seconds without data after which a request fails.")] = 600.0,
    save: Annotated[
        Path | None,
        panel("Figures", "Write results.json, requests.jsonl, table.md and plots to this folder.", metavar="DIR"),
    ] = None,
) -> None:
    """Send load to a server with OpenAI's API, and report the latency that its clients see.

    For manylora, vLLM, SGLang and others. Requests are sent when they are due, also if earlier ones have not finished.
    Ctrl-C reports the results so far.

    [bold]manylora bench serve --request-rate 8 --num-prompts 500 --popularity zipf --goodput ttft:500 tpot:50[/bold]
    """
    from manylora.lab.bench.report import make_report
    from manylora.lab.bench.target import ModelNames, Target, discover_models

    slo = parse_goodput(goodput or ())
    if popularity not in POPULARITIES:
        raise ConfigError(f"Got popularity = {popularity!r}, expected one of {', '.join(POPULARITIES)}")
    target = Target(
        url=parse_address(url),
        is_chat=chat,
        api_key=api_key,
        ignore_eos=not no_ignore_eos,
        extra=_parse_extra(extra_body),
    )
    found = asyncio.run(discover_models(target)) if base_model is None or not models else None
    names = ModelNames(
        base=base_model or (found.base if found else ""),
        adapters=tuple(models or (found.adapters if found else ())),
    )
    if workload is not None:
        spec = read_workload_spec(workload, traces=traces)
        if spec.adapters.count > len(names.adapters):
            raise ConfigError(
                f"{workload} asks for {spec.adapters.count} adapters and the server has {len(names.adapters)}: set "
                "count in [workload.adapters]"
            )
    else:
        spec = WorkloadSpec(
            name=f"{len(names.adapters)} adapters at {request_rate:g}/s",
            arrivals=_arrivals(request_rate, burstiness),
            lengths=ParametricLengths(
                prompt=_lengths(random_input_len, random_range_ratio),
                output=_lengths(random_output_len, random_range_ratio),
            ),
            num_requests=num_prompts,
            duration_s=duration,
            adapters=AdapterSet(count=len(names.adapters), base_share=base_share),
            popularity=POPULARITIES[popularity] if names.adapters else None,
        )
    load = make_workload(spec, seed)
    prompts = _prompts(tokenizer, vocab_size=vocab_size, seed=seed, as_text=text or chat)
    questions = _questions(load, names, target, prompts)
    if not questions:
        raise ConfigError("The workload has no request")
    rate = "all at once" if math.isinf(request_rate) and workload is None else f"at {load.rate:.3g}/s"
    note(f"{len(questions):,} requests {rate} over {len(load.adapters)} adapters of {names.base}")

    def run(label: str, asked: Sequence[LoadRequest]) -> LoadReport:
        first = [replace(asked[0], request_id=f"warm-up-{index}") for index in range(num_warmups)]
        done = _run(target, asked, first, retries=retries, timeout_s=timeout, label=label)
        return make_report(done, slo=slo, offered_per_s=load.rate, warm_up_s=warm_up)

    reports = {"adapters" if names.adapters else "base": run("sent", questions)}
    if base_run and not any(report.num_unsent or report.num_unfinished for report in reports.values()):
        of_base = replace(load, requests=tuple(replace(request, adapter=None) for request in load.requests))
        # New prompts: those of the first run may be in the prefix cache.
        again = _questions(of_base, names, target, prompts, first_prompt=len(questions))
        reports["base alone"] = run("sent to the base", again)
    _show(reports)
    if save is not None:
        _save(save, reports, load, url)
    if all(report.summary.num_requests == report.summary.num_errors for report in reports.values()):
        sys.exit(1)


def _parse_extra(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        extra = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"Got extra_body = {text!r}, which is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"Got extra_body = {text!r}, expected a JSON object")
    return extra


def _arrivals(rate: float, burstiness: float) -> ArrivalProcess:
    rate = min(rate, ALL_AT_ONCE)
    if burstiness == 1.0:
        return PoissonArrivals(rate=rate)
    if not burstiness > 0:
        raise ConfigError(f"Got burstiness = {burstiness!r}, expected above 0")
    return GammaArrivals(rate=rate, cov=1 / math.sqrt(burstiness))


def _lengths(tokens: int, ratio: float) -> Distribution:
    low, high = max(1, round(tokens * (1 - ratio))), round(tokens * (1 + ratio))
    return FixedTokens(tokens=tokens) if low >= high else UniformTokens(low=low, high=high + 1)


def _prompts(tokenizer: str | None, *, vocab_size: int, seed: int, as_text: bool) -> Any:
    from manylora.lab.bench.target import TextPrompts, TokenPrompts

    if tokenizer is None:
        tokens = TokenPrompts(vocab_size, seed)
        return TextPrompts(tokens) if as_text else tokens
    from manylora.demo import demo_model_path
    from manylora.serving.text import Tokenizer

    loaded = Tokenizer.load(str(demo_model_path()) if tokenizer == "demo" else tokenizer)
    tokens = TokenPrompts(loaded.vocab_size, seed)
    return TextPrompts(tokens, loaded.decode) if as_text else tokens


def _questions(
    load: Workload, names: ModelNames, target: Target, prompts: Any, *, first_prompt: int = 0
) -> list[LoadRequest]:
    from manylora.lab.bench.ask import LoadRequest

    served = dict(zip((adapter.name for adapter in load.adapters), names.adapters, strict=False))
    return [
        LoadRequest(
            request_id=str(index),
            at_s=request.arrival_s,
            adapter="" if request.adapter is None else served[request.adapter],
            num_prompt_tokens=request.num_prompt_tokens,
            body=target.body(
                names.base if request.adapter is None else served[request.adapter],
                request,
                prompts.make(first_prompt + index, request),
            ),
        )
        for index, request in enumerate(load.requests)
    ]


def _run(
    target: Target,
    questions: Sequence[LoadRequest],
    first: Sequence[LoadRequest],
    *,
    retries: int,
    timeout_s: float,
    label: str,
) -> LoadRun:
    from manylora.lab.bench import load

    with progress_bar(label, len(questions)) as update:

        def show(progress: load.Progress) -> None:
            failed = f", {progress.num_failed} failed" if progress.num_failed else ""
            update(completed=progress.num_done, description=f"{label} {progress.num_sent}{failed}, ended")

        return asyncio.run(
            load.run_load(target, questions, warm_up=first, retries=retries, timeout_s=timeout_s, on_progress=show)
        )


def _tax(reports: dict[str, LoadReport]) -> FigureTable:
    """Return a comparison of two runs, with the ratios of their latencies."""
    table = compare({label: report.summary for label, report in reports.items()}, title="Cost of adapters")
    first, second = (report.summary for report in reports.values())
    ratios = [
        f"x {getattr(one, name) / getattr(other, name):.2f}" if one and other and getattr(other, name) else ""
        for one, other in ((first.ttft, second.ttft), (first.tbt, second.tbt))
        for name in ("p50", "p99")
    ]
    rows = [*(row[:NUM_SEEN] for row in table.rows), ("ratio", "", "", *ratios, "")]
    return replace(table, columns=table.columns[:NUM_SEEN], rows=tuple(rows))


def _show(reports: dict[str, LoadReport]) -> None:
    for label, report in reports.items():
        if len(reports) > 1:
            out.print(f"[bold]{label}[/bold]")
        for table in report.tables():
            out.print(table.rich())
        for warning in report.generator.warnings:
            note(f"warning: {warning}")
        if report.is_counted_by_chunks:
            note("warning: the server sent no usage, so every chunk was counted as one token")
    if len(reports) > 1:
        out.print(_tax(reports).rich())


def _save(folder: Path, reports: dict[str, LoadReport], load: Workload, url: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = "manylora " + " ".join(sys.argv[1:])
    content = {
        "command": command,
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "url": url,
        "workload": load.name,
        "runs": {label: report.as_data() for label, report in reports.items()},
    }
    (folder / "results.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    with (folder / "requests.jsonl").open("w", encoding="utf-8") as file:
        for label, report in reports.items():
            for record in report.records:
                file.write(json.dumps({"run": label, **asdict(record)}) + "\n")
    parts = [f"# {load.name}", f"`{command}`"]
    for label, report in reports.items():
        parts += [f"## {label}", *(table.markdown() for table in report.tables())]
        parts += [f"Warning: {warning}." for warning in report.generator.warnings]
    if len(reports) > 1:
        parts.append(_tax(reports).markdown())
    (folder / "table.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    if can_plot():
        runs = {label: report.records for label, report in reports.items()}
        plot_latencies(runs, folder / "latency.png")
        plot_rates(runs, folder / "throughput.png")
    note(f"wrote {folder}")
