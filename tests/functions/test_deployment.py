"""Files of functions: paths, errors by table and field, and folders that processes must be able to read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from manylora.core.errors import ConfigError
from manylora.functions.deployment import Deployment, FunctionSpec, check_folder, read_deployment

FILE = """
[node]
keep-alive-s = 5
[prices]
cpu-s = 0.5
[backbones.base]
model = "base"
[functions."team/one"]
backbone = "base"
adapter = "one"
tenant = "team"
[functions.two]
backbone = "base"
adapter = "/adapters/two"
"""


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    (tmp_path / "functions.toml").write_text(FILE)
    return read_deployment(tmp_path / "functions.toml")


def test_paths_of_a_file_are_relative_to_it(deployment: Deployment, tmp_path: Path) -> None:
    assert deployment.functions["team/one"].adapter == str(tmp_path / "one")
    assert deployment.functions["two"].adapter == "/adapters/two"
    assert deployment.backbones["base"].model == str(tmp_path / "base")
    assert (deployment.node.keep_alive_s, deployment.prices.cpu_s) == (5.0, 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('adapter = "one"', 'adapter = "one"\nslo = 1'), r"functions\.team/one: .*unknown field `slo`"),
        (('tenant = "team"', "slo-s = -1.0"), r"functions\.team/one: .*`\$\.slo-s`"),
        (('backbone = "base"\nadapter = "one"', 'backbone = "bass"\nadapter = "one"'), "backbone = 'bass', expected"),
        (('"team/one"', '"../one"'), r"functions\.'\.\./one'"),
        (("[functions.two]", "[functions.base]"), "the name of a backbone"),
        (
            ('adapter = "one"', 'adapter = "one/../base/one"'),
            r"functions\.team/one: .*model of backbone 'base'",
        ),
        (("cpu-s", "gpu-s"), "prices: 'gpu_s'"),
        (("[node]", "[nodes]"), "table 'nodes'"),
        (("keep-alive-s = 5", "keep-alive-s = "), "not TOML"),
    ],
)
def test_an_error_of_a_file_names_its_table_and_field(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    (tmp_path / "functions.toml").write_text(FILE.replace(*change, 1))
    with pytest.raises(ConfigError, match=message):
        read_deployment(tmp_path / "functions.toml")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives functions users of their own")
def test_an_adapter_must_be_open_to_the_user_of_a_function() -> None:
    with tempfile.TemporaryDirectory() as made:  # pytest's folders are closed to other users
        folder = Path(made)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / file).touch(0o644)
        spec = FunctionSpec(backbone="base", adapter=made)
        folder.chmod(0o700)
        with pytest.raises(ConfigError, match="not open to all users"):
            check_folder("f", spec)
        folder.chmod(0o755)
        check_folder("f", spec)
        (folder / "adapter_model.safetensors").chmod(0o640)
        with pytest.raises(ConfigError, match=r"functions\.f: .*adapter_model.safetensors is not readable"):
            check_folder("f", spec)
