"""The words that documents and docstrings do without, and the plain word for each.

To ban another word, add a line to ``WORDS``. The test names every place: ``file:line: the words -> the replacement``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Word(NamedTuple):
    """A pattern that text may not match.

    Args:
        pattern: A regular expression; case is ignored, and a space matches a line break too.
        plain: The replacement.
        reason: Why the replacement is better.
        where: ``"docstring"`` for a pattern that is checked in docstrings alone.
    """

    pattern: str
    plain: str
    reason: str
    where: str = "all"


SUBJECT = "a sentence names its subject"
FIELD = "the term of the field"

QUESTION = "What|Whose|Told|How many|How often|How long"

WORDS = [
    Word(r"\bnobody\b", "no request / no sequence / nothing", SUBJECT),
    Word(r"\bwhoever\b", "the request / sequence / caller that", SUBJECT),
    Word(r"\b(?:some|any|every)body\b", "a / any / every request (sequence, user)", SUBJECT),
    Word(r"\bfor who\b", "because requests that", SUBJECT),
    Word(r"(?:\A|[.:]\s+)(?:What|Who) (?:is|are)\b(?![^.?]*\?)", "a noun", "a sentence opens with a noun", "docstring"),
    Word(r"\bmade[- ]up\b", "synthetic", FIELD),
    Word(r"\bstand-ins?\b|\bstands? in for\b", "simulated target", FIELD),
    Word(r"\btellers?\b", "token source", FIELD),
    Word(r"\bspells?\b", "drift, drift component", FIELD),
    Word(r"\bpaces?\b", "speed / rate", FIELD),
    Word(r"\bdrag(?:s|ged)?\b", "interference", FIELD),
    Word(r"\bpromis(?:e|es|ed)\b", "SLO (of a service) / guarantee (of a policy)", FIELD),
    Word(r"\btrials?\b", "load test (of a planner) / check (of a module)", FIELD),
    Word(r"(?<!-)\befforts?\b", "search budget", FIELD),
    Word(r"\bcompiled[ _]teams?\b", "OpenMP threads", FIELD),
    Word(r"\btriton[ _]doors?\b|\bthe door to\b", "Triton support / the module that imports", "no metaphor"),
    Word(r"\bfollow[- _]ons?\b", "plan-ahead", FIELD),
    Word(r"\bgarbage\b", "gc / unreachable objects", FIELD),
    Word(r"\btall(?:y|ies|ied)\b", "batch histogram / count", FIELD),
    Word(r"\bpage ?pools?\b", "page allocator", "PageAllocator counts pages"),
    Word(r"\bpage ?(?:stores?|storage)\b", "page cache (pages) / page tensor (bytes)", "PageCache and PageTensor"),
    Word(rf"(?m:^)\s+\w+: (?-i:{QUESTION})\b", "a noun", "an argument is a noun", "docstring"),
]

PATTERNS = [(re.compile(word.pattern.replace(" ", r"\s+"), re.IGNORECASE), word) for word in WORDS]
ANY = re.compile("|".join(pattern.pattern for pattern, word in PATTERNS if word.where == "all"), re.IGNORECASE)
SENTENCE = re.compile(rf"\b(?:What|Who)\s+(?:is|are)\b|\w+: (?:{QUESTION})\b")
"""Modules that match neither of these two are not parsed, which keeps the test fast."""
DOCUMENTS = [
    page for where in ("*", "docs/**/*", "bench/**/*", "src/manylora/*/*") for page in ROOT.glob(f"{where}.md")
]
CODE = [path for folder in ("src", "bench", "examples") for path in (ROOT / folder).rglob("*.py")]


def docstrings_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a module, those of its fields included: first line, text."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text), lineno=line)):
                yield line, text


def matches(path: Path, first_line: int, text: str, *, is_docstring: bool = False) -> Iterator[str]:
    """Yield a line of the failure message for every banned word of a text."""
    for pattern, word in PATTERNS:
        if word.where == "all" or is_docstring:
            for match in pattern.finditer(text):
                line = first_line + text.count("\n", 0, match.start())
                found = " ".join(match.group().split())
                yield f"{path.relative_to(ROOT)}:{line}: {found!r} -> {word.plain} ({word.reason})"


def test_words_are_plain() -> None:
    wrong = [line for path in sorted(DOCUMENTS) for line in matches(path, 1, path.read_text(encoding="utf-8"))]
    for path in sorted(CODE):
        source = path.read_text(encoding="utf-8")
        if ANY.search(source) or SENTENCE.search(source):
            for first_line, text in docstrings_of(source):
                wrong.extend(matches(path, first_line, text, is_docstring=True))
    assert not wrong, "words with a plainer replacement:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("a page that nobody\nneeds", True),
        ("the sequence is\npage-aligned", False),
        ("a made-\nup word", False),  # a hyphen at the end of a line is not looked for
        ("drawn from made up\nwords", True),
        ("`reasoning_effort`", False),
        ("What is left of a step.", True),
        ("What is left of a step?", False),
        ("Keys. Who is\nfirst in line.", True),
        ("Args:\n    rounds: How many.", True),
        ("Drawn by size: how many.", False),
        ("the step, what is left", False),
        ("paced by the device", False),
    ],
)
def test_patterns(text: str, is_found: bool) -> None:
    assert bool([*matches(ROOT / "example.py", 1, text, is_docstring=True)]) == is_found


def test_docstrings_of_a_module() -> None:
    source = '"""Doc."""\n\nx = "message"  # a comment\n"""Doc of x."""\n\n\nclass A:\n    """Doc of A."""\n'
    assert sorted(docstrings_of(source)) == [(1, "Doc."), (4, "Doc of x."), (8, "Doc of A.")]
