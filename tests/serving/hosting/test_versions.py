"""Which version a name stands for, how long versions stay addressable, and that none is freed that is needed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.types import AdapterKey
from manylora.serving.hosting.fleet.versions import AdapterVersions, NumberedVersion, VersionTerms, name_of


def key(number: int) -> AdapterKey:
    return AdapterKey(f"{number:040x}"[::-1])


def moved(versions: AdapterVersions, *numbers: int, terms: VersionTerms | None = None) -> list[NumberedVersion]:
    return [versions.move("x", n, key(n), f"/{n}", now=float(n), terms=terms) for n in numbers]


def test_a_version_is_found_by_name_number_and_digest() -> None:
    versions = AdapterVersions()
    first, second = moved(versions, 1, 7, terms=VersionTerms(keep=3))
    assert versions.find("x") is second
    assert versions.find("x@1") is first
    assert versions.find("x@7") is second
    assert versions.find(f"x@{key(1)[:8]}") is first
    assert versions.find(f"x@{key(7)}") is second
    for wrong in ("x@2", "x@", f"x@{key(1)[:7]}", "x@00000000", "y", "x@01", "@x@1"):
        assert versions.find(wrong) is None, wrong


def test_a_digest_that_fits_two_contents_names_neither() -> None:
    versions = AdapterVersions()
    for number, digest in ((1, "abcdef01" + "0" * 32), (2, "abcdef01" + "1" * 32), (3, "abcdef01" + "1" * 32)):
        versions.move("x", number, AdapterKey(digest), "", now=0.0, terms=VersionTerms(keep=9))
    assert versions.find("x@abcdef01") is None
    assert versions.find("x@abcdef011") is versions.find("x@3")  # one content, twice


def test_names_of_versions_are_told_from_names() -> None:
    assert [name_of(text) for text in ("x@1", "a/b@12345678", "x@deadbeef", "x")] == ["x", "a/b", "x", "x"]
    for plain in ("x@0", "x@deadbee", "x@1.0", "@1", "x@DEADBEEF"):
        assert name_of(plain) == plain


def test_a_version_stays_while_an_answer_runs_on_it() -> None:
    versions = AdapterVersions()
    first, _ = moved(versions, 1, 2, terms=VersionTerms(keep=0))
    first.num_answers = 1
    assert versions.freeable("x", 2.0) == []
    assert versions.find("x@1") is None  # its lease has ended
    first.num_answers = 0
    assert versions.freeable("x", 2.0) == [first]
    versions.drop(first)
    assert [one.number for one in versions.of("x")] == [2]


def test_a_lease_ends_by_number_or_by_time_but_not_while_pinned() -> None:
    versions = AdapterVersions()
    first, second, third = moved(versions, 1, 2, 3, terms=VersionTerms(keep=1, ttl_s=10.0))
    first.is_pinned = True
    assert versions.freeable("x", 3.0) == []
    assert versions.next_end_at("x") == 13.0  # the second was superseded at 3
    assert versions.freeable("x", 13.0) == [second]
    first.is_pinned = False
    assert versions.freeable("x", 13.0) == [first, second]
    assert versions.next_end_at("x") == math.inf
    assert versions.find("x") is third


def test_numbers_only_grow() -> None:
    versions = AdapterVersions()
    moved(versions, 3)
    for number in (1, 3):
        with pytest.raises(AssertionError, match="numbers grow"):
            moved(versions, number)


@dataclass
class Model:
    """What must hold of one name, worked out from its whole history."""

    history: list[NumberedVersion] = field(default_factory=list)
    left_at: dict[int, float] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    freed: set[int] = field(default_factory=set)
    is_named: bool = False

    def end_leases(self, now: float, terms: VersionTerms) -> None:
        left = [one for one in self.history if one.number in self.left_at and one.number not in self.freed]
        for later, one in enumerate(reversed(left)):
            is_late = terms.ttl_s is not None and now >= self.left_at[one.number] + terms.ttl_s
            if (later >= terms.keep or is_late) and not one.is_pinned:
                self.ended.add(one.number)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["move", "move", "take", "take", "give", "wait", "pin", "unpin", "sweep", "close"]),
        st.integers(0, 9),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.integers(0, 3), st.one_of(st.none(), st.floats(0.0, 5.0)))
def test_no_version_is_freed_too_early_or_too_late(
    steps: list[tuple[str, int]], keep: int, ttl_s: float | None
) -> None:
    versions, model, now, terms = AdapterVersions(), Model(), 0.0, VersionTerms(keep=keep, ttl_s=ttl_s)
    running: list[NumberedVersion] = []
    for step, value in steps:
        alive = [one for one in model.history if one.number not in model.freed]
        if step == "move":
            number = (model.history[-1].number if alive else 0) + 1 + value
            if alive or not model.history:
                if model.is_named:
                    model.left_at[alive[-1].number] = now
                model.history.append(versions.move("x", number, key(number), "", now=now, terms=terms))
                model.is_named = True
        elif step == "take":
            asked = "x" if value < 5 or not alive else alive[value % len(alive)].label
            found = versions.find(asked)
            if asked == "x":
                assert found is (alive[-1] if model.is_named else None)
            else:
                assert (found is None) == (alive[value % len(alive)].number in model.ended)
            if found is not None:
                found.num_answers += 1
                running.append(found)
        elif step == "give" and running:
            running.pop(value % len(running)).num_answers -= 1
        elif step == "wait":
            now += value / 2
        elif step in ("pin", "unpin") and alive:
            one = alive[value % len(alive)]
            one.is_pinned = step == "pin" and not one.has_ended
        elif step == "sweep":
            model.end_leases(now, terms if model.is_named else VersionTerms())
            due = versions.freeable("x", now)
            assert {one.number for one in due} == {
                one.number for one in alive if one.number in model.ended and one not in running
            }
            for one in due:
                versions.drop(one)
                model.freed.add(one.number)
        elif step == "close":
            versions.close("x", now)
            model.ended |= {one.number for one in alive}
            for one in alive:
                model.left_at.setdefault(one.number, now)
            model.is_named = False
        for one in running:  # whatever happens, what an answer runs on is there
            assert versions.labelled(one.label) is one
