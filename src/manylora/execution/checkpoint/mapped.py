"""Memory of mapped files that were read: given back while more is read.

A weight is a view of its mapped file, whose pages stay in memory once they were read. The system takes them back when
it is short, but until then they count as the process's, and a container may be ended for them. Dropping them costs
little: the files stay in the system's cache, and a page that is read again comes from there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["drop_pages"]


def drop_pages(paths: Iterable[Path]) -> None:
    """Drop the pages of private mappings of these files; do nothing where the system shows no mappings.

    A page that was written to has the file's content afterwards: weights are only read.
    """
    wanted = {os.path.realpath(path) for path in paths}
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1] in ("r--p", "rw-p") and fields[5] in wanted:
            begin, end = (int(place, 16) for place in fields[0].split("-"))
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
