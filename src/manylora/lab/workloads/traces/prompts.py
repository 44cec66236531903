"""GSM8K: grade-school questions and answers, the prompts that ServerlessLoRA's evaluation sends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manylora.core.errors import ConfigError
from manylora.lab.workloads.traces.rows import read_json_lines

__all__ = ["QuestionAnswer", "read_gsm8k"]


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """One exercise.

    Args:
        question: The prompt.
        answer: The worked solution, ending in ``#### result``.
    """

    question: str
    answer: str


def read_gsm8k(file: Path) -> tuple[QuestionAnswer, ...]:
    """Read `gsm8k_*.jsonl`."""
    pairs = tuple(QuestionAnswer(row.text("question"), row.text("answer")) for row in read_json_lines(file))
    if not pairs:
        raise ConfigError(f"{file}: expected at least one question, got none")
    return pairs
