"""How adapters travel: what a load costs on an idle link. Queueing for the link is the executor's business.

Bytes over bandwidth is the floor; what lies above it is the number of copies an adapter is cut into. manylora copies
whole pages out of page-locked memory, a piece of an adapter's image each. S-LoRA copies every matrix of every layer by
itself; and on several devices it cuts each matrix first and waits for all of them, matrix by matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

from manylora.catalog.hardware import Hardware
from manylora.errors import ConfigError
from manylora.types import AdapterVersion

__all__ = ["COPY_PATHS", "CopyPath", "copies_of_kernel", "copy_time_s", "find_copy_path"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPath:
    """A way of copying adapters from host to device.

    Args:
        name: For people.
        link_share: Part of the link's bandwidth that the copies reach while they run.
        is_by_page: Whether an adapter goes as pages; otherwise as two matrices per module.
        copy_s: Time that each copy takes beside its bytes.
        sharded_bytes_per_s: Rate at which matrices are cut and handed to several devices, one after the other; ``None``
            where they were cut beforehand and every device copies its own part at the same time.
    """

    name: str
    link_share: float
    is_by_page: bool
    copy_s: float
    sharded_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.link_share <= 1 or self.copy_s < 0:
            raise ConfigError(f"Got {self}, expected a link_share in (0, 1] and a copy_s of at least 0")


COPY_PATHS: dict[str, CopyPath] = {
    path.name: path
    for path in (
        # An asynchronous copy of 2 MiB from page-locked memory: the driver queues them faster than the link drains
        # them, so what is left of each is a few microseconds of set-up on the copy engine.
        CopyPath(name="pages", link_share=1.0, is_by_page=True, copy_s=2e-6),
        # 10 us is an asynchronous copy that nothing hides. The share is set by Chameleon's section 3.2 (loading takes
        # 17.5 % of the time to first token at rank 128), the sharded rate by its figure 5 (68 % at rank 32 on four).
        CopyPath(name="s-lora", link_share=0.35, is_by_page=False, copy_s=10e-6, sharded_bytes_per_s=1.15e9),
    )
}
"""Paths by name."""


def copies_of_kernel(lora_kernel: str) -> str:
    """Return the name of the path that goes with a family of kernels, where nothing else was chosen."""
    return "s-lora" if lora_kernel.startswith("s-lora") else "pages"


def find_copy_path(path: str | CopyPath) -> CopyPath:
    """Return a path by name; a path is returned as it is.

    Raises:
        ConfigError: No such name.
    """
    if isinstance(path, CopyPath):
        return path
    if path not in COPY_PATHS:
        raise ConfigError(f"Got copies = {path!r}, expected one of {', '.join(COPY_PATHS)}")
    return COPY_PATHS[path]


def copy_time_s(version: AdapterVersion, path: CopyPath, hardware: Hardware, tensor_parallel: int = 1) -> float:
    """Return how long an adapter takes from host to device over idle links, in seconds.

    Args:
        version: Which adapter.
        path: How it is copied.
        hardware: Whose link.
        tensor_parallel: Devices that each take a share.
    """
    if path.is_by_page:
        num_bytes, num_copies = version.host_bytes, version.num_pages
    else:
        num_bytes, num_copies = version.weight_bytes, 2 * version.num_modules
    if tensor_parallel > 1 and path.sharded_bytes_per_s is not None:
        return num_bytes / path.sharded_bytes_per_s + num_copies * tensor_parallel * path.copy_s
    link = hardware.link_bytes_per_s * path.link_share
    return num_bytes / tensor_parallel / link + num_copies * path.copy_s
