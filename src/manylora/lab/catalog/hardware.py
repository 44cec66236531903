"""Accelerators for cost models: peaks of the data sheet, and the shares of them that kernels reach.

Peaks are from vendors' data sheets (dense, 16-bit inputs, 32-bit accumulation). Shares are estimates for large products
and streaming reads; replace them first when a device can be measured. No value was tuned to a result under load; see
`docs/cost-model.md`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path

from manylora.core.config import GIB
from manylora.core.errors import ConfigError

__all__ = ["HARDWARE", "Hardware", "find_hardware", "read_hardware"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator, its link to the host and to its peers; a tensor-parallel replica has several.

    Args:
        name: Name in options and tables.
        flops_per_s: Peak dense 16-bit operations per second.
        memory_bytes_per_s: Peak device memory bandwidth.
        memory_bytes: Device memory that can be allocated.
        link_bytes_per_s: Host to device, one direction, from page-locked memory in large copies.
        disk_bytes_per_s: Sequential reads of adapter files.
        flops_share: Part of the peak that large products reach.
        memory_share: Part of the bandwidth that decode kernels reach.
        launch_s: Shortest time between two kernels in a captured graph.
        all_reduce_bytes_per_s: Bus bandwidth of an all-reduce between the devices of a replica.
        all_reduce_latency_s: Time of an empty all-reduce.
        context_bytes: Device memory that the driver and the libraries take.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    disk_bytes_per_s: float = 3e9
    flops_share: float = 0.6
    memory_share: float = 0.8
    launch_s: float = 2e-6
    all_reduce_bytes_per_s: float = 10e9
    all_reduce_latency_s: float = 25e-6
    context_bytes: int = GIB // 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and (not isinstance(value, int | float) or value <= 0):
                raise ConfigError(f"Got {field.name} = {value!r}, expected a number above 0")
        for name in ("flops_share", "memory_share"):
            if getattr(self, name) > 1:
                raise ConfigError(f"Got {name} = {getattr(self, name)!r}, expected a share of the peak, at most 1")


# Links: PCIe 4.0 x16 carries 31.5 GB/s, 5.0 x16 63 GB/s; large page-locked copies reach about 80 to 85 % of it.
PCIE_4, PCIE_5 = 25e9, 52e9

# Data sheet: A100 Tensor Core GPU (SXM4, 80 GB). NVLink 3 carries 300 GB/s each way; ring all-reduces reach 3/4 of it.
A100 = Hardware(
    name="a100-80",
    flops_per_s=312e12,
    memory_bytes_per_s=2039e9,
    memory_bytes=80 * GIB,
    link_bytes_per_s=PCIE_4,
    all_reduce_bytes_per_s=230e9,
    all_reduce_latency_s=10e-6,
)

# Data sheet: H100 SXM5. NVLink 4 carries 450 GB/s each way.
H100 = Hardware(
    name="h100",
    flops_per_s=989e12,
    memory_bytes_per_s=3350e9,
    memory_bytes=int(79.6 * GIB),
    link_bytes_per_s=PCIE_5,
    flops_share=0.55,
    all_reduce_bytes_per_s=360e9,
    all_reduce_latency_s=10e-6,
)

HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        # Data sheet: A10 (150 W: power limits large products, hence the lower share).
        Hardware(
            name="a10",
            flops_per_s=125e12,
            memory_bytes_per_s=600e9,
            memory_bytes=int(22.5 * GIB),  # 24 GB less error correction
            link_bytes_per_s=PCIE_4,
            flops_share=0.5,
        ),
        # Data sheet: A10G (300 W), the cloud's variant with about half of the tensor cores' rate.
        Hardware(
            name="a10g",
            flops_per_s=70e12,
            memory_bytes_per_s=600e9,
            memory_bytes=int(22.5 * GIB),
            link_bytes_per_s=PCIE_4,
        ),
        # Data sheet: A40 (300 W).
        Hardware(
            name="a40",
            flops_per_s=149.7e12,
            memory_bytes_per_s=696e9,
            memory_bytes=45 * GIB,  # 48 GB less error correction
            link_bytes_per_s=PCIE_4,
        ),
        A100,
        # Chameleon, section 5.1, uses the same card "configured with" less memory.
        replace(A100, name="a100-48", memory_bytes=48 * GIB),
        replace(A100, name="a100-24", memory_bytes=24 * GIB),
        # Data sheet: L40S (350 W; no NVLink).
        Hardware(
            name="l40s",
            flops_per_s=362e12,
            memory_bytes_per_s=864e9,
            memory_bytes=45 * GIB,
            link_bytes_per_s=PCIE_4,
            flops_share=0.5,
        ),
        H100,
        # Data sheet: H200 SXM: an H100 with more and faster memory.
        replace(H100, name="h200", memory_bytes_per_s=4800e9, memory_bytes=int(140.4 * GIB)),
    )
}
"""Accelerators by name."""


def find_hardware(hardware: str | Hardware) -> Hardware:
    """Return hardware by name, or from a TOML file if the name ends in ``.toml``; ``Hardware`` is returned unchanged.

    Raises:
        ConfigError: The name is unknown, or the file is invalid.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if hardware.endswith(".toml"):
        return read_hardware(Path(hardware))
    if hardware not in HARDWARE:
        raise ConfigError(f"Got {hardware = }, expected one of {', '.join(HARDWARE)}, or a .toml file")
    return HARDWARE[hardware]


def read_hardware(path: Path) -> Hardware:
    """Read a profile from TOML: fields of `Hardware`, and ``like``, a named profile for the other fields.

    ::

        name = "our H200"
        like = "h200"
        flops_share = 0.62        # measured

    Raises:
        ConfigError: The file is missing or is no TOML, or a field is unknown, missing or not a positive number.
    """
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"Cannot read a hardware profile from {path}: {error}") from error
    like = values.pop("like", None)
    unknown = values.keys() - {field.name for field in fields(Hardware)}
    if unknown:
        raise ConfigError(f"{path}: unknown {', '.join(sorted(unknown))}")
    try:
        return Hardware(**values) if like is None else replace(find_hardware(str(like)), **values)
    except TypeError as error:
        raise ConfigError(f"{path}: {error}; give every field, or name a profile it is like") from error
