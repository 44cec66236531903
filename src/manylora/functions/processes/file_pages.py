"""Pages of files in a process's memory: most of a library is read once, while it is imported."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["clean_mappings", "let_file_pages_go"]

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ...p [0-9a-f]+ \S+ [1-9]\d* +/")
"""The line of a private mapping of a file."""


def let_file_pages_go() -> None:
    """Take the clean pages of private file mappings out of this process.

    The kernel keeps them in its cache, as any file's, and gives those back that are touched again. A fork inherits none
    of them either way.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with Path("/proc/self/smaps").open() as lines:  # line by line: what is freed after a start is copied by every fork
        found = list(clean_mappings(lines))
    for begin, end in found:
        advise(begin, end - begin, mmap.MADV_DONTNEED)  # a refusal costs memory alone


def clean_mappings(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield the addresses of private mappings of files of which no page was written: the others would lose that.

    Args:
        smaps: Lines of the kernel's file.
    """
    place: tuple[int, int] | None = None
    for line in smaps:
        if line[0] in "0123456789abcdef":
            found = _MAPPING.match(line)
            place = (int(found[1], 16), int(found[2], 16)) if found else None
        elif line.startswith("Anonymous:") and place is not None:
            if line.split()[1] == "0":
                yield place
            place = None
