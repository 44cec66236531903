"""Adapter versions for a workload: sized by their real layout, without weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from manylora.adapters.layout import AdapterLayout, make_version
from manylora.adapters.methods import PLAIN_LORA
from manylora.adapters.shape import BaseShape
from manylora.errors import AdapterError
from manylora.types import AdapterKey, AdapterVersion
from manylora.workloads import AdapterSpec

__all__ = ["adapter_versions"]


def adapter_versions(adapters: Iterable[AdapterSpec], base: BaseShape) -> dict[str, AdapterVersion]:
    """Return a version for every adapter, by name.

    Two of the same rank and targets have the same layout, but their own names and so their own identities.

    Raises:
        AdapterError: A rank is below 1, or no module of this base is a target.
    """
    sizes: dict[tuple[int, tuple[str, ...]], AdapterVersion] = {}
    versions = {}
    for spec in adapters:
        kind = spec.rank, spec.targets
        if kind not in sizes:
            sizes[kind] = make_version(_lay_out(spec, base), base.page, key="", source="")
        key = hashlib.blake2b(f"{base.fingerprint}/{spec.name}/{kind}".encode(), digest_size=16).hexdigest()
        versions[spec.name] = replace(sizes[kind], key=AdapterKey(key), source=spec.name)
    return versions


def _lay_out(spec: AdapterSpec, base: BaseShape) -> AdapterLayout:
    targets = set(spec.targets)
    modules = [one.name for one in base.modules if one.name.rpartition(".")[2] in targets]
    if spec.rank < 1 or not modules:
        raise AdapterError(
            spec.name, f"rank {spec.rank} on {', '.join(spec.targets)} applies to no module of {base.name}"
        )
    return PLAIN_LORA.lay_out(dict.fromkeys(modules, spec.rank), base)
