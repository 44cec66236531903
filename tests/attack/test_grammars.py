"""Grammars that are slow to follow end their own request, and no neighbour of the same engine waits for them.

The grammars pass the trial of their first tokens: their time grows with the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from attack_target import MODEL, Target, Watch, running

pytest.importorskip("llguidance")

NUM_RULES = 600
GRAMMARS = {
    "ambiguous": 'root ::= s\ns ::= s s | s s s | "a"',
    "more ambiguous": 'start: s\ns: s s | s s s | s s s s | "a"',
    "optional": "start: s*\ns: " + '"a"? ' * 60 + "s?",
    "many rules at a distance": "start: "
    + '"b" ' * 8
    + "s\ns: "
    + " | ".join(f"r{i} s" for i in range(NUM_RULES))
    + ' | "a"\n'
    + "\n".join(f'r{i}: "a" /[a-c]{{{i % 7}}}/' for i in range(NUM_RULES)),
}
LATE_S = 1.5
"""Longest wait of a neighbour, on a machine that is shared. Without a budget of time it grows with the answer."""


@pytest.fixture(scope="module")
def live_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running(tmp_path_factory.mktemp("forms"), model=(MODEL,)) as one:
        honest = one.post("/v1/completions", {"model": MODEL, "prompt": "a", "guided_regex": "[ab]{3}"})
        assert honest.status == 200, "it starts the process that checks forms"
        yield one


@pytest.mark.parametrize("slug", GRAMMARS)
def test_a_grammar_that_is_slow_to_follow_ends_alone(live_target: Target, slug: str) -> None:
    is_stream = slug == "more ambiguous"
    form = {"guided_grammar": GRAMMARS[slug], "max_tokens": 1_500, "ignore_eos": True, "stream": is_stream}
    with Watch(live_target) as seen:
        answer = live_target.post("/v1/completions", {"model": MODEL, "prompt": "a", **form})
    print(seen.summary())
    seen.check()
    assert max(seen.gaps_s) <= LATE_S
    assert answer.status == (200 if is_stream else 400)
    lines = answer.body.split(b"\n\n")
    error = json.loads(lines[-3].removeprefix(b"data: "))["error"] if is_stream else answer.error
    assert (error["type"], error["param"]) == ("BadRequestError", "guided_grammar")
    assert "too much time" in error["message"]
