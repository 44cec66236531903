"""Rows of trace files; errors name the file, line and column."""

from __future__ import annotations

import csv
import gzip
import json
import reprlib
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from manylora.core.errors import ConfigError
from manylora.core.types import MAX_TENANT_CHARS

__all__ = ["Row", "header_of", "read_csv", "read_json_lines"]

MOST = 1 << 53  # beyond it a float is no longer every whole number


class Row:
    """One line of a trace, by its number from 1 (the header included), and its values by column."""

    __slots__ = ("_file", "_line", "_values")

    def __init__(self, file: Path, line: int, values: dict[str, object]) -> None:
        self._file, self._line, self._values = file, line, values

    def text(self, column: str) -> str:
        """Return a text as it stands."""
        value = self._values.get(column)
        if not isinstance(value, str):
            raise self.wrong(column, "a text")
        return value

    def number(self, column: str, *, least: float = float("-inf")) -> float:
        """Return a number, at least ``least``."""
        value = self._values.get(column)
        try:
            is_number = isinstance(value, str | int | float) and not isinstance(value, bool)
            number = float(value) if is_number else float("nan")  # type: ignore[arg-type]
        except (ValueError, OverflowError):
            number = float("nan")
        if not least <= number < float("inf"):
            raise self.wrong(column, "a number" if least == float("-inf") else f"a number from {least:g}")
        return number

    def whole(self, column: str, *, least: int = 0) -> int:
        """Return a whole number, from ``least`` to ``MOST``."""
        number = self.number(column)
        if not (number.is_integer() and least <= number <= MOST):
            raise self.wrong(column, f"a whole number from {least}" if number <= MOST else f"at most {MOST}")
        return int(number)

    def wholes(self, column: str) -> tuple[int, ...]:
        """Return a list of whole numbers from 0."""
        value = self._values.get(column)
        if not (isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)):
            raise self.wrong(column, "a list of whole numbers from 0")
        return tuple(value)

    def tenant(self) -> str:
        """Return the text of the column ``tenant``, empty without it; at most ``MAX_TENANT_CHARS`` characters."""
        value = self._values.get("tenant", "")
        if not isinstance(value, str) or len(value) > MAX_TENANT_CHARS:
            raise self.wrong("tenant", f"a text of at most {MAX_TENANT_CHARS} characters")
        return value

    def time_s(self, column: str) -> float:
        """Return a date and time as seconds since 1970, to the microsecond; read as UTC unless it has a zone."""
        whole, _, rest = self.text(column).partition(".")
        zone = rest.lstrip("0123456789")
        try:
            time = datetime.fromisoformat(f"{whole}.0{zone}" if rest else whole)
            seconds = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
            return seconds + float(f"0.{rest.removesuffix(zone)}0")
        except (ValueError, OverflowError):
            raise self.wrong(column, "a date and time") from None

    def wrong(self, column: str, expected: str) -> ConfigError:
        """Return the error that says where a value is wrong."""
        got = reprlib.repr(self._values.get(column))  # a line may be long
        return ConfigError(f"{self._file}, line {self._line}, column {column!r}: got {got}, expected {expected}")


def header_of(file: Path) -> str:
    """Return the first line of a file, compressed or not; it identifies the format.

    ``ConfigError`` if the file cannot be read, or is empty.
    """
    first = next(_lines(file), None)
    if first is None:
        raise ConfigError(f"{file}: expected a trace, the file is empty")
    return first.strip()


def read_csv(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a CSV file with a header and these columns, or more, compressed or not.

    ``ConfigError`` if the file cannot be read, a column is missing or there twice, or a row is longer or shorter than
    the header.
    """
    with closing(_lines(file)) as lines:
        reader = csv.reader(lines)
        try:
            names = next(reader, [])
            for column in columns:
                if column not in names:
                    found = ", ".join(names[:12]) or "an empty file"
                    raise ConfigError(f"{file}, line 1: no column {column!r}; got {found}")
            counts = Counter(names)
            for column in (*columns, "tenant"):
                if counts[column] > 1:
                    raise ConfigError(f"{file}, line 1: got column {column!r} twice")
            for values in reader:
                if not values:
                    continue
                if len(values) != len(names):
                    raise ConfigError(
                        f"{file}, line {reader.line_num}: got {len(values)} columns, expected {len(names)}"
                    )
                yield Row(file, reader.line_num, dict(zip(names, values, strict=True)))
        except csv.Error as error:  # a quote that is never closed
            raise ConfigError(f"{file}, line {reader.line_num}: {error}") from None


def read_json_lines(file: Path) -> Iterator[Row]:
    """Yield the rows of a file with one JSON object per line, compressed or not.

    ``ConfigError`` if the file cannot be read, or a line is no JSON object.
    """
    for line, text in enumerate(_lines(file), 1):
        if not text.strip():
            continue
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}, line {line}: expected a JSON object: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{file}, line {line}: got {text.strip()[:40]!r}, expected a JSON object")
        yield Row(file, line, values)


def _lines(file: Path) -> Generator[str, None, None]:
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8-sig", newline="") as lines:
            yield from lines
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{file}: the trace cannot be read: {reason}") from None
