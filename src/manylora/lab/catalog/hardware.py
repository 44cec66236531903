"""Accelerators for cost models: peaks of the data sheet, and the shares of them that kernels reach.

Peaks are from vendors' data sheets (dense, 16-bit inputs, 32-bit accumulation). Shares are estimates for large products
and streaming reads; replace them first when a device can be measured. No value was tuned to a result under load; see
`docs/cost-model.md`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from manylora.core.config import GIB
from manylora.core.errors import ConfigError
from manylora.core.options import CheckedOptions, option, require
from manylora.lab.tables import TableReader, read_table

__all__ = ["HARDWARE", "Hardware", "find_hardware", "read_hardware"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware(CheckedOptions):
    """One accelerator, its link to the host and to its peers; a tensor-parallel replica has several."""

    name: str
    flops_per_s: float = option(above=0, help="Peak dense 16-bit operations per second.")
    memory_bytes_per_s: float = option(above=0, help="Peak device memory bandwidth.")
    memory_bytes: int = option(above=0, help="Device memory that can be allocated.")
    link_bytes_per_s: float = option(above=0, help="Host to device, from page-locked memory in large copies.")
    disk_bytes_per_s: float = option(3e9, above=0, help="Sequential reads of adapter files.")
    flops_share: float = option(0.6, above=0, at_most=1, help="Part of the peak that large products reach.")
    memory_share: float = option(0.8, above=0, at_most=1, help="Part of the bandwidth that decode kernels reach.")
    launch_s: float = option(2e-6, above=0, help="Shortest time between two kernels in a captured graph.")
    peer_link: str = option("pcie", choices=("nvlink", "pcie"), help="Link between the devices of a replica.")
    all_reduce_bytes_per_s: float = option(10e9, above=0, help="Bus bandwidth of a large all-reduce over it.")
    context_bytes: int = option(GIB // 2, above=0, help="Device memory that the driver and the libraries take.")


# Links: PCIe 4.0 x16 carries 31.5 GB/s, 5.0 x16 63 GB/s; large page-locked copies reach about 80 to 85 % of it.
PCIE_4, PCIE_5 = 25e9, 52e9

# Links between devices: NVLink 3 carries 300 GB/s each way, of which NCCL counts on 235 (src/graph/tuning.cc); NVLink 4
# carries 450, of which large rings reach four fifths. Rings over PCIe 4.0 pass through the host's memory.

# Data sheet: A100 Tensor Core GPU (SXM4, 80 GB).
A100 = Hardware(
    name="a100-80",
    flops_per_s=312e12,
    memory_bytes_per_s=2039e9,
    memory_bytes=80 * GIB,
    link_bytes_per_s=PCIE_4,
    peer_link="nvlink",
    all_reduce_bytes_per_s=230e9,
)

# Data sheet: H100 SXM5.
H100 = Hardware(
    name="h100",
    flops_per_s=989e12,
    memory_bytes_per_s=3350e9,
    memory_bytes=int(79.6 * GIB),
    link_bytes_per_s=PCIE_5,
    flops_share=0.55,
    peer_link="nvlink",
    all_reduce_bytes_per_s=360e9,
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

    ``ConfigError`` if the name is unknown, or the file is invalid.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if hardware.endswith(".toml"):
        return read_hardware(Path(hardware))
    if hardware not in HARDWARE:
        raise ConfigError(f"Got {hardware = }, expected one of {', '.join(HARDWARE)}, or a .toml file")
    return HARDWARE[hardware]


def read_hardware(path: Path) -> Hardware:
    """Read a profile from TOML: fields of `Hardware`, and ``like``, a name of ``HARDWARE`` for the other fields.

    ::

        name = "our H200"
        like = "h200"
        flops_share = 0.62        # measured

    ``ConfigError`` if the file is missing or is no TOML, or a field is unknown, missing or not a positive number.
    """
    values = read_table(path)
    like = values.pop("like", None)
    require(like is None or str(like) in HARDWARE, f"{path}: like", like, f"one of {', '.join(HARDWARE)}")
    known = {} if like is None else asdict(HARDWARE[str(like)])
    given = {key.replace("-", "_") for key in values}
    known = {key: value for key, value in known.items() if key not in given}
    return TableReader({}).read(Hardware, known | values, str(path))
