"""Reports of results beside the published figures, in Markdown with pictures."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import isfinite

from manylora.lab.experiments.cases import reads_traces
from manylora.lab.experiments.findings import Comparison, Findings, Verdict, overall
from manylora.lab.experiments.spec import Claim
from manylora.lab.measure import Estimate

__all__ = ["WORDS", "as_json", "as_markdown", "format_figure", "format_interval", "format_published"]

WORDS = {
    Verdict.AGREES: "agrees",
    Verdict.OPEN: "open",
    Verdict.DIRECTION: "agrees in direction, not in amount",
    Verdict.DIFFERS: "differs",
    Verdict.NOT_REACHED: "not reached",
    Verdict.ONE_RUN: "no verdict from one run",
    None: "nothing published in numbers",
}


def format_value(value: float, claim: Claim) -> str:
    """Return a number as its claim writes numbers."""
    if claim.form == "order":
        return "in order" if value == 1.0 else f"{value:.0%} of pairs in order"
    if claim.unit == "%":
        return f"{value:+.1%}" if claim.form in ("change", "change-at-most", "overhead") else f"{value:.1%}"
    if claim.unit == "ms":
        return f"{1e3 * value:.3g} ms"
    return f"{value:.3g} {claim.unit}".replace(" x", "x").strip()


def format_published(claim: Claim) -> str:
    """Return the published number of a claim, as a limit where it was published as one."""
    limit = "at most " if claim.form.endswith("at-most") else "at least " if claim.form == "at-least" else ""
    return limit + format_value(claim.published, claim)


def format_figure(ours: Estimate) -> str:
    """Return the mean of a figure, a dash where a run has no such figure."""
    return f"{ours.middle:.4g}" if isfinite(ours.middle) else "-"


def format_interval(ours: Estimate | None, claim: Claim) -> str:
    """Return our figure, with its 95 % interval where there is one."""
    if ours is None:
        return "-"
    text = format_value(ours.middle, claim)
    if claim.form != "order" and isfinite(ours.low) and ours.high > ours.low:
        text += f" ({format_value(ours.low, claim)} to {format_value(ours.high, claim)})"
    return text


def as_markdown(pages: Seq[tuple[Findings, Seq[str]]], command: str) -> str:
    """Return a report of experiments, each with links to its pictures by name; it names the command that makes it."""
    lines = ["# Experiments", "", f"Made by `{command}`. {_about(pages)}", "", *_overview(pages)]
    for findings, pictures in pages:
        lines += ["", *_section(findings)]
        lines += ["", *(f"![{name}]({name}.png)" for name in pictures)] if pictures else []
    return "\n".join(lines) + "\n"


def _about(pages: Seq[tuple[Findings, Seq[str]]]) -> str:
    judged = [findings for findings, _ in pages if not findings.experiment.is_ablation]
    simulated = [findings for findings in judged if findings.experiment.calculation is None]
    verdicts = [overall(findings.compare()) for findings in simulated]
    counts = ", ".join(f"{verdicts.count(one)} {WORDS[one]}" for one in WORDS if one in verdicts)
    setups = [setup for findings, _ in pages for setup in findings.experiment.setups.values()]
    by = (
        "with the decisions about functions and the engine"
        if any("functions" in one for one in setups)
        else "on the engine"
    )
    sentences = [
        f"Simulated {by} that serves, with virtual time and fixed seeds: the same digits on any machine.",
        "Intervals are 95 %, over seeds; changes and ratios are taken seed by seed.",
    ]
    if simulated:
        sentences += [f"Of {len(simulated)} figures and tables under load: {counts}."]
    if len(simulated) < len(judged):
        num = len(judged) - len(simulated)
        sentences += [f"{num} more are calculations for single requests or steps, not agreements of an evaluation."]
    return " ".join([*sentences, "Each has the verdict of its worst claim."])


def _overview(pages: Seq[tuple[Findings, Seq[str]]]) -> list[str]:
    lines = ["| | what | verdict |", "|---|---|---|"]
    for findings, _ in pages:
        experiment = findings.experiment
        verdict = _verdict(findings)
        lines.append(f"| [{experiment.name}](#{_anchor(_heading(findings))}) | {experiment.title} | {verdict} |")
    return lines


def _verdict(findings: Findings) -> str:
    if findings.experiment.is_ablation:
        return "what it takes"
    words = WORDS[overall(findings.compare())]
    return words if findings.experiment.calculation is None else f"calculated: {words}"


def _heading(findings: Findings) -> str:
    return f"{findings.experiment.name}: {findings.experiment.title}"


def _anchor(heading: str) -> str:
    return "".join(one for one in heading.lower().replace(" ", "-") if one.isalnum() or one in "-_")


def _section(findings: Findings) -> list[str]:
    experiment, comparisons = findings.experiment, findings.compare()
    lines = [f"## {_heading(findings)}", "", f"{experiment.source}. Verdict: **{_verdict(findings)}**.", ""]
    command = f"manylora experiment run {experiment.name}{' --traces DIR' if reads_traces(experiment) else ''}"
    lines += [
        f"`{command} --seeds {findings.num_seeds}`"
        if experiment.calculation is None
        else f"`{command}` (a calculation: nothing is drawn)"
    ]
    if experiment.notes:
        lines += ["", experiment.notes.strip()]
    if comparisons:
        lines += ["", "| | published | ours | |", "|---|---:|---:|---|", *map(_row, comparisons)]
    if experiment.why:
        lines += ["", f"**Why.** {experiment.why.strip()}"]
    return [*lines, "", *_figures(findings), *_changes(findings)]


def _row(comparison: Comparison) -> str:
    claim = comparison.claim
    cells = (claim.text, format_published(claim), format_interval(comparison.ours, claim), WORDS[comparison.verdict])
    return f"| {' | '.join(cells)} |"


def _figures(findings: Findings) -> list[str]:
    """Return the table of what was measured: a row for each setup at each point, means over seeds."""
    return _shown(findings, [*findings.experiment.setups], lambda *place: format_figure(findings.figure(*place)))


def _changes(findings: Findings) -> list[str]:
    """Return the table that compares every other setup with ``versus`` at each point."""
    experiment = findings.experiment
    if experiment.versus is None:
        return []
    others = [name for name in experiment.setups if name != experiment.versus]
    rows = _shown(findings, others, lambda *place: _change(findings.change(*place)))
    return ["", f"Change against {experiment.versus}, seed by seed:", "", *rows]


def _shown(findings: Findings, setups: Seq[str], cell: Callable[[str, str, str], str]) -> list[str]:
    """Return a table of the figures that are shown: a row for each setup at each point."""
    experiment = findings.experiment
    lines = [f"| setup | point | {' | '.join(experiment.shown)} |", f"|---|---|{'---:|' * len(experiment.shown)}"]
    for setup in setups:
        for point in experiment.points:
            cells = (cell(setup, point.label, name) for name in experiment.shown)
            lines.append(f"| {setup} | {point.label} | {' | '.join(cells)} |")
    return lines


def _change(change: Estimate | None) -> str:
    if change is None:
        return "-"
    range_of_seeds = f" ({change.low:+.0%} to {change.high:+.0%})" if isfinite(change.high) else ""
    return f"{change.middle:+.0%}{range_of_seeds}"


def as_json(findings: Findings) -> dict[str, object]:
    """Return what an experiment found as plain data, short enough to be kept with the source."""
    experiment, comparisons = findings.experiment, findings.compare()
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "verdict": _verdict(findings),
        "why": experiment.why.strip(),
        "seeds": findings.num_seeds,
        "setups": dict(experiment.setups),
        "workload": experiment.workload,
        "points": {point.label: point.changes for point in experiment.points},
        "claims": [
            {
                "text": one.claim.text,
                "published": one.claim.published,
                "ours": None if one.ours is None else _round(one.ours.middle),
                "low": None if one.ours is None or not isfinite(one.ours.low) else _round(one.ours.low),
                "high": None if one.ours is None or not isfinite(one.ours.high) else _round(one.ours.high),
                "verdict": one.verdict.value,
            }
            for one in comparisons
        ],
        "figures": {
            setup: {
                point.label: {
                    name: [run.figures.get(name) for run in findings.runs(setup, point.label)]
                    for name in sorted({*experiment.shown, *(claim.figure for claim in experiment.claims)})
                }
                for point in experiment.points
            }
            for setup in experiment.setups
        },
    }


def _round(value: float) -> float:
    return float(f"{value:.5g}")
