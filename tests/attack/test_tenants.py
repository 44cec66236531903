"""A tenant that floods the server stops no other."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from attack_target import MODEL, Target, running

NUM_FLOODED = 150
"""More than one caller may have in line."""

NUM_FORMS = 8
"""Forms of one caller that each take most of a second to refuse."""

TEXT = "the quick fox jumps " * 1_000


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder: Path = tmp_path_factory.mktemp("shared")
    with running(
        folder, "--api-key", "flood", "--api-key", "other", model=(MODEL, "--simulate", "h100:mistral-7b")
    ) as one:
        yield one


def begin(target: Target, key: str, path: str, body: object) -> HTTPConnection:
    """Send a request, and leave its answer for later."""
    return target.begin(path, body, authorization=f"Bearer {key}")


def status_of(connection: HTTPConnection) -> int:
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_a_flood_of_texts_of_one_tenant_leaves_room_and_turns_to_another(shared: Target) -> None:
    with contextlib.ExitStack() as stack:

        def ask(key: str) -> HTTPConnection:
            return stack.enter_context(
                contextlib.closing(begin(shared, key, "/tokenize", {"model": MODEL, "prompt": TEXT}))
            )

        flood = [ask("flood") for _ in range(NUM_FLOODED)]
        assert [status_of(ask("other")) for _ in range(4)] == [200] * 4
        answered, _, _ = select.select([one.sock for one in flood], [], [], 0)
        assert len(answered) < NUM_FLOODED, "the other was served last"
        statuses = [status_of(one) for one in flood]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= NUM_FLOODED // 2


def test_a_flood_of_costly_forms_of_one_tenant_leaves_turns_to_another(shared: Target) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    with contextlib.ExitStack() as stack:

        def ask(key: str, regex: str) -> HTTPConnection:
            connection = begin(shared, key, "/v1/completions", {**body, "guided_regex": regex})
            return stack.enter_context(contextlib.closing(connection))

        assert status_of(ask("other", "x")) == 200
        flood = [ask("flood", f"(a{{1000}}){{{1_000 + i}}}") for i in range(NUM_FORMS)]
        assert [status_of(ask("other", regex)) for regex in ("y", "x", "z")] == [200] * 3
        answered, _, _ = select.select([one.sock for one in flood], [], [], 0)
        assert len(answered) < NUM_FORMS, "the other was served last"
        assert {status_of(one) for one in flood} == {400}
