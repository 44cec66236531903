"""The sizes of an adapter in every tier, from its layout: the same for one that was read and one that is simulated."""

from __future__ import annotations

from manylora.adapters.layout import AdapterLayout
from manylora.adapters.shape import PageShape
from manylora.types import AdapterKey, AdapterVersion

__all__ = ["make_version"]


def make_version(
    layout: AdapterLayout, page: PageShape, *, key: str, source: str, disk_bytes: int | None = None
) -> AdapterVersion:
    """Return the version that an adapter with this layout is.

    Args:
        layout: Made by its method.
        page: The base's page.
        key: Its identity.
        source: The directory it came from, or its name where there is none.
        disk_bytes: Size of its weight file; as many as its weights have when ``None``.
    """
    modules = [part for group in layout.groups.values() for part in group.modules]
    return AdapterVersion(
        key=AdapterKey(key),
        source=source,
        rank=max(part.rank for part in modules),
        total_rank=sum(part.rank for part in modules),
        num_modules=len(modules),
        target_modules=tuple(sorted({part.module.name.rpartition(".")[2] for part in modules})),
        num_pages=layout.num_pages,
        weight_bytes=layout.weight_bytes,
        host_bytes=layout.num_pages * page.num_bytes,
        disk_bytes=layout.weight_bytes if disk_bytes is None else disk_bytes,
    )
