"""Adapters that a workload names, as versions an engine can register: sized by their real layout, without weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from manylora.adapters.layout import lay_out
from manylora.adapters.shape import BaseShape
from manylora.errors import AdapterError
from manylora.types import AdapterKey, AdapterVersion
from manylora.workloads import AdapterSpec

__all__ = ["adapter_versions"]


def adapter_versions(adapters: Iterable[AdapterSpec], base: BaseShape) -> dict[str, AdapterVersion]:
    """Return a version for every adapter, by name.

    Two of the same rank and targets are laid out alike but have names, and so identities, of their own.

    Args:
        adapters: What the workload names.
        base: The base model's shape.

    Raises:
        AdapterError: A rank is below 1, or the targets are no modules of this base.
    """
    sizes: dict[tuple[int, tuple[str, ...]], AdapterVersion] = {}
    versions = {}
    for spec in adapters:
        kind = spec.rank, spec.targets
        if kind not in sizes:
            sizes[kind] = _sized(spec, base)
        like = sizes[kind]
        key = hashlib.blake2b(f"{base.fingerprint}/{spec.name}/{kind}".encode(), digest_size=16).hexdigest()
        versions[spec.name] = AdapterVersion(
            key=AdapterKey(key),
            source=spec.name,
            rank=like.rank,
            total_rank=like.total_rank,
            num_modules=like.num_modules,
            target_modules=like.target_modules,
            num_pages=like.num_pages,
            weight_bytes=like.weight_bytes,
            host_bytes=like.host_bytes,
            disk_bytes=like.disk_bytes,
        )
    return versions


def _sized(spec: AdapterSpec, base: BaseShape) -> AdapterVersion:
    targets = set(spec.targets)
    modules = [one.name for one in base.modules if one.name.rpartition(".")[2] in targets]
    if spec.rank < 1 or not modules:
        raise AdapterError(
            spec.name, f"rank {spec.rank} on {', '.join(spec.targets)} applies to no module of {base.name}"
        )
    layout = lay_out(dict.fromkeys(modules, spec.rank), base)
    weight_bytes = layout.used_elements * base.page.element_bytes
    return AdapterVersion(
        key=AdapterKey(""),
        source="",
        rank=spec.rank,
        total_rank=spec.rank * len(modules),
        num_modules=len(modules),
        target_modules=tuple(sorted(targets)),
        num_pages=layout.num_pages,
        weight_bytes=weight_bytes,
        host_bytes=layout.num_pages * base.page.num_bytes,
        disk_bytes=weight_bytes,
    )
