"""Log lines that no logged value can break or forge."""

from __future__ import annotations

import logging
import re

__all__ = ["LineFormatter", "configure_logging", "escape"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class LineFormatter(logging.Formatter):
    """Formats a record with the control characters of its message escaped.

    Names of folders and models, and reasons of errors, hold whatever their authors wrote; a newline among them would
    begin a line of its own. Tracebacks keep their lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record, without its traceback."""
        return escape(super().formatMessage(record))


def escape(text: str) -> str:
    """Return the text with every control character as an escape."""
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def configure_logging(level: int | str, process: str) -> None:
    """Log to standard error, with the name of the process on each line."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(f"%(asctime)s %(levelname)s {process} %(name)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
