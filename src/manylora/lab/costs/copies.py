"""Duration of an adapter's copy to the device on an idle link. The executor adds waits for the link.

The least time is bytes over bandwidth; each separate copy adds to it. manylora copies whole pages of an adapter's image
from page-locked memory. S-LoRA copies every matrix of every layer by itself; on several devices it first cuts each
matrix and waits for all devices, matrix by matrix. CaraServe's on-demand baseline also copies every matrix by itself,
from pageable memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from manylora.core.errors import ConfigError
from manylora.core.types import AdapterVersion
from manylora.lab.catalog.hardware import Hardware

__all__ = ["COPY_PATHS", "CopyPath", "copy_time_s", "find_copy_path"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPath:
    """A way of copying adapters from host to device.

    Args:
        name: Name in options.
        link_share: Part of the link's bandwidth that the copies reach.
        is_by_page: Whether an adapter is copied by pages; otherwise as two matrices per module.
        copy_s: Fixed time of each copy, in seconds.
        sharded_bytes_per_s: Rate at which matrices are cut and copied to several devices in turn; ``None`` if they are
            cut beforehand and the devices copy their parts at the same time.
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
        # Asynchronous copies of 2 MiB from page-locked memory: the driver queues them faster than the link drains
        # them, so the fixed time is a few microseconds of set-up on the copy engine.
        CopyPath(name="pages", link_share=1.0, is_by_page=True, copy_s=2e-6),
        # 10 us is an asynchronous copy without overlap. The share is set by Chameleon's section 3.2 (loading takes
        # 17.5 % of the time to first token at rank 128), the sharded rate by its figure 5 (68 % at rank 32 on four).
        CopyPath(name="s-lora", link_share=0.35, is_by_page=False, copy_s=10e-6, sharded_bytes_per_s=1.15e9),
        # Assumed: the driver stages pageable memory at a quarter of the link, and each matrix costs a call and an
        # append on the device. It gives 22 ms for rank 64 on q, k and v of Llama-2-7B; CaraServe has some tens.
        CopyPath(name="pageable", link_share=0.25, is_by_page=False, copy_s=30e-6),
    )
}
"""Paths by name."""


def find_copy_path(path: str | CopyPath | None, lora_kernel: str) -> CopyPath:
    """Return a path, by name or by default the kernel family's own, or raise ``ConfigError``."""
    if isinstance(path, CopyPath):
        return path
    name = path or ("s-lora" if lora_kernel.startswith("s-lora") else "pages")
    if name not in COPY_PATHS:
        raise ConfigError(f"Got copies = {name!r}, expected one of {', '.join(COPY_PATHS)}")
    return COPY_PATHS[name]


def copy_time_s(version: AdapterVersion, path: CopyPath, hardware: Hardware, tensor_parallel: int = 1) -> float:
    """Return the duration of an adapter's copy from host to ``tensor_parallel`` devices over idle links, in seconds."""
    if path.is_by_page:
        num_bytes, num_copies = version.host_bytes, version.num_pages
    else:
        num_bytes, num_copies = version.weight_bytes, 2 * version.num_modules
    if tensor_parallel > 1 and path.sharded_bytes_per_s is not None:
        return num_bytes / path.sharded_bytes_per_s + num_copies * tensor_parallel * path.copy_s
    link = hardware.link_bytes_per_s * path.link_share
    return num_bytes / tensor_parallel / link + num_copies * path.copy_s
