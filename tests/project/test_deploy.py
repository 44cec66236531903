"""The images and their compose file: linted here, and built and run where a container engine is at hand."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import manylora

ROOT = Path(__file__).parents[2]


def stages() -> dict[str, list[str]]:
    """Return the instructions of each stage of the Dockerfile, without comments, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("FROM "):
            found[line.split(" AS ")[1]] = []
        else:
            found[list(found)[-1]].append(line)
    return found


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_an_image_runs_as_an_ordinary_user_and_tells_its_health(stage: str) -> None:
    lines = stages()[stage]
    kinds = [line.split()[0] for line in lines]
    assert kinds.index("USER") > max(index for index, kind in enumerate(kinds) if kind == "RUN")
    assert lines[kinds.index("USER")] != "USER root"
    assert "/health" in lines[kinds.index("HEALTHCHECK")]
    for line in lines:
        if line.startswith("COPY "):
            assert all((ROOT / source).exists() for source in line.split()[1:-1])


def test_the_compose_file_serves_with_a_key_and_mounts_models_to_be_read() -> None:
    service = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["manylora"]
    assert service["build"]["target"] in stages()
    assert "--api-key" in service["command"]
    assert all(volume.endswith(":ro") for volume in service["volumes"])


def test_the_workflow_runs_what_developers_run() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yaml").read_text())
    assert {"run": "make test"} in workflow["jobs"]["test"]["steps"]


def test_the_changes_name_this_version() -> None:
    assert f"## {manylora.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_image_serves_its_demo() -> None:
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs a container engine")
    subprocess.run(["docker", "build", "--target", "cpu", "--tag", "manylora:test", str(ROOT)], check=True)
    done = subprocess.run(
        ["docker", "run", "--rm", "manylora:test", "demo", "--once"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("project", [".", "packages/light"])
def test_the_description_on_a_package_index_has_no_link_into_the_repository(project: str) -> None:
    metadata = tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]
    text = (ROOT / project / metadata["readme"]).read_text()
    assert re.findall(r"\]\((?!https?:)([^)]*)\)", text) == []
