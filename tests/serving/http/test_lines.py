"""Lines of callers."""

from __future__ import annotations

from manylora.serving.http.turns import CallerQueues


def test_callers_take_turns_and_each_keeps_its_order() -> None:
    lines: CallerQueues[str] = CallerQueues()
    for one in ("a1", "a2", "a3", "b1", "c1", "c2"):
        lines.put(one[0], one)
    lines.remove("a", "a2")
    lines.remove("b", "b1")
    assert (lines.num_of("a"), lines.num_of("b"), list(lines)) == (2, 0, ["a1", "a3", "c1", "c2"])
    assert [lines.take() for _ in range(3)] == [("a", "a1"), ("c", "c1"), ("a", "a3")]
    assert lines
    lines.clear()
    assert not lines
