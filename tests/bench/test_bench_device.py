"""The device benchmark's profile: what it measures is what the cost model reads."""

from pathlib import Path

import pytest
import torch
from device import as_toml, launch_s, measure, profile

from manylora.lab.catalog.hardware import HARDWARE, read_hardware

RATES = {"flops_per_s": 500e12, "memory_bytes_per_s": 3e12, "launch_s": 2.5e-6, "link_bytes_per_s": 50e9}


def test_a_measured_profile_is_read_back(tmp_path: Path) -> None:
    measured = profile(RATES, "h100", "ours")
    assert measured.flops_share == pytest.approx(500 / 989)
    assert measured.flops_per_s == HARDWARE["h100"].flops_per_s
    path = tmp_path / "ours.toml"
    path.write_text(as_toml(measured))
    assert read_hardware(path) == measured


def test_without_a_data_sheet_what_is_reached_is_the_peak() -> None:
    measured = profile(RATES, None, "ours")
    assert measured.flops_per_s * measured.flops_share == RATES["flops_per_s"]


def test_rates_of_this_machine_are_rates() -> None:
    cpu = torch.device("cpu")
    rates = measure(cpu, is_small=True)
    assert rates.keys() == RATES.keys()
    assert 1e8 < rates["flops_per_s"] < 1e15
    assert 1e-8 < launch_s(cpu, 100) < 1e-2
