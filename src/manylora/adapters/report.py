"""What is in an adapter directory, for people: ``manylora adapters inspect``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manylora.adapters.config import read_settings
from manylora.adapters.read import SAFETENSORS, check_directory, read_adapter, read_tensors
from manylora.adapters.shape import BaseShape
from manylora.adapters.targeting import Targeting
from manylora.adapters.tensors import StoredTensor, TensorFileReader
from manylora.adapters.weights import pair_tensors
from manylora.errors import AdapterError
from manylora.types import AdapterVersion

__all__ = ["AdapterReport", "ModuleReport", "inspect_adapter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReport:
    """One adapted module.

    Args:
        name: As in the file.
        rank: Rows of its A, by the file.
        scale: What B A is multiplied by.
        dtype: Stored type of A, by safetensors' name.
        num_elements: Elements of A and B.
    """

    name: str
    rank: int
    scale: float
    dtype: str
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport:
    """A directory's contents and whether a base can serve it.

    Args:
        path: The directory.
        base_model: The base it was trained on, as its author called it.
        task_type: PEFT's name of the task.
        rank: Largest rank.
        use_rslora: Whether scales divide by the root of the rank.
        modules: Every adapted module, sorted by name.
        disk_bytes: Size of its weight file.
        fits: Whether the base can serve it; ``None`` when no base was given.
        problem: Why not, when it does not fit.
        version: Its identity and its sizes in every tier, when it fits.
    """

    path: str
    base_model: str | None
    task_type: str | None
    rank: int
    use_rslora: bool
    modules: tuple[ModuleReport, ...]
    disk_bytes: int
    fits: bool | None
    problem: str | None
    version: AdapterVersion | None

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The distinct last names of its modules, sorted."""
        return tuple(sorted({m.name.rpartition(".")[2] for m in self.modules}))


def inspect_adapter(
    path: str | Path,
    base: BaseShape | None = None,
    *,
    max_bytes: int,
    tensor_readers: Mapping[str, TensorFileReader] = SAFETENSORS,
) -> AdapterReport:
    """Look into an adapter directory.

    Args:
        path: The directory.
        base: The base to try it on, if any.
        max_bytes: Largest weight file.
        tensor_readers: Readers by file suffix.

    Raises:
        AdapterError: It is no adapter we could read on any base. That it does not fit ``base`` is no error but
            an answer.
    """
    name = str(path)
    directory = check_directory(name, path)
    settings = read_settings(name, directory)
    tensors, disk_bytes = read_tensors(name, directory, max_bytes, tensor_readers)
    targeting = Targeting(name, settings, ())
    modules = []
    for module, pair in sorted(pair_tensors(name, tensors).items()):
        a, b = pair.both()
        modules.append(
            ModuleReport(
                name=module,
                rank=a.shape[0] if a.shape else 0,
                scale=targeting.scale(module),
                dtype=a.dtype,
                num_elements=_count(a) + _count(b),
            )
        )
    version, problem = None, None
    if base is not None:
        try:
            version = read_adapter(name, directory, base, max_bytes=max_bytes, tensor_readers=tensor_readers).version
        except AdapterError as error:
            problem = error.reason
    return AdapterReport(
        path=name,
        base_model=settings.base_model,
        task_type=settings.task_type,
        rank=max(m.rank for m in modules),
        use_rslora=settings.use_rslora,
        modules=tuple(modules),
        disk_bytes=disk_bytes,
        fits=None if base is None else problem is None,
        problem=problem,
        version=version,
    )


def _count(tensor: StoredTensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count
