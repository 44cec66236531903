"""`manylora bench serve`: load for a server with OpenAI's API, and the latency that its clients see."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from manylora.cli.options.fields import Chosen, flags_of, with_flags
from manylora.cli.options.values import check_output, command_line, parse_address, repeat_option
from manylora.cli.views.simulate_report import write_results
from manylora.cli.views.terminal import note, out, progress_bar
from manylora.core.errors import ConfigError
from manylora.core.options import CheckedOptions, option
from manylora.lab.bench.ask import LoadRequest
from manylora.lab.bench.load import LoadRun, Progress, run_load
from manylora.lab.bench.report import LoadReport, make_report
from manylora.lab.bench.target import ModelNames, Target, TextPrompts, TokenPrompts, discover_models
from manylora.lab.measure import Slo
from manylora.lab.measure.plots import can_plot, plot_latencies, plot_rates
from manylora.lab.measure.tables import FigureTable, compare
from manylora.lab.workloads import AdapterSet, Workload, WorkloadSpec, make_workload, read_workload_spec
from manylora.lab.workloads.arrivals import ArrivalProcess, GammaArrivals, PoissonArrivals
from manylora.lab.workloads.lengths import Distribution, FixedTokens, ParametricLengths, UniformTokens
from manylora.lab.workloads.popularity import GeometricShares, Popularity, TurnTaking, UniformShares, ZipfShares

__all__ = ["BenchServeCommand", "LoadOptions", "bench_serve"]

POPULARITIES: Mapping[str, Popularity] = {
    "geometric": GeometricShares(),
    "random": UniformShares(),
    "round-robin": TurnTaking(),
    "zipf": ZipfShares(),
}

OBJECTIVES = {"e2el": "e2e_s", "tbt": "tbt_s", "tpot": "tpot_s", "ttft": "ttft_s"}
"""Names of SLOs in `--goodput`, and the fields of `Slo`."""

NUM_SEEN = 8  # columns of a comparison that a client can measure; the others need the server
ALL_AT_ONCE = 1e9  # requests per second that stand for an infinite rate

_server, _load, _prompts, _figures = (partial(option, panel=name) for name in ("Server", "Load", "Prompts", "Figures"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(CheckedOptions):
    """The options of `manylora bench serve`; options of the load have the names of `vllm bench serve`."""

    url: str = _server("http://127.0.0.1:8000", help="Address of the server.")
    models: tuple[str, ...] = _server(
        (), help="Adapters to request, several in a row; by default all that /v1/models lists."
    )
    base_model: str | None = _server(None, help="The base's name; by default the first model listed.")
    chat: bool = _server(False, help="Send chat completions.")
    api_key: str | None = _server(None, envvar="OPENAI_API_KEY", help="Sent as a bearer token.")
    ignore_eos: bool = _server(
        True, help="", without="Do not send ignore_eos, for servers without it: answers may end early."
    )
    extra_body: str | None = _server(None, help="JSON object of more fields for every request.")

    num_prompts: int = _load(1000, at_least=1, help="Requests to send.")
    duration_s: float | None = _load(None, help="Stop sending after this many seconds.")
    request_rate: float = _load(4.0, help="Requests per second; inf sends all at once.")
    burstiness: float = _load(
        1.0, above=0, help="Shape of the gamma distribution of gaps: 1 is Poisson, less is burstier."
    )
    random_input_len: int = _load(256, at_least=1, help="Tokens of a prompt.")
    random_output_len: int = _load(64, at_least=1, help="Tokens of an answer.")
    random_range_ratio: float = _load(
        0.0, at_least=0, at_most=0.99, help="Lengths vary by up to this share, up and down."
    )
    popularity: str = _load("random", choices=tuple(POPULARITIES), help="Distribution of requests over adapters.")
    base_share: float = _load(0.0, at_least=0, at_most=1, help="Share of requests for the base.")
    workload: str | None = _load(
        None, metavar="FILE", help="A workload in TOML, in place of the options above: traces, arrivals, locality."
    )
    traces: str | None = _load(None, metavar="DIR", help="Folder of the traces that it names.")
    seed: int = _load(0, at_least=0, help="Seed of all random draws.")

    tokenizer: str | None = _prompts(
        None, help="Tokenizer of the model, for prompts as text; by default text is short words."
    )
    text: bool = _prompts(False, help="Send prompts as text, for servers without token ids; chats always are text.")
    vocab_size: int = _prompts(100, at_least=16, help="Token ids are below this.")

    goodput: tuple[str, ...] = _figures(
        (), help="SLOs in milliseconds, several in a row: ttft:500 tpot:50 tbt:100 e2el:9000."
    )
    base_run: bool = _figures(False, help="Repeat the load on the base, to measure the cost of adapters.")
    num_warmups: int = _figures(1, at_least=0, help="Requests before the run, not measured.")
    warm_up_s: float = _figures(0.0, at_least=0, help="Seconds at the start that are not measured.")
    retries: int = _figures(0, at_least=0, help="Times that a refused request (429, 503) is sent again.")
    timeout_s: float = _figures(600.0, above=0, help="Seconds without data after which a request fails.")
    save: str | None = _figures(
        None, metavar="DIR", help="Write results.json, requests.jsonl, table.md and plots to this folder."
    )

    def slo(self) -> Slo:
        """Return the SLO of ``goodput``; ``ConfigError`` if an objective has an unknown name or no number."""
        limits: dict[str, float] = {}
        for objective in self.goodput:
            name, _, number = objective.partition(":")
            try:
                limits[OBJECTIVES[name]] = float(number) / 1e3
            except (KeyError, ValueError):
                raise ConfigError(
                    f"Got the SLO {objective!r}, expected {'|'.join(OBJECTIVES)} and milliseconds, as ttft:500"
                ) from None
        return Slo(**limits)

    def target(self) -> Target:
        """Return the server under load; ``ConfigError`` for a wrong address or body."""
        try:
            extra = None if self.extra_body is None else json.loads(self.extra_body)
        except ValueError as error:
            raise ConfigError(f"Got extra_body = {self.extra_body!r}, which is not JSON: {error}") from None
        if extra is not None and not isinstance(extra, dict):
            raise ConfigError(f"Got extra_body = {self.extra_body!r}, expected a JSON object")
        return Target(
            url=parse_address(self.url),
            is_chat=self.chat,
            api_key=self.api_key,
            ignore_eos=self.ignore_eos,
            extra=extra,
        )

    def names(self, target: Target) -> ModelNames:
        """Return the models that requests name; the server is asked for names that are not given."""
        found = asyncio.run(discover_models(target)) if self.base_model is None or not self.models else None
        return ModelNames(
            base=self.base_model or (found.base if found else ""),
            adapters=self.models or (found.adapters if found else ()),
        )

    def workload_spec(self, num_adapters: int) -> WorkloadSpec:
        """Return the workload over a number of adapters.

        ``ConfigError`` if the file of the workload is wrong, or asks for more adapters.
        """
        if self.workload is not None:
            spec = read_workload_spec(Path(self.workload), traces=None if self.traces is None else Path(self.traces))
            if spec.adapters.count > num_adapters:
                raise ConfigError(
                    f"{self.workload} asks for {spec.adapters.count} adapters and the server has {num_adapters}: set "
                    "count in [workload.adapters]"
                )
            return spec
        return WorkloadSpec(
            name=f"{num_adapters} adapters at {self.request_rate:g}/s",
            arrivals=self._arrivals(),
            lengths=ParametricLengths(
                prompt=self._lengths(self.random_input_len), output=self._lengths(self.random_output_len)
            ),
            num_requests=self.num_prompts,
            duration_s=self.duration_s,
            adapters=AdapterSet(count=num_adapters, base_share=self.base_share),
            popularity=POPULARITIES[self.popularity] if num_adapters else None,
        )

    def prompts(self) -> TokenPrompts | TextPrompts:
        """Return the source of prompts; it loads the tokenizer, if there is one."""
        vocab_size, decode = self.vocab_size, None
        if self.tokenizer is not None:
            from manylora.demo import demo_model_path
            from manylora.serving.text import Tokenizer

            loaded = Tokenizer.load(str(demo_model_path()) if self.tokenizer == "demo" else self.tokenizer)
            vocab_size, decode = loaded.vocab_size, loaded.decode
        tokens = TokenPrompts(vocab_size, self.seed)
        if not (self.text or self.chat):
            return tokens
        return TextPrompts(tokens, decode)

    def _arrivals(self) -> ArrivalProcess:
        rate = min(self.request_rate, ALL_AT_ONCE)
        if self.burstiness == 1.0:
            return PoissonArrivals(rate=rate)
        return GammaArrivals(rate=rate, cov=1 / math.sqrt(self.burstiness))

    def _lengths(self, tokens: int) -> Distribution:
        low = max(1, round(tokens * (1 - self.random_range_ratio)))
        high = round(tokens * (1 + self.random_range_ratio))
        return FixedTokens(tokens=tokens) if low >= high else UniformTokens(low=low, high=high + 1)


class BenchServeCommand(TyperCommand):
    """A command whose options accept several values, as in `vllm bench serve`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat `--goodput` and `--models` before each of their values."""
        return super().parse_args(ctx, repeat_option(args, ("--goodput", "--models")))


@with_flags(flags_of(LoadOptions))
def bench_serve(chosen: Chosen) -> None:
    """Send load to a server with OpenAI's API, and report the latency that its clients see.

    For manylora, vLLM, SGLang and others. Requests are sent when they are due, also if earlier ones have not finished.
    Ctrl-C reports the results so far.

    [bold]manylora bench serve --request-rate 8 --num-prompts 500 --popularity zipf --goodput ttft:500 tpot:50[/bold]
    """
    options = chosen.make(LoadOptions)
    slo, target = options.slo(), options.target()
    if options.save is not None:
        check_output("--save", Path(options.save), is_folder=True)
    names = options.names(target)
    load = make_workload(options.workload_spec(len(names.adapters)), options.seed)
    prompts = options.prompts()
    questions = _questions(load, names, target, prompts)
    if not questions:
        raise ConfigError("The workload has no request")
    if (lasts_s := questions[-1].at_s - questions[0].at_s) < options.warm_up_s:
        raise ConfigError(f"Got warm_up_s = {options.warm_up_s:g}, and all requests are sent within {lasts_s:.3g} s")
    is_at_once = math.isinf(options.request_rate) and options.workload is None
    rate = "all at once" if is_at_once else f"at {load.rate:.3g}/s"
    note(f"{len(questions):,} requests {rate} over {len(load.adapters)} adapters of {names.base}")

    def run(label: str, asked: Sequence[LoadRequest]) -> LoadReport:
        done = _run(options, target, asked, label)
        return make_report(done, slo=slo, offered_per_s=load.rate, warm_up_s=options.warm_up_s)

    reports = {"adapters" if names.adapters else "base": run("sent", questions)}
    if options.base_run and not any(report.num_unsent or report.num_unfinished for report in reports.values()):
        of_base = replace(load, requests=tuple(replace(request, adapter=None) for request in load.requests))
        # New prompts: those of the first run may be in the prefix cache.
        again = _questions(of_base, names, target, prompts, first_prompt=len(questions))
        reports["base alone"] = run("sent to the base", again)
    _show(reports)
    if options.save is not None:
        _save(Path(options.save), reports, load, options.url)
    if all(report.summary.num_requests == report.summary.num_errors for report in reports.values()):
        sys.exit(1)


def _questions(
    load: Workload, names: ModelNames, target: Target, prompts: TokenPrompts | TextPrompts, *, first_prompt: int = 0
) -> list[LoadRequest]:
    served = dict(zip((adapter.name for adapter in load.adapters), names.adapters, strict=False))
    questions = []
    for index, request in enumerate(load.requests):
        adapter = "" if request.adapter is None else served[request.adapter]
        body = target.body(adapter or names.base, request, prompts.make(first_prompt + index, request))
        questions.append(
            LoadRequest(
                request_id=str(index),
                at_s=request.arrival_s,
                adapter=adapter,
                num_prompt_tokens=request.num_prompt_tokens,
                body=body,
            )
        )
    return questions


def _run(options: LoadOptions, target: Target, questions: Sequence[LoadRequest], label: str) -> LoadRun:
    first = [replace(questions[0], request_id=f"warm-up-{index}") for index in range(options.num_warmups)]
    with progress_bar(label, len(questions)) as update:

        def show(progress: Progress) -> None:
            failed = f", {progress.num_failed} failed" if progress.num_failed else ""
            update(completed=progress.num_done, description=f"{label} {progress.num_sent}{failed}, ended")

        return asyncio.run(
            run_load(
                target, questions, warm_up=first, retries=options.retries, timeout_s=options.timeout_s, on_progress=show
            )
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
            out.print(label, style="bold")
        for table in report.tables():
            out.print(table.rich())
        for warning in report.generator.warnings:
            note(f"warning: {warning}")
        if report.is_counted_by_chunks:
            note("warning: the server sent no usage, so every chunk was counted as one token")
    if len(reports) > 1:
        out.print(_tax(reports).rich())


def _save(folder: Path, reports: dict[str, LoadReport], load: Workload, url: str) -> None:
    content = {
        "command": command_line(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "url": url,
        "workload": load.name,
        "runs": {label: report.as_data() for label, report in reports.items()},
    }
    records = ({"run": label, **asdict(one)} for label, report in reports.items() for one in report.records)
    parts = [f"# {load.name}", f"`{command_line()}`"]
    for label, report in reports.items():
        parts += [f"## {label}", *(table.markdown() for table in report.tables())]
        parts += [f"Warning: {warning}." for warning in report.generator.warnings]
    if len(reports) > 1:
        parts.append(_tax(reports).markdown())
    list(write_results(folder, content, records, parts))
    if can_plot():
        runs = {label: report.records for label, report in reports.items()}
        plot_latencies(runs, folder / "latency.png")
        plot_rates(runs, folder / "throughput.png")
    note(f"wrote {folder}")
