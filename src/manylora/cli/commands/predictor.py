"""`manylora predictor`: learn from a request log how long answers are."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from manylora.cli.views.terminal import note, out
from manylora.scheduling.prediction.request_log import read_request_log
from manylora.scheduling.prediction.training import Accuracy, train

__all__ = ["predictor_app"]

predictor_app = typer.Typer(no_args_is_help=True, help="Train what guesses the length of answers.")


@predictor_app.callback()
def _predictor() -> None:
    """Train what guesses the length of answers."""


@predictor_app.command(name="train")
def train_predictor(
    log: Annotated[str, typer.Argument(metavar="LOG", help="A request log, as the server writes it.")],
    out_file: Annotated[
        str, typer.Option("--out", metavar="FILE", help="Where the predictor goes, as JSON.")
    ] = "length-predictor.json",
) -> None:
    r"""Train a length predictor on a request log, and compare it with the default on the log's last fifth.

    Needs scikit-learn: [bold]pip install 'manylora\[predictor]'[/bold]. Serving with it does not.
    """
    trained, default = train(list(read_request_log(log)), out_file)
    table = Table("", "trained", "default", "", title=f"{trained.num_requests} requests not trained on")
    for title, name, remark in _ROWS:
        mine, other = (getattr(accuracy, name) for accuracy in (trained, default))
        table.add_row(title, f"{mine:.1%}", f"{other:.1%}", remark)
    out.print(table)
    note(_verdict(trained, default, out_file))


_ROWS = (
    ("median error", "relative_error", "less is better"),
    ("within a quarter of the truth", "within_quarter", "more is better"),
    ("pairs in the right order", "ordered", "what shortest-first needs; 50 % is chance"),
    ("answers within p90", "covered", "90 % is right"),
)


def _verdict(trained: Accuracy, default: Accuracy, path: str) -> str:
    if trained.relative_error < default.relative_error and trained.ordered >= default.ordered:
        return f"Better than the default: serve with --predictor trained --predictor-file {path}"
    return "Not clearly better than the default, which needs no training and follows changes: keep that"
