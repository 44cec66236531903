"""Do our readers see in the public traces what their publishers and earlier analyses saw? Do our generators look alike?

Every figure below was computed before, by other code, from the same files (sizes, rates, percentiles, skew, locality);
a reader that drops rows, mixes columns or misreads times shows up as a figure that is off. The second table holds the
generators of locality against the trace that they were measured on: the hit rate of an LRU cache by its size.

Run it: ``python bench/traces.py --traces DIR`` writes ``results/traces.json`` and ``.md``. DIR holds the files
named in the table, as published. Without it there is nothing to check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from publishing import arguments, publish, table
from scipy.optimize import minimize_scalar

from manylora.lab.workloads.locality import OrderReplay, Sessions, StackDistances
from manylora.lab.workloads.popularity import Popularity, ZipfShares
from manylora.lab.workloads.traces.requests import read_requests
from manylora.lab.workloads.traces.rows import read_csv, read_json_lines
from manylora.lab.workloads.traces.services import (
    read_adapter_order,
    read_adapter_uses,
    read_calls_per_minute,
    read_client_windows,
    read_single_calls,
)
from manylora.lab.workloads.workload import FloatArray, IntArray

SLOTS = (1, 4, 8, 16, 32, 64, 128)
Numbers = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Check:
    """One figure, as it was published and as our readers see it.

    Args:
        file: Of what.
        what: Which figure.
        published: Its value.
        ours: Ours.
        tolerance: How far ours may be off: half of the last digit that is published.
    """

    file: str
    what: str
    published: float
    ours: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return abs(self.ours - self.published) <= self.tolerance * (1 + 1e-9)

    @property
    def verdict(self) -> str:
        return "" if self.agrees else "differs"


def cov(times: Numbers) -> float:
    """Return the coefficient of variation of the gaps between times."""
    gaps = np.diff(times.astype(np.float64))
    return float(np.std(gaps) / np.mean(gaps))


def zipf_exponent(counts: Numbers) -> float:
    """Return the exponent of a finite Zipf law with the greatest likelihood."""
    uses = np.sort(counts.astype(np.float64))[::-1]
    uses = uses[uses > 0]
    logs = np.log(np.arange(1, len(uses) + 1))

    def loss(s: float) -> float:
        return float(s * (uses @ logs) + uses.sum() * np.log(np.exp(-s * logs).sum()))

    return float(minimize_scalar(loss, bounds=(0.0, 4.0), method="bounded").x)


def share_of_top(counts: Numbers, num: int) -> float:
    """Return the share of the most frequent ``num``."""
    return float(np.sort(counts)[::-1][:num].sum() / counts.sum())


def lru_hit_rates(uses: Sequence[int], slots: Sequence[int] = SLOTS) -> list[float]:
    """Return the hit rate of an LRU cache of each size."""
    order: list[int] = []  # by last use, the latest last
    hits = dict.fromkeys(slots, 0)
    known: set[int] = set()
    for use in uses:
        if use in known:
            depth = next(back for back in range(1, len(order) + 1) if order[-back] == use)
            order.pop(-depth)
            for size in slots:
                hits[size] += depth <= size
        known.add(use)
        order.append(use)
    return [hits[size] / len(uses) for size in slots]


def read_metric(file: Path) -> Numbers:
    """Return the samples of a metric of GenTD26 as columns of seconds and values, in order of time."""
    rows = read_csv(file, ("timestamp_anon", "value"))
    samples = sorted((row.number("timestamp_anon"), row.number("value")) for row in rows)
    return np.asarray(samples).T


def read_users(file: Path) -> tuple[FloatArray, IntArray, IntArray]:
    """Return seconds, users by number, and used adapters of the requests in GenTD26, in the file's order."""
    users: dict[str, int] = {}
    rows = [
        (row.time_s("gmt_create"), users.setdefault(row.text("groupId"), len(users)), row.whole("num_lora"))
        for row in read_csv(file, ("gmt_create", "groupId", "num_lora"))
    ]
    at, user, num_loras = zip(*rows, strict=True)
    return np.asarray(at), np.asarray(user), np.asarray(num_loras)


def mean_hourly_rate(file: Path, model: str) -> float:
    """Return the mean over hours of the requests per second of all ServeGen clients of a model."""
    hours: dict[int, float] = {}
    for row in read_csv(file, ("model", "client_id", "hour", "mean_rate_rps")):
        if row.text("model") == model:
            hour = row.whole("hour")
            hours[hour] = hours.get(hour, 0.0) + row.number("mean_rate_rps", least=0)
    return sum(hours.values()) / (1 + max(hours))


def request_checks(traces: Path) -> Iterator[tuple[str, str, float, float, float]]:
    """Yield checks of language-model requests: file, figure, published value, ours, tolerance."""
    published = {
        "AzureLLMInferenceTrace_conv.csv": (19366, 3502, 1.09, (1155, 1020, 2735, 4142), (211, 129, 424, 601)),
        "AzureLLMInferenceTrace_code.csv": (8819, 3436, 13.2, (2048, 1469, 5188, 7436), (27.9, 13, 55, 251)),
        "mooncake_conversation_trace.jsonl": (12031, 3537, None, (12035, 6909, 27367, 85400), (343, 350, 597, 1119)),
        "mooncake_synthetic_trace.jsonl": (3993, 1022, 1.01, (15325, 11587, 38611, 66456), (149, 69, 389, 768)),
        "vidur_arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv": (
            (28257, None, None, (2588, 2730, 3702, 3933), (291, 167, 372, 3271))
        ),
        "etalon_sharegpt_8k_filtered_stats_llama2_tokenizer.csv.gz": (
            (30731, None, None, (2340, 1730, 5696, 7434), (439, 415, 834, 998))
        ),
        "etalon_bwb_stats_llama2_tokenizer_filtered_v2.csv.gz": (
            (33768, None, None, (1067, 1037, 1453, 1800), (1613, 1601, 2149, 2533))
        ),
    }
    for file, (rows, span_s, variation, *lengths) in published.items():
        trace = read_requests(traces / file)
        yield file, "requests", rows, len(trace), 0
        if span_s is not None and trace.arrival_s is not None:
            yield file, "span, s", span_s, float(trace.arrival_s[-1]), 0.5
        if variation is not None and trace.arrival_s is not None:
            yield file, "CoV of gaps", variation, cov(trace.arrival_s), 0.05 if variation > 10 else 0.005
        for name, tokens, (mean, *percentiles) in zip(
            ("prompt", "answer"), (trace.prompt, trace.output), lengths, strict=True
        ):
            yield file, f"{name}, mean tokens", mean, float(tokens.mean()), 0.05 if mean < 100 else 0.5
            for percent, value in zip((50, 90, 99), percentiles, strict=True):
                yield file, f"{name}, p{percent} tokens", value, float(np.percentile(tokens, percent)), 1.0
        if trace.prefix is not None:
            seen: set[int] = set()
            again = total = 0
            for blocks in trace.prefix:
                again += sum(block in seen for block in blocks)
                total += len(blocks)
                seen.update(blocks)
            yield file, "blocks seen before", 0.366 if "conversation" in file else 0.640, again / total, 0.0005


def adapter_checks(traces: Path) -> Iterator[tuple[str, str, float, float, float]]:
    """Yield checks of production LoRA requests."""
    file = "gentd26_data_trace_processed.csv.gz"
    order = read_adapter_order(traces / file)
    counts = np.bincount(order)
    yield file, "uses of adapters", 16709, len(order), 0
    yield file, "adapters", 874, len(counts), 0
    yield file, "used once", 134, int((counts == 1).sum()), 0
    yield file, "share of top 10", 0.280, share_of_top(counts, 10), 0.0005
    yield file, "Zipf s", 0.92, zipf_exponent(counts), 0.005
    for slots, published, rate in zip(
        (1, 4, 8, 16), (0.367, 0.752, 0.830, 0.857), lru_hit_rates(order.tolist()), strict=False
    ):
        yield file, f"LRU hit rate, {slots} slots", published, rate, 0.0005
    file = "gentd26_lora_popularity.csv"
    uses = read_adapter_uses(traces / file)
    yield file, "uses of adapters", 16709, int(uses.sum()), 0
    file = "gentd26_lora_request_trace.csv.gz"
    at, user, num_loras = read_users(traces / file)
    yield file, "requests", 26823, len(at), 0
    yield file, "span, days", 23.03, float(np.ptp(at) / 86400), 0.005
    yield file, "with an adapter", 4494, int((num_loras > 0).sum()), 0
    yield file, "users", 4247, int(user.max()) + 1, 0
    yield file, "Zipf s of users", 0.81, zipf_exponent(np.bincount(user)), 0.005
    for name, rows, mean in (("lora", 27415, 4396), ("basemodel", 7531, 21994), ("pipeline", 36046, 12028)):
        file = f"gentd26_{name}_update_latency_anon.csv.gz"
        _, values = read_metric(traces / file)
        yield file, "samples", rows, len(values), 0
        yield file, "mean, ms", mean, float(values.mean()), 0.5


def caller_checks(traces: Path) -> Iterator[tuple[str, str, float, float, float]]:
    """Yield checks of clients and functions."""
    file = "servegen_oneday_trace.csv.gz"
    yield file, "windows", 21273, len(read_client_windows(traces / file)), 0
    file = "servegen_client_summary.csv"
    summaries = [(row.text("model"), row.whole("requests")) for row in read_csv(traces / file, ("model", "requests"))]
    yield file, "clients", 387, len(summaries), 0
    for model, clients, top, exponent in (
        ("m-large", 162, 0.16, 1.14),
        ("m-mid", 109, 0.52, 1.52),
        ("m-small", 43, 0.30, 1.46),
        ("deepseek-r1", 73, 0.29, 1.18),
    ):
        requests = np.asarray([num for name, num in summaries if name == model])
        yield file, f"{model}: clients", clients, len(requests), 0
        yield file, f"{model}: share of the first", top, share_of_top(requests, 1), 0.005
        yield file, f"{model}: Zipf s", exponent, zipf_exponent(requests), 0.005
    file = "servegen_client_hourly_rate.csv.gz"
    yield file, "m-large: mean rate, 1/s", 196, mean_hourly_rate(traces / file, "m-large"), 0.5
    for file, functions, calls, peak, exponent in (
        ("azure_functions_2019_sample1000_invocations.csv.gz", 1000, 15_143_134, 23_947, 1.22),
        ("azure_functions_2019_sample500_480min_invocations.csv.gz", 500, 3_037_902, 7_603, 1.90),
    ):
        counts = read_calls_per_minute(traces / file)
        yield file, "functions", functions, len(counts), 0
        yield file, "calls", calls, int(counts.sum()), 0
        yield file, "calls in the busiest minute", peak, int(counts.sum(axis=0).max()), 0
        yield file, "Zipf s", exponent, zipf_exponent(counts.sum(axis=1)), 0.005
    file = "azure_functions_2021_excerpt_200.csv"
    single = read_single_calls(traces / file)
    yield file, "calls", 199, len(single.arrival_s), 0
    yield file, "functions", 31, int(single.function.max()) + 1, 0
    yield file, "CoV of gaps (starts)", 1.9, cov(single.arrival_s), 0.05
    for file, rows in (("gsm8k_test.jsonl", 1319), ("gsm8k_train.jsonl", 7473)):
        yield file, "questions", rows, sum(1 for _ in read_json_lines(traces / file)), 0


def locality(traces: Path) -> dict[str, list[float]]:
    """Return LRU hit rates by :data:`SLOTS` of the recorded order of adapters and of every model of it."""
    recorded = OrderReplay(file=traces / "gentd26_data_trace_processed.csv.gz")
    models: dict[str, Popularity] = {
        "the trace itself": recorded,
        "stack distances": StackDistances(file=traces / "gentd26_lora_lru_stack_distance.csv"),
        "5 sessions at once": Sessions(num_at_once=5),
        "20 sessions at once": Sessions(num_at_once=20),
        "100 sessions at once": Sessions(num_at_once=100),
        "independent, Zipf-Mandelbrot": ZipfShares(),
    }
    times, ranks = np.arange(16_709, dtype=np.float64), [16] * 874
    return {
        name: lru_hit_rates(model.assign(times, ranks, np.random.default_rng(0)).tolist())
        for name, model in models.items()
    }


def number(value: float) -> str:
    """Return a count in full, anything else to four digits."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}" if value < 1000 else f"{value:,.1f}"


def report(checks: Sequence[Check], rates: dict[str, list[float]]) -> str:
    lines = [
        "# Public traces as our readers see them",
        "",
        "Command: `python bench/traces.py --traces DIR`. What follows from the files and a seed is exact.",
        "",
        f"{sum(check.agrees for check in checks)} of {len(checks)} figures agree with the published ones to the digit "
        "they are published to (percentiles to one token: rules of interpolation differ).",
        "",
        *table(
            ("file", "figure", "published", "ours", ""),
            ((one.file, one.what, number(one.published), number(one.ours), one.verdict) for one in checks),
            left=2,
        ),
        "",
        "## Locality: hit rate of an LRU cache, by adapters that fit",
        "",
        "16,709 uses of up to 874 adapters, one seed. Independent draws of the trace's own popularity are what most",
        "published evaluations use; sessions keep their measured lengths and are set apart by how many overlap.",
        "",
        *table(
            ("adapters that fit", *SLOTS),
            ((name, *(f"{rate:.3f}" for rate in row)) for name, row in rates.items()),
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, quick="the same")
    parser.add_argument("--traces", type=Path, help="folder with the published files")
    args = parser.parse_args()
    if args.traces is None:
        print("nothing to check without --traces DIR")
        return
    groups: tuple[Callable[[Path], Iterator[tuple[str, str, float, float, float]]], ...]
    groups = (request_checks, adapter_checks, caller_checks)
    checks = [Check(*check) for group in groups for check in group(args.traces)]
    rates = locality(args.traces)
    text = report(checks, rates)
    figures = {"checks": [asdict(check) for check in checks], "lru_hit_rates": {"slots": SLOTS, **rates}}
    publish("traces", figures, text, is_kept=not args.quick)


if __name__ == "__main__":
    main()
