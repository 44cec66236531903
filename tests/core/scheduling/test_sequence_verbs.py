"""Sequences are changed by their own verbs alone: read from the source of every package that holds one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import sequence

import manylora
from manylora.core.scheduling import Sequence, SequenceStatus
from manylora.core.types import FinishReason

SOURCE = Path(manylora.__file__).parent
HOLDERS = ("core/costs", "core/engine", "core/scheduling", "lab/sim")
FILES = sorted(path for holder in HOLDERS for path in (SOURCE / holder).rglob("*.py") if path.name != "sequence.py")
assert all(any((SOURCE / holder).rglob("*.py")) for holder in HOLDERS), "a package has moved"
OTHERS = ("self", "counters", "named")
"""Objects with attributes of the same names: the own ones of a class, counters, and registered names."""
CHANGES = {"append", "clear", "extend", "insert", "pop", "remove"}


def writes(tree: ast.AST) -> Iterator[str]:
    """Yield what a module assigns to, deletes or changes in place that is an attribute of a sequence."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=name, ctx=ast.Store() | ast.Del()) if name in Sequence.__slots__:
                pass
            case ast.Call(func=ast.Attribute(value=ast.Attribute(value=owner, attr="tokens" | "pages"), attr=name)) if (
                name in CHANGES
            ):
                pass
            case _:
                continue
        if ast.unparse(owner).rpartition(".")[2] not in OTHERS:
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_other_module_writes_to_a_sequence(path: Path) -> None:
    assert list(writes(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "line",
    [
        "sequence.num_computed += 1",
        "one.status = other",
        "first, self.x.tokens = 1, 2",
        "sequence.tokens.append(1)",
        "sequence.table.pages.extend(pages)",
        "del sequence.table",
    ],
)
def test_a_write_is_found(line: str) -> None:
    assert len(list(writes(ast.parse(line)))) == 1


def test_a_sequence_goes_its_way() -> None:
    one = sequence(0, num_prompt=5, max_tokens=3)
    assert one.admitted(1.0, shared=[7], pages=[8])
    assert (one.status, one.num_computed, one.num_cached, one.room) == (SequenceStatus.RUNNING, 4, 4, 8)
    first = one.launched(1)
    assert (first.start, first.is_sampled, first.awaits_token, first.pages) == (4, True, False, [7, 8])
    second = one.launched(1)
    assert (second.start, second.is_sampled, second.awaits_token) == (5, True, True)
    assert (one.num_in_flight, one.num_pending, one.num_to_run) == (2, 2, 1)
    assert one.took_token(40, 0.25, 2.0) and one.took_token(41, 0.5, 3.0)
    assert (one.tokens[5:], one.first_token_at, one.num_in_flight, one.num_pending) == ([40, 41], 2.0, 0, 0)
    assert first.tokens is one.tokens and one.engine_s == 0.75


def test_a_sequence_that_was_sent_back_keeps_its_tokens() -> None:
    one = sequence(0, num_prompt=5)
    one.admitted(1.0, shared=(), pages=[1, 2])
    one.launched(5)
    one.took_token(9, 0.5, 2.0)
    assert one.table.clear() == [1, 2]
    one.sent_back()
    assert (one.status, one.num_tokens, one.num_to_run, one.num_preemptions) == (SequenceStatus.WAITING, 6, 6, 1)
    assert not one.admitted(3.0, shared=(), pages=[3, 4]), "not for the first time"
    assert one.admitted_at == 1.0


def test_a_token_for_a_cancelled_sequence_is_dropped() -> None:
    one = sequence(0, num_prompt=5)
    one.admitted(1.0, shared=(), pages=[1, 2])
    one.launched(5)
    one.cancelled(FinishReason.CANCELLED)
    assert not one.took_token(9, 0.5, 2.0)
    assert (one.num_output_tokens, one.num_pending, one.num_in_flight, one.runs_until) == (0, 0, 0, 0)
