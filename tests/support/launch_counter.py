"""Count what a step would launch on a GPU, without one.

Every operation of torch that computes or copies is a launch, and so is every Triton kernel; views and fresh memory are
none. Where torch needs two kernels for one operation (a product that splits its sum, say) it is counted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from manylora.execution.kernels.triton import fused as triton_fused

_FREE = frozenset({"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "set_"})


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts
        self.is_off = False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not (self.is_off or name in _FREE or (func.is_view and _is_view(result, args[0]))):
            self.counts[name] += 1
        return result


def _is_view(result: Any, source: torch.Tensor) -> bool:
    """Return whether nothing was computed: what may be a view (``to``, ``contiguous``) is not always one."""
    results = result if isinstance(result, list | tuple) else [result]
    return all(part.untyped_storage().data_ptr() == source.untyped_storage().data_ptr() for part in results)


@contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Count this thread's launches by name while the block runs."""
    counts: Counter[str] = Counter()
    operations = _Operations(counts)
    kind = type(triton_fused.rms_norm)
    run: Callable[..., Any] = kind.run

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        counts[f"triton {kernel.fn.__name__}"] += 1
        operations.is_off = True  # an interpreter's own copies
        try:
            return run(kernel, *args, **kwargs)
        finally:
            operations.is_off = False

    with patch.object(kind, "run", counted), operations, torch.inference_mode():
        yield counts
