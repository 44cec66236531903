"""When does CPU assistance pay? Time to first token of a cold request by rank, prompt, link, cores, device and queue.

    python bench/cold_map.py [--quick]

Each point is one cold request that arrives at the end of a step, beside a batch that decodes, with other adapters'
copies queued on the link before its own. It starts in four ways on the simulated executor, whose steps wait layer by
layer for weights, or for CPU workers, as live ones do:

* *wait*: the batch decodes on until the copy is complete; the next step has the prompt;
* *layers*: the next step has the prompt, and waits for each layer of the weights;
* *assist*: the next step has the prompt, and CPU workers compute the adapter from the host image;
* *both*: as assist, and the device computes each layer whose weights have arrived when the step comes to it.

The gain of assistance is the share that it saves of the time to first token of the better of wait and layers. The
requests beside it pay the delay of that step. Writes `results/cold_map.json` and `.md`: the same digits on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cold_map_points import CORES, DEVICES, LINKS, MODEL, PROMPTS, QUEUED, RANKS, Point, make_points
from publishing import arguments, publish, table

from manylora.lab.catalog.hardware import HARDWARE

WORTH = 0.05
"""Least gain for which cores are worth their while."""


class Map:
    """Points by their place."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = {
            (one.device, one.modules, one.link_bytes_per_s, one.cores, one.rank, one.prompt, one.queued): one
            for one in points
        }

    def at(
        self,
        device: str,
        rank: int,
        prompt: int,
        queued: int,
        *,
        cores: int = 32,
        modules: str = "q, k, v",
        link: float = 0,
    ) -> Point:
        """Return a point, by default on the device's own link."""
        link = link or HARDWARE[device].link_bytes_per_s
        return self._points[device, modules, link, cores, rank, prompt, queued]

    def least_queued(self, device: str, rank: int, prompt: int, **place: object) -> str:
        """Return the least number of queued copies from which assistance is worth its while."""
        for queued in QUEUED:
            if self.at(device, rank, prompt, queued, **place).gain >= WORTH:  # type: ignore[arg-type]
                return str(queued)
        return "-"


def page(points: Sequence[Point]) -> str:
    """Return the tables."""
    found = Map(points)
    lines = [
        "# When CPU assistance pays",
        "",
        f"`python bench/cold_map.py`: {MODEL}, one cold request beside 16 that decode with adapters of their own. "
        "Simulated, with steps by the data sheet and workers as live: rows are divided by the same code, among 16 "
        "at most, at the rates of a core of [workers.md](workers.md), with 10 us a handoff and activations in float32 "
        "over the link. The gain is the share of the time to first token that assistance saves against the better of "
        "*wait* and *layers*.",
        "",
        "## Queued copies from which assistance saves 5 % of the time to first token",
        "",
        "Rank 64 on q, k and v, 32 cores, by tokens of the prompt; `-`: more than 16.",
        "",
        *table(
            ("device", "link, GB/s", "own copy, ms", *PROMPTS),
            (
                (
                    device,
                    f"{link / 1e9:g}",
                    f"{1e3 * found.at(device, 64, 64, 0, link=link).copy_s:.1f}",
                    *(found.least_queued(device, 64, prompt, link=link) for prompt in PROMPTS),
                )
                for device in DEVICES
                for link in LINKS
            ),
        ),
        "",
        "By rank, modules and cores, on the device's own link, for a prompt of 64 tokens:",
        "",
        *table(
            ("device", "modules", *(f"rank {rank}, {cores} cores" for rank in RANKS for cores in CORES)),
            (
                (
                    device,
                    modules,
                    *(
                        found.least_queued(device, rank, 64, modules=modules, cores=cores)
                        for rank in RANKS
                        for cores in CORES
                    ),
                )
                for device in DEVICES
                for modules in ("q, k, v", "all")
            ),
            left=2,
        ),
        "",
        "## Times to first token, in ms",
        "",
        "Rank 64 on q, k and v, 32 cores, the device's own link. The requests beside it pay the delay.",
        "",
        *table(
            (
                *("device", "prompt", "queued", "resident", "wait", "layers", "assist", "both", "gain of assist"),
                *("delay by layers", "by assist"),
            ),
            (
                (one.device, one.prompt, one.queued, *_times(one))
                for device in DEVICES
                for prompt in (64, 512)
                for one in (found.at(device, 64, prompt, queued) for queued in (0, 1, 4, 16))
            ),
        ),
        "",
        *_losses(points),
        "",
        *_advice(found),
    ]
    return "\n".join(lines)


def _losses(points: Sequence[Point]) -> list[str]:
    """Return a table of what one way for all requests loses against the best of all four at each point."""
    rows = []
    for way in ("wait", "layers", "assist", "both"):
        losses = np.array([getattr(one, f"{way}_s") / one.best_s - 1.0 for one in points])
        mean, tail, near = np.mean(losses), np.quantile(losses, 0.99), np.mean(losses <= WORTH)
        rows.append((way, f"{near:.0%}", f"{mean:+.0%}", f"{tail:+.0%}"))
    return [
        "## One way for all requests, against the best of the four at each point",
        "",
        f"All {len(points):,} points, each counted once.",
        "",
        *table(("way", "within 5 %", "mean", "P99"), rows),
    ]


def _advice(found: Map) -> list[str]:
    alone = found.at("h100", 64, 64, 0)
    layers_ms, assist_ms = 1e3 * (alone.layers_s - alone.step_s), 1e3 * (alone.assist_s - alone.step_s)
    short, longer = found.least_queued("h100", 64, 64), found.least_queued("h100", 64, 128)
    return [
        "## With an H100 and PCIe 5",
        "",
        "Let a cold request run on the layers of its adapter as they arrive: alone on the link, at rank 64 and 64 "
        f"tokens, it starts {layers_ms:.1f} ms later than with a resident adapter ({assist_ms:.1f} ms later with 32 "
        f"cores). Give cores to assistance only where {short} or more copies queue before a prompt of 64 tokens "
        f"(one of 128: {longer}), and let the device compute every layer that has arrived.",
    ]


def _times(one: Point) -> tuple[str, ...]:
    times = (one.step_s, one.wait_s, one.layers_s, one.assist_s, one.both_s)
    delays = (one.layers_s - one.step_s, max(0.0, one.assist_s - one.step_s))
    return (*(f"{1e3 * one:.1f}" for one in times), f"{one.gain:+.0%}", *(f"{1e3 * one:.1f}" for one in delays))


def as_figures(points: Sequence[Point]) -> dict[str, object]:
    """Return the gains in per cent by place, one line for each, over the numbers of queued copies."""
    gains: dict[str, list[str]] = {}
    for one in points:
        link = f"{one.link_bytes_per_s / 1e9:g} GB/s"
        place = (one.device, one.modules, link, f"{one.cores} cores", f"rank {one.rank}", f"{one.prompt} tokens")
        gains.setdefault(" | ".join(place), []).append(f"{100 * one.gain:.1f}")
    return {"queued": QUEUED, "gain_percent": {place: " ".join(each) for place, each in gains.items()}}


def main() -> None:
    options = arguments(__doc__, quick="a few points").parse_args()
    points = list(make_points(is_quick=options.quick))
    if options.quick:
        print(
            f"{len(points)} points, gains from {min(p.gain for p in points):+.0%} to {max(p.gain for p in points):+.0%}"
        )
        return
    publish("cold_map", as_figures(points), page(points))


if __name__ == "__main__":
    main()
