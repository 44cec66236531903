"""Random instances of the choices of `manylora.functions.decisions`, with the sizes and times of real models."""

from __future__ import annotations

import random

from manylora.functions.decisions import Artefact, ArtefactKind, Held, MemoryKind, Place, PreloadProblem

__all__ = ["offload_instance", "preload_instance"]

GB = 10**9


def preload_instance(
    rng: random.Random, num_functions: int, *, num_nodes: int = 1, num_devices: int = 1, num_backbones: int = 2
) -> PreloadProblem:
    """Return functions with skewed rates over backbones of 13 and 26 GB, on nodes that cannot hold all of it."""
    host, device = MemoryKind.HOST, MemoryKind.DEVICE
    places = []
    for node in range(num_nodes):
        free = int(rng.uniform(4, 40) * GB)
        places.append(Place(name=f"host{node}", memory=host, node=str(node), free_bytes=free))
        for number in range(num_devices):
            free = int(rng.uniform(10, 48) * GB)
            places.append(Place(name=f"device{node}.{number}", memory=device, node=str(node), free_bytes=free))
    rates = [rng.paretovariate(1.2) * 0.01 for _ in range(num_functions)]
    backbone_of = [rng.randrange(num_backbones) for _ in range(num_functions)]
    artefacts = [
        Artefact(
            name="libraries",
            kind=ArtefactKind.LIBRARIES,
            num_bytes={host: 3 * GB},
            saves_s={host: 8.0},
            requests_per_s=sum(rates),
        )
    ]
    for backbone in range(num_backbones):
        size = rng.choice([13, 26]) * GB
        artefacts.append(
            Artefact(
                name=f"backbone{backbone}",
                kind=ArtefactKind.BACKBONE,
                num_bytes={host: size, device: size},
                saves_s={host: size / 2e9, device: size / 2e9 + size / 16e9},
                requests_per_s=sum(rate for rate, on in zip(rates, backbone_of, strict=True) if on == backbone),
                parent="libraries",
            )
        )
    for function, (rate, backbone) in enumerate(zip(rates, backbone_of, strict=True)):
        size = int(rng.uniform(0.05, 0.6) * GB)
        artefacts.append(
            Artefact(
                name=f"adapter{function}",
                kind=ArtefactKind.ADAPTER,
                num_bytes={host: size, device: size},
                saves_s={host: size / 2e9 + 0.1, device: size / 2e9 + 0.1 + size / 10e9},
                requests_per_s=rate,
                parent=f"backbone{backbone}",
            )
        )
        artefacts.append(
            Artefact(
                name=f"kernels{function}",
                kind=ArtefactKind.KERNELS,
                num_bytes={device: 473_000_000},
                saves_s={device: rng.uniform(0.5, 3.0)},
                requests_per_s=rate,
                parent=f"backbone{backbone}",
            )
        )
    return PreloadProblem(tuple(artefacts), tuple(places))


def offload_instance(rng: random.Random, num_functions: int, *, num_backbones: int = 2) -> list[Held]:
    """Return what a device holds: backbones, and adapters and kernels of functions, a tenth of them in use."""
    held = []
    for backbone in range(num_backbones):
        size = rng.choice([13, 26]) * GB
        held.append(
            Held(
                name=f"backbone{backbone}",
                num_bytes=size,
                value=rng.uniform(1, 20),
                host_value=rng.uniform(0, 1),
                host_bytes=rng.choice([0, size]),
            )
        )
    for function in range(num_functions):
        value, size = rng.paretovariate(1.2) * 0.05, int(rng.uniform(0.05, 0.6) * GB)
        parent = f"backbone{rng.randrange(num_backbones)}"
        adapter = Held(
            name=f"adapter{function}",
            num_bytes=size,
            value=value,
            host_value=0.8 * value,
            host_bytes=rng.choice([0, size]),
            parent=parent,
            in_use=rng.random() < 0.1,
        )
        kernels = Held(name=f"kernels{function}", num_bytes=473_000_000, value=2 * value, parent=parent)
        held += [adapter, kernels]
    return held
