"""Report on an adapter directory, for ``manylora check``, and check directories before a model is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.core.adapters.folder import Folder, read_config
from manylora.core.adapters.method import AdapterSettings, parse_settings
from manylora.core.adapters.read import ReadRules, read_adapter
from manylora.core.adapters.remote import Registry
from manylora.core.adapters.request_files import AdapterRequestFiles, read_request_files
from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.sources import is_url, open_folder
from manylora.core.adapters.tensors import StoredModule, StoredTensor
from manylora.core.adapters.weight_file import WeightFile
from manylora.core.errors import AdapterError, WeightsMissing
from manylora.core.types import AdapterVersion

__all__ = ["AdapterReport", "ModuleVerdict", "check_folders", "explain_adapter", "inspect_adapter"]

MAX_EXPLAINED = 4096  # modules of a file that are explained one by one: the largest models have fewer

_PARTS = "lora_|vera_|hada_|lokr_|ia3_|token_adapter|modules_to_save|original_module|base_layer|weight$|bias$"
_SHARED = re.compile(r"base_model\.(?:model\.)?vera_[AB](?:\..*)?")  # matrices of VeRA, of all modules
_MODULE = re.compile(rf"\.(?:{_PARTS}).*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport:
    """Contents of a directory, and whether a base can serve it."""

    path: str
    base_model: str | None  # the base it was trained on, as its author called it
    task_type: str | None  # PEFT's name of the task
    rank: int  # largest rank
    use_rslora: bool  # whether scales divide by the root of the rank
    modules: tuple[StoredModule, ...]  # every adapted module, sorted by name
    disk_bytes: int  # size of the weight file
    fits: bool | None  # whether the base can serve it; ``None`` when no base was given
    problem: str | None  # the reason, when it does not fit
    version: AdapterVersion | None  # identity and sizes in every tier, when it fits
    request_files: AdapterRequestFiles  # settings of requests in its folder

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Distinct last names of the modules, sorted."""
        return tuple(sorted({m.name.rpartition(".")[2] for m in self.modules}))


def check_folders(paths: Mapping[str, str], *, max_bytes: int) -> None:
    """Check adapters' folders, given by name, as far as that needs no base: configuration and header of the weights.

    URLs are left to the engine's readers. ``AdapterError`` if a folder is missing, or no base can serve what is in it.
    """
    for name, path in paths.items():
        if not is_url(path):
            _stored(name, open_folder(name, path), max_bytes)


def _stored(name: str, folder: Folder, max_bytes: int) -> tuple[dict[str, Any], tuple[StoredModule, ...], int]:
    """Return the configuration, the modules and the bytes of the weight file of a folder."""
    config = read_config(folder)
    settings = parse_settings(name, config)
    with WeightFile(folder, max_bytes) as file:
        return config, settings.stored_modules(file.tensors), file.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleVerdict:
    """The tensors of one module in a weight file, and whether they would be applied."""

    module: str  # the module's name in the file; of a tensor whose module is not known, its own
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]  # their names, types and shapes
    problem: str | None  # the reason why they would not be applied, ``None`` if they would


def explain_adapter(
    path: str | Path, base: BaseShape | None = None, *, max_bytes: int, registry: Registry | None = None
) -> tuple[ModuleVerdict, ...]:
    """Say of every tensor of an adapter whether it would be applied, and why not: on ``base``, or on any.

    The reader refuses an adapter for its first fault. If it does, it is asked about the tensors of each module by
    themselves, beside those that all modules share. Of more than ``MAX_EXPLAINED`` modules those beyond are judged
    together. ``AdapterError`` if the folder or its weight file cannot be read.
    """
    name = str(path)
    folder = open_folder(name, path, registry=registry)
    with WeightFile(folder, max_bytes) as file:
        tensors = dict(file.tensors)
    shared = {key: tensor for key, tensor in tensors.items() if _SHARED.fullmatch(key)}
    groups: dict[str, dict[str, StoredTensor]] = {}
    for key in sorted(tensors.keys() - shared.keys()):
        module = _MODULE.sub("", key).removeprefix("base_model.model.")
        if module not in groups and len(groups) >= MAX_EXPLAINED:
            module = "all others"
        groups.setdefault(module, {})[key] = tensors[key]
    try:
        settings = parse_settings(name, read_config(folder))
    except AdapterError as error:
        return tuple(_verdict(module, group, error.reason) for module, group in groups.items())
    is_fine = _fault(settings, tensors, base) is None
    return tuple(
        _verdict(module, group, None if is_fine else _fault(settings, {**group, **shared}, base))
        for module, group in groups.items()
    )


def _fault(settings: AdapterSettings, tensors: Mapping[str, StoredTensor], base: BaseShape | None) -> str | None:
    """Return the reason why tensors would not be applied, if they were all that there is."""
    try:
        if base is None:
            settings.stored_modules(tensors)
        else:
            settings.match(tensors, base)
    except WeightsMissing:
        return None  # of other modules
    except AdapterError as error:
        return error.reason
    return None


def _verdict(module: str, tensors: Mapping[str, StoredTensor], problem: str | None) -> ModuleVerdict:
    described = tuple((key, tensor.dtype, tensor.shape) for key, tensor in tensors.items())
    return ModuleVerdict(module=module, tensors=described, problem=problem)


def inspect_adapter(
    path: str | Path, base: BaseShape | None = None, *, max_bytes: int, registry: Registry | None = None
) -> AdapterReport:
    """Report on an adapter directory or URL with a weight file of at most ``max_bytes``, and whether it fits ``base``.

    ``AdapterError`` if the adapter cannot be read for any base. One that does not fit ``base`` is only reported.
    """
    name = str(path)
    folder = open_folder(name, path, registry=registry)
    config, modules, disk_bytes = _stored(name, folder, max_bytes)
    version, problem = None, None
    if base is not None:
        try:
            version = read_adapter(name, path, ReadRules(base=base, max_bytes=max_bytes, registry=registry)).version
        except AdapterError as error:
            problem = error.reason
    return AdapterReport(
        path=name,
        base_model=config.get("base_model_name_or_path"),
        task_type=config.get("task_type"),
        rank=max(m.rank for m in modules),
        use_rslora=bool(config.get("use_rslora")),
        modules=modules,
        disk_bytes=disk_bytes,
        fits=None if base is None else problem is None,
        problem=problem,
        version=version,
        request_files=read_request_files(name, folder.place),
    )
