"""How well, and at what cost, does a predictor that reads the prompt predict the length of the answer?

    python bench/prompt_predictor.py --traces DIR [--quick]

Questions of GSM8K with their worked answers: learnt from the training questions, tried on the test questions, in the
order of the files. Lengths are counted in words and marks.

* *quantile*: the median of all answers so far, what `--predictor quantile` says of a new request of a known adapter;
* *length of the prompt*: a line through the logarithms of both lengths;
* *words of the prompt*: ridge regression of the logarithm of the length on the words, hashed into columns.

*Error* is the median of |predicted - true| / true; *in order*: pairs of requests whose predictions are in the order of
their lengths (half of them by chance), which is all that an order of requests can use. The cost of a prediction is
processor time. Errors are the same on every machine.

Writes `bench/results/prompt_predictor.json` and `.md`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
from publishing import arguments, publish, table

from manylora.lab.bench.rounds import Middle, middle_of_rounds
from manylora.lab.workloads.traces.prompts import QuestionAnswer, read_gsm8k

PIECE = re.compile(r"\w+|[^\w\s]")
COLUMNS = 4096
PENALTIES = (1.0, 3.0, 10.0, 30.0)
"""Of the squared weights; the one with the least error on the last tenth of the training questions is taken."""

PAIRS = 100_000
ROUNDS = 5

Predict = Callable[[str], float]


@dataclass(frozen=True)
class Outcome:
    """A predictor on the test questions.

    Args:
        error: Median relative error.
        in_order: Share of pairs in order; half where all predictions are equal.
        microseconds: Processor time of one prediction.
    """

    error: float
    in_order: float
    microseconds: Middle


def num_pieces(text: str) -> int:
    """Return the words and marks of a text."""
    return len(PIECE.findall(text))


def columns_of(text: str) -> list[int]:
    """Return the columns of a text's words, each once."""
    return sorted({crc32(word.encode()) % COLUMNS for word in PIECE.findall(text.lower())})


def median_of(pairs: Sequence[QuestionAnswer]) -> Predict:
    """Return a predictor that knows no more than the median."""
    median = float(np.median([num_pieces(one.answer) for one in pairs]))
    return lambda question: median


def line_of(pairs: Sequence[QuestionAnswer]) -> Predict:
    """Return a predictor that knows the length of the prompt."""
    x, y = (np.log([num_pieces(text) for text in texts]) for texts in zip(*map(both, pairs), strict=True))
    slope, level = np.polyfit(x, y, 1)
    return lambda question: float(np.exp(level + slope * np.log(num_pieces(question))))


def words_of(pairs: Sequence[QuestionAnswer]) -> Predict:
    """Return a predictor that knows the words of the prompt and their number."""
    cut = len(pairs) * 9 // 10
    fits = {penalty: regression(pairs[:cut], penalty) for penalty in PENALTIES}
    return regression(pairs, min(fits, key=lambda penalty: error_of(fits[penalty], pairs[cut:])))


def regression(pairs: Sequence[QuestionAnswer], penalty: float) -> Predict:
    """Return a predictor by ridge regression."""
    x = np.zeros((len(pairs), COLUMNS + 1), np.float32)
    for row, one in enumerate(pairs):
        x[row, columns_of(one.question)] = 1.0
        x[row, COLUMNS] = np.log(num_pieces(one.question))
    y = np.log([num_pieces(one.answer) for one in pairs])
    level, of_length = y.mean(), x[:, COLUMNS].mean()
    x[:, COLUMNS] -= of_length
    weights = np.linalg.solve(x.T @ x + penalty * np.eye(COLUMNS + 1), x.T @ (y - level))

    def predict(question: str) -> float:
        log_length = weights[columns_of(question)].sum() + weights[COLUMNS] * (np.log(num_pieces(question)) - of_length)
        return float(np.exp(level + log_length))

    return predict


def error_of(predict: Predict, pairs: Sequence[QuestionAnswer]) -> float:
    """Return the median relative error."""
    return float(np.median([abs(predict(one.question) / num_pieces(one.answer) - 1.0) for one in pairs]))


def both(pair: QuestionAnswer) -> tuple[str, str]:
    return pair.question, pair.answer


def tried(predict: Predict, pairs: Sequence[QuestionAnswer]) -> Outcome:
    """Return how a predictor does."""
    true = np.array([num_pieces(one.answer) for one in pairs], np.float64)
    times_us = []
    for _ in range(ROUNDS):
        began = time.process_time()
        predicted = np.array([predict(one.question) for one in pairs])
        times_us.append(1e6 * (time.process_time() - began) / len(pairs))
    one, other = np.random.default_rng(0).integers(0, len(pairs), (2, PAIRS))
    differ = true[one] != true[other]
    agreement = np.sign(predicted[one] - predicted[other])[differ] * np.sign(true[one] - true[other])[differ]
    return Outcome(
        error=error_of(predict, pairs),
        in_order=float((1.0 + agreement.mean()) / 2.0),
        microseconds=middle_of_rounds(times_us),
    )


def main() -> None:
    """Learn, try, and write what comes out."""
    parser = arguments(__doc__, quick="500 questions")
    parser.add_argument("--traces", type=Path, required=True, help="folder of public traces")
    options = parser.parse_args()
    learnt, test = (read_gsm8k(options.traces / f"gsm8k_{part}.jsonl") for part in ("train", "test"))
    if options.quick:
        learnt, test = learnt[:500], test[:500]
    makers = {"quantile": median_of, "length of the prompt": line_of, "words of the prompt": words_of}
    outcomes = {name: tried(make(learnt), test) for name, make in makers.items()}
    figures = {
        name: {"error": one.error, "in_order": one.in_order, "microseconds": one.microseconds.rounds}
        for name, one in outcomes.items()
    }
    rows = [(name, f"{one.error:.2f}", f"{one.in_order:.2f}", f"{one.microseconds}") for name, one in outcomes.items()]
    lines = [
        "# Predicting the length of an answer from its prompt",
        "",
        f"`python bench/prompt_predictor.py --traces DIR`: learnt from {len(learnt):,} questions of GSM8K with worked "
        f"answers, tried on {len(test):,}.",
        "",
        *table(("knows", "median error", "pairs in order", "microseconds a prediction (95 %)"), rows),
    ]
    publish("prompt_predictor", figures, "\n".join(lines), is_kept=not options.quick)


if __name__ == "__main__":
    main()
