"""Forms of answers are checked in a process that may die of them, once each, in fair turns."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request
from text_tokenizers import MAKERS, make_huggingface

from manylora.core.errors import CapacityError, RequestError
from manylora.core.types import Constraint
from manylora.serving.api.forms import FormChecks
from manylora.serving.http.auth import Gate
from manylora.serving.http.turns import FairWork
from manylora.serving.text.forms import FormProcess, FormSettings

pytest.importorskip("llguidance")

GOOD = Constraint("regex", "[ab]{3}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_huggingface(next(iter(MAKERS))).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')  # its tokenizer needs no torch
    return folder


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[FormProcess]:
    process = FormProcess(FormSettings(str(folder)))
    yield process
    process.close()
    with pytest.raises(CapacityError):
        process.check(GOOD)
    assert process._process is None


@pytest.mark.parametrize(
    ("form", "part"),
    [
        (Constraint("regex", "("), "The regex cannot be followed"),
        (Constraint("grammar", "::="), "The grammar cannot be followed"),
        (Constraint("json", '{"type": "integer", "multipleOf": 99440891}'), "multipleOf"),
        (Constraint("json", "[" * 100_000), "The JSON schema cannot be followed"),
        (Constraint("regex", "(a{1000}){1000}"), "64 MiB of memory"),
    ],
)
def test_a_form_at_fault_is_named_and_the_next_is_checked(process: FormProcess, form: Constraint, part: str) -> None:
    assert process.check(GOOD) is None
    holder = process._process
    assert part in (process.check(form) or "")
    assert process.check(GOOD) is None
    assert process._process is holder, "it started again"


def test_a_compiler_that_does_not_end_is_ended(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form that no look at its text finds: here because the look is made blind in that process."""
    blind = "from manylora.execution.sampling import grammar_text\ngrammar_text.MAX_MULTIPLES = 10**12\n"
    (tmp_path / "sitecustomize.py").write_text(blind)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    process = FormProcess(FormSettings(str(folder), limit_s=1, limit_bytes=8 << 30))
    try:
        form = Constraint("json", '{"type": "integer", "multipleOf": 99440891}')
        assert "more than 1 s of a processor" in (process.check(form) or "")
        assert process.check(GOOD) is None
    finally:
        process.close()


def test_a_lost_process_is_replaced(process: FormProcess) -> None:
    assert process.check(GOOD) is None
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert process.check(GOOD) is None


def test_a_folder_without_a_tokenizer_refuses_by_name(tmp_path: Path) -> None:
    process = FormProcess(FormSettings(str(tmp_path)))
    try:
        for _ in range(2):
            assert "this tokenizer" in (process.check(GOOD) or "")
    finally:
        process.close()


class Noting:
    """Notes the forms that it checks, once it is opened; refuses those that end in ``!``."""

    def __init__(self) -> None:
        self.opened, self.seen = threading.Event(), list[str]()

    def check(self, constraint: Constraint) -> str | None:
        self.opened.wait()
        self.seen.append(constraint.text)
        return "no" if constraint.text.endswith("!") else None


def test_a_form_is_checked_once_of_a_tenant_and_callers_take_turns() -> None:
    """The first letter of a form is its caller, and what follows a colon its tenant."""
    process = Noting()
    turns = FairWork("new forms", Gate().caller_of, max_waiting=8, num_at_once=1)
    checks = FormChecks(process, turns)  # type: ignore[arg-type]

    async def never() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def check(text: str) -> str:
        request = Request({"type": "http", "headers": [], "client": (text[0], 1)}, never)
        try:
            await checks.check(request, Constraint("regex", *text.split(":")))
        except RequestError:
            return "refused"
        return "fine"

    async def play() -> list[str]:
        tasks = [asyncio.ensure_future(check(text)) for text in ("a0", "a1", "a2!", "a2!", "b0", "b0")]
        await asyncio.sleep(0)
        process.opened.set()
        found = await asyncio.gather(*tasks)
        return [*found, await check("a2!"), await check("b0"), await check("b0:acme"), await check("b0:acme")]

    assert asyncio.run(play()) == ["fine", "fine", "refused", "refused", "fine", "fine", "refused", *["fine"] * 3]
    assert process.seen == ["a0", "a1", "b0", "a2!", "b0"]
