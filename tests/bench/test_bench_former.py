"""Results beside their former versions."""

import subprocess

import former
import pytest

OLD = """# Speed

| system | tokens/s | rounds |
|---|---:|---:|
| base | 200 | 2 |
| gone | 1 | 2 |

| ratio | by round | of medians |
|---|---:|---:|
| **base over peer** | 1.39 | 1.42 |
"""

NEW = """# Speed

| ratio | median of rounds (95 %) |
|---|---:|
| base over peer | 1.50 (1.40 to 1.60) |

| system | tokens/s | rounds |
|---|---:|---:|
| base | 210 | 5 |
| new | 7 | 5 |
"""


def test_a_row_is_found_in_another_table_with_other_columns():
    pairs = list(former.side_by_side(OLD, NEW))
    assert [(old.heads, now.heads) for old, now in pairs] == [
        (("by round", "of medians"), ("median of rounds (95 %)",)),
        (("tokens/s", "rounds"), ("tokens/s", "rounds")),
    ]
    old, now = pairs[0]
    assert old.rows["base over peer", 0] == ("1.39", "1.42")
    assert now.rows["base over peer", 0] == ("1.50 (1.40 to 1.60)",)


def test_a_former_table_stands_beside_one_alone():
    twice = "| rate | ms |\n|---|---|\n| 20 | 2 |\n\n| rate | floor |\n|---|---|\n| 20 | 1 |\n"
    ((_, now),) = former.side_by_side("| rate | ms |\n|---|---|\n| 20 | 3 |\n", twice)
    assert now.heads == ("ms",)


def test_equal_first_cells_are_told_apart_by_their_order():
    (one,) = former.tables_of("| policy | running |\n|---|---|\n| fifo | 64 |\n| sjf | 64 |\n| fifo | 128 |\n")
    assert one.rows == {("fifo", 0): ("64",), ("sjf", 0): ("64",), ("fifo", 1): ("128",)}


@pytest.fixture
def results(tmp_path, monkeypatch):
    def commit(text: str) -> None:
        (tmp_path / "speed.md").write_text(text)
        subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
        name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *name, "commit", "-qm", "made"], cwd=tmp_path, check=True)

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(former, "RESULTS", tmp_path)
    return commit


def test_the_former_version_is_the_last_that_differs(results):
    results(NEW)
    assert former.former_of("speed", None) is None
    assert "has no former version" in former.page([("speed", None)])[1]
    results(OLD)
    results(NEW)
    found = former.former_of("speed", None)
    assert found is not None and found.text == OLD
    figures, text = former.page([("speed", found)])
    assert "| base over peer | 1.39 | 1.42 | 1.50 (1.40 to 1.60) |" in text
    assert "| base | 200 | 2 | 210 | 5 |" in text
    assert "| gone" not in text and "| new |" not in text
    assert figures["speed"]["commit"] == found.commit
