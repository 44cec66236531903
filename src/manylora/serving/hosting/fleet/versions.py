"""The versions of adapters by number: for which one a name stands, which are addressable, and when each may be freed.

::

    loaded --move--> current --move--> superseded --its lease ends--> ended --its last answer ends--> freed
                     |-- addressable by number and digest ---------|

A name moves by one assignment, and every answer takes its version here before it goes to an engine. So a name moves on
all engines at once, and a version outlives its name, on every engine, until the last answer on it has ended.

The lease of a superseded version ends when ``keep`` later ones are superseded too, or after ``ttl_s`` seconds; while it
is pinned, it does not end. Times are arguments, in seconds.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from manylora.core.engine.adapters.registry import LABEL_MARK
from manylora.core.types import AdapterKey

__all__ = ["MAX_NUMBER", "AdapterVersions", "NumberedVersion", "VersionTerms", "name_of"]

MAX_NUMBER = 9_999_999
LEAST_DIGEST_CHARS = 8
"""Characters of a digest that name a version. Fewer digits are a number, so neither is taken for the other."""

_DIGEST = re.compile(rf"[0-9a-f]{{{LEAST_DIGEST_CHARS},40}}")
_VERSION = re.compile(rf"(.+)@(?:[1-9][0-9]{{0,6}}|{_DIGEST.pattern})")


def name_of(model: str) -> str:
    """Return the name in ``name@number`` or ``name@digest``; other texts are names themselves."""
    match = _VERSION.fullmatch(model)
    return model if match is None else match[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionTerms:
    """How long the versions of a name that it has left stay addressable."""

    keep: int = 1  # versions beside the current one
    ttl_s: float | None = None  # seconds after the name has moved on; ``None`` for no such end


@dataclass(slots=True, eq=False)
class NumberedVersion:
    """A version of an adapter in a fleet; ``path`` is its folder."""

    name: str
    number: int
    key: AdapterKey
    path: str
    num_answers: int = 0  # answers that run on it
    superseded_at: float | None = None  # when its name moved on
    is_pinned: bool = False
    has_ended: bool = False  # whether its lease has ended: no new answer takes it

    @property
    def label(self) -> str:
        """The name that never stands for another version."""
        return f"{self.name}@{self.number}"

    @property
    def held_as(self) -> str:
        """The name by which engines hold it, which no adapter may have."""
        return f"{LABEL_MARK}{self.label}"


class AdapterVersions:
    """The versions of all names. For one thread."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[NumberedVersion]] = {}  # in the order of their numbers
        self._by_label: dict[str, NumberedVersion] = {}
        self._current: dict[str, NumberedVersion] = {}
        self._terms: dict[str, VersionTerms] = {}

    def of(self, name: str) -> list[NumberedVersion]:
        """Return all versions of a name that are not freed, in the order of their numbers."""
        return list(self._by_name.get(name, ()))

    def current(self, name: str) -> NumberedVersion | None:
        """Return the version for which a name stands, if it has one here."""
        return self._current.get(name)

    def labelled(self, label: str) -> NumberedVersion | None:
        """Return the version that has this label, until it is freed."""
        return self._by_label.get(label)

    def last_number(self, name: str) -> int:
        """Return the highest number of a name's versions; 0 without any."""
        known = self._by_name.get(name)
        return known[-1].number if known else 0

    def find(self, model: str) -> NumberedVersion | None:
        """Return the version that a name, ``name@number`` or ``name@digest`` stands for, if its lease has not ended."""
        if (current := self._current.get(model)) is not None:
            return current
        if (labelled := self._by_label.get(model)) is not None:
            return None if labelled.has_ended else labelled
        name, _, digest = model.rpartition("@")
        known = self._by_name.get(name)
        if known is None or not _DIGEST.fullmatch(digest):
            return None
        fitting = [one for one in known if one.key.startswith(digest) and not one.has_ended]
        # Two uploads of the same weights are one version by content; the later number has the longer lease.
        return fitting[-1] if len({one.key for one in fitting}) == 1 else None

    def move(
        self, name: str, number: int, key: AdapterKey, path: str, *, now: float, terms: VersionTerms | None = None
    ) -> NumberedVersion:
        """Point a name to a new version, which engines hold, and return it; the version before is superseded."""
        assert number > self.last_number(name), "numbers grow"
        version = NumberedVersion(name, number, key, path)
        self._by_name.setdefault(name, []).append(version)
        self._by_label[version.label] = version
        if (before := self._current.get(name)) is not None:
            before.superseded_at = now
        self._current[name] = version
        if terms is not None:
            self._terms[name] = terms
        return version

    def close(self, name: str, now: float) -> None:
        """Let a name stand for nothing; the leases of all its versions end."""
        self._current.pop(name, None)
        self._terms.pop(name, None)
        for version in self._by_name.get(name, ()):
            self.end(version, now)

    def end(self, version: NumberedVersion, now: float) -> None:
        """End the lease of a version for which no name stands."""
        assert self._current.get(version.name) is not version, "its name stands for it"
        version.has_ended, version.is_pinned = True, False
        if version.superseded_at is None:
            version.superseded_at = now

    def freeable(self, name: str, now: float) -> list[NumberedVersion]:
        """End the leases of a name's versions that are over; return the versions that nothing needs any more."""
        terms = self._terms.get(name, VersionTerms())
        superseded = [one for one in self._by_name.get(name, ()) if one.superseded_at is not None]
        for num_later, version in enumerate(reversed(superseded)):
            is_over = num_later >= terms.keep or now >= _ends_at(version, terms)
            if is_over and not version.is_pinned:
                version.has_ended = True
        return [one for one in superseded if one.has_ended and not one.num_answers]

    def drop(self, version: NumberedVersion) -> None:
        """Forget a version that was freed."""
        assert version.has_ended and not version.num_answers
        del self._by_label[version.label]
        versions = self._by_name[version.name]
        versions.remove(version)
        if not versions:
            del self._by_name[version.name]

    def next_end_at(self, name: str) -> float:
        """Return the time at which the next lease of a name's versions ends by itself; infinite for none."""
        terms = self._terms.get(name, VersionTerms())
        leased = [one for one in self._by_name.get(name, ()) if not one.has_ended and not one.is_pinned]
        return min([_ends_at(one, terms) for one in leased], default=math.inf)


def _ends_at(version: NumberedVersion, terms: VersionTerms) -> float:
    """Return the time at which a version's lease ends by itself."""
    if terms.ttl_s is None or version.superseded_at is None:
        return math.inf
    return version.superseded_at + terms.ttl_s
