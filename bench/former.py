"""Put results beside their former versions: every row that both have, the old figures and the new.

    python bench/former.py throughput churn http adapter_cost decision [--commit REV]

A result is replaced when it is made again, and its history is git's. The former version of a result is that of the last
commit before the one that made the present tables, or of ``--commit``. Rows are found by their first cell, in the table
that shares most rows, so that a table that gained a column or an interval still stands beside its predecessor.

Writes `bench/results/former.json` and `.md`.
"""

from __future__ import annotations

import argparse
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from publishing import RESULTS, publish, table

UNITS = {
    "adapter_cost": "Former figures are milliseconds; the base's products took 31.7. Present ones are shares of these.",
}
"""Results whose unit has changed, in words."""


@dataclass(frozen=True)
class Figures:
    """A table of a result.

    Args:
        heads: Of its columns, without the first.
        rows: Cells by their first one, and by which of several equal first ones it is, from 0.
    """

    heads: tuple[str, ...]
    rows: dict[tuple[str, int], tuple[str, ...]]


@dataclass(frozen=True)
class Former:
    """A result at a commit.

    Args:
        commit: Short hash.
        date: Of the commit, ISO.
        text: The result as Markdown.
    """

    commit: str
    date: str
    text: str


def tables_of(text: str) -> Iterator[Figures]:
    """Yield the tables of a Markdown text."""
    lines = text.splitlines()
    place = 0
    while place < len(lines) - 1:
        if lines[place].startswith("|") and set(lines[place + 1]) <= set("|-: ") and "-" in lines[place + 1]:
            stop = next((at for at in range(place, len(lines)) if not lines[at].startswith("|")), len(lines))
            plain = [line.strip("|").replace("**", "") for line in lines[place:stop]]
            cells = [[cell.strip() for cell in line.split("|")] for line in plain]
            seen: Counter[str] = Counter()
            rows: dict[tuple[str, int], tuple[str, ...]] = {}
            for first, *others in cells[2:]:
                rows[first, seen[first]] = tuple(others)
                seen[first] += 1
            yield Figures(tuple(cells[0][1:]), rows)
            place = stop
        else:
            place += 1


def side_by_side(old: str, new: str) -> Iterator[tuple[Figures, Figures]]:
    """Yield each table of the new text with the old one that has most of its rows, and stands beside no other.

    None where no old one has any.
    """
    former = list(tables_of(old))
    for now in tables_of(new):
        best = max(former, key=lambda one: len(one.rows.keys() & now.rows.keys()), default=None)
        if best is not None and best.rows.keys() & now.rows.keys():
            former.remove(best)
            yield best, now


def git(*arguments: str) -> str:
    """Return the output of a git command in the folder of results."""
    return subprocess.run(("git", *arguments), cwd=RESULTS, check=True, capture_output=True, text=True).stdout


def former_of(name: str, commit: str | None) -> Former | None:
    """Return the version of a result at a commit, by default the last that differs; ``None`` if there is none."""
    now = (RESULTS / f"{name}.md").read_text()
    commits = [commit] if commit is not None else git("log", "--format=%h", "--", f"{name}.md").split()
    for one in commits:
        try:
            text = git("show", f"{one}:./{name}.md")
        except subprocess.CalledProcessError:
            continue
        if text != now:
            return Former(one, git("show", "-s", "--format=%cs", one).strip(), text)
    return None


def page(found: Sequence[tuple[str, Former | None]]) -> tuple[dict[str, Any], str]:
    """Return all results beside their former versions, as figures and as Markdown."""
    figures: dict[str, Any] = {}
    lines = ["# Results beside their former versions", ""]
    lines += ["`python bench/former.py`: rows that both have, of tables that changed. New and gone rows are left out."]
    for name, former in found:
        lines += ["", f"## {name}", ""]
        if former is None:
            lines.append(f"[{name}.md]({name}.md) has no former version.")
            continue
        lines.append(f"[{name}.md]({name}.md) beside `{former.commit}` of {former.date}. {UNITS.get(name, '')}".strip())
        figures[name] = {"commit": former.commit, "date": former.date, "tables": []}
        for old, now in side_by_side(former.text, (RESULTS / f"{name}.md").read_text()):
            heads = ("", *(f"former: {one}" for one in old.heads), *(f"now: {one}" for one in now.heads))
            shared = [key for key in now.rows if key in old.rows]
            rows = [(key[0], *old.rows[key], *now.rows[key]) for key in shared]
            if all(old.rows[key] == now.rows[key] for key in shared):
                continue  # words, or figures that are exact
            lines += ["", *table(heads, rows)]
            figures[name]["tables"].append({"heads": heads, "rows": rows})
        if not figures[name]["tables"]:
            lines += ["", "No table that both have has changed."]
    return figures, "\n".join(lines)


def main() -> None:
    """Write the results that are named beside their former versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="of a result, without .md")
    parser.add_argument("--commit", help="the former version's; by default the last one that differs")
    options = parser.parse_args()
    if missing := [name for name in options.names if not Path(RESULTS / f"{name}.md").is_file()]:
        parser.error(f"Got {missing[0]!r}, and there is no such result")
    figures, text = page([(name, former_of(name, options.commit)) for name in options.names])
    publish("former", figures, text)


if __name__ == "__main__":
    main()
