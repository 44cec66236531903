"""The images, the compose file and the chart: linted, rendered, validated; built and run where an engine is at hand.

Helm's own library renders the chart, hadolint reads the Dockerfile, and resources are validated against Kubernetes'
schemas. All three come as packages (the extra `test`); where a platform has none, their tests are skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import manylora
from manylora.cli.app import make_app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "manylora"

VALUES: Mapping[str, dict[str, Any]] = {
    "as given": {},
    "with keys, tenants and TLS": {
        "keys": {"existingSecret": "keys"},
        "tenants": {"existingSecret": "tenants"},
        "router": {"tls": {"secretName": "public"}, "service": {"port": 443}, "manageAdapters": True},
        "server": {
            "tls": {"secretName": "inner"},
            "servedModelName": "llama",
            "models": {"existingClaim": "models"},
            "adapters": {"existingClaim": "adapters"},
        },
    },
    "on GPUs, scaled and watched": {
        "tracing": {"endpoint": "http://collector:4317"},
        "server": {
            "gpus": 2,
            "image": {"tag": "0.2.0-cuda"},
            "cache": {"size": "50Gi", "storageClass": "fast"},
            "autoscaling": {"enabled": True},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "args": ["--max-num-seqs=64"],
        },
        "router": {
            "ingress": {"enabled": True, "host": "llm.example", "tlsSecretName": "public"},
            "policy": "affinity",
        },
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {"clients": [{"namespaceSelector": {}}]},
    },
    "with functions": {
        "functions": {
            "enabled": True,
            "config": '[backbones.base]\nmodel = "/models/base"\n',
            "adapters": {"existingClaim": "adapters"},
            "podAnnotations": {"a": "b"},
        },
        "preStopSeconds": 20,
        "server": {"drainSeconds": 300},
    },
    "over pods of others": {
        "server": {"replicas": 0},
        "router": {"backends": ["pods:models/app=vllm,tier in (a):8000#env:KEY", "pool:models/llama", "pool:two/qwen"]},
    },
}


def stages() -> dict[str, list[str]]:
    """Return the instructions of each stage of the Dockerfile, without comments, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("FROM "):
            found[line.split(" AS ")[1]] = []
        elif found:
            found[list(found)[-1]].append(line)
    return found


def parse(args: Sequence[str]) -> None:
    """Parse a command line as `manylora` does; raise for an option that does not exist or a value of another type."""
    command: Any = typer.main.get_command(make_app())
    rest = list(args)
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    command.make_context("manylora", rest)


@pytest.mark.parametrize("stage", ["cpu", "cuda", "route"])
def test_an_image_runs_as_an_ordinary_user_without_a_compiler(stage: str) -> None:
    lines = stages()["base"] + stages()[stage]
    kinds = [line.split()[0] for line in lines]
    assert kinds.index("USER") > max(index for index, kind in enumerate(kinds) if kind == "RUN")
    assert lines[kinds.index("USER")] == "USER 10001:10001"
    assert "/health" in lines[kinds.index("HEALTHCHECK")]
    assert 'ENTRYPOINT ["tini", "--", "manylora"]' in lines
    assert not any("gcc" in line for line in lines)
    parse(json.loads(lines[-1].removeprefix("CMD ").replace('"--help"', '"--backend", "http://server:8000"')))


def test_the_dockerfile_copies_what_there_is_and_its_context_lets_through() -> None:
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    sources = {
        source
        for lines in stages().values()
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    for source in sources:
        assert (ROOT / source).exists()
        assert any(source == one or source.startswith(one + "/") for one in kept)


def test_the_libraries_of_an_image_are_those_of_the_project() -> None:
    (line,) = [line for line in stages()["requirements"] if line.startswith("RUN")]
    files = {"pyproject.toml": ROOT / "pyproject.toml", "light.toml": ROOT / "packages" / "light" / "pyproject.toml"}
    for command in line.removeprefix("RUN ").split("&&"):
        _, script, file, *extras, _, _ = command.split()
        done = subprocess.run(
            [sys.executable, DEPLOY / "image" / script, files[file], *extras],
            capture_output=True,
            text=True,
            check=True,
        )
        project = tomllib.loads(files[file].read_text())["project"]
        wanted = [
            *project["dependencies"],
            *(one for extra in extras for one in project["optional-dependencies"][extra]),
        ]
        assert done.stdout.splitlines() == wanted


def test_the_dockerfile_is_linted() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_compose_file_is_locked_down_and_its_options_exist() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for one in services.values():
        assert one["build"]["target"] in stages()
        assert one["read_only"]
        assert one["cap_drop"] == ["ALL"]
        assert all(
            volume.endswith(":ro") or volume.partition(":")[2] in ("/cache", "/state") for volume in one["volumes"]
        )
        parse(one["command"])


def rendered(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the resources of the chart, by Helm's own library."""
    helm = pytest.importorskip("helm_python", reason="needs Helm's library")
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name="r", namespace="space")
    texts = [text for path, text in files.items() if not path.endswith(".txt")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def pods(resources: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for one in resources:
        if "template" in one.get("spec", {}):
            yield one["metadata"]["name"], one["spec"]["template"]


@pytest.mark.parametrize("name", VALUES)
def test_the_chart_s_resources_are_valid(name: str) -> None:
    validation = pytest.importorskip("kubernetes_validate", reason="needs Kubernetes' schemas")
    custom = set()
    for one in rendered(VALUES[name]):
        try:
            validation.validate(one, "1.34", strict=True)
        except validation.SchemaNotFoundError:
            custom.add(one["kind"])
    assert custom <= {"ServiceMonitor", "ScaledObject"}


@pytest.mark.parametrize("name", VALUES)
def test_the_chart_s_pods_drain_and_their_options_and_volumes_exist(name: str) -> None:
    resources = rendered(VALUES[name])
    labels = []
    for _, template in pods(resources):
        spec = template["spec"]
        labels.append(template["metadata"]["labels"])
        (container,) = spec["containers"]
        parse(container["args"])
        (drain,) = (word for word in container["args"] if word.startswith("--drain-timeout="))
        pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert spec["terminationGracePeriodSeconds"] > pause + float(drain.partition("=")[2])
        assert spec["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["readinessProbe"]["httpGet"]["path"] == "/health"
        assert container["livenessProbe"]["httpGet"]["path"] == "/version"
        claims = [one["metadata"]["name"] for one in _claims(resources, template)]
        volumes = {one["name"] for one in spec["volumes"]} | set(claims)
        assert {one["name"] for one in container["volumeMounts"]} <= volumes
        folders = [one["mountPath"] for one in container["volumeMounts"]]
        for word in container["args"]:
            path = word.partition("=")[2]
            if path.startswith("/"):
                assert any(path == one or path.startswith(one + "/") for one in folders), word
    for one in resources:  # budgets, services, monitors and policies choose pods that there are
        selector = one["spec"].get("podSelector") or one["spec"].get("selector") if "spec" in one else None
        if selector is not None:
            chosen = selector.get("matchLabels", selector)
            assert any(chosen.items() <= one.items() for one in labels), one["kind"]


@pytest.mark.parametrize("tenants", ["", "tenants"])
def test_prometheus_has_the_key_of_all_that_demand_one(tenants: str) -> None:
    resources = rendered(
        {
            "keys": {"existingSecret": "keys"},
            "tenants": {"existingSecret": tenants},
            "serviceMonitor": {"enabled": True},
        }
    )
    demanded = {
        template["metadata"]["labels"]["app.kubernetes.io/component"]: any(
            one["name"] == "MANYLORA_METRICS_KEY" for one in template["spec"]["containers"][0]["env"]
        )
        for _, template in pods(resources)
    }
    sent = {
        one["metadata"]["labels"]["app.kubernetes.io/component"]: "authorization" in one["spec"]["endpoints"][0]
        for one in resources
        if one["kind"] == "ServiceMonitor"
    }
    assert sent == demanded == {"server": bool(tenants), "router": bool(tenants)}


def _claims(resources: Sequence[dict[str, Any]], template: dict[str, Any]) -> list[dict[str, Any]]:
    (owner,) = (one for one in resources if one.get("spec", {}).get("template") is template)
    claims: list[dict[str, Any]] = owner["spec"].get("volumeClaimTemplates", [])
    return claims


def test_values_of_one_s_own_take_the_place_of_defaults_and_are_quoted() -> None:
    validation = pytest.importorskip("kubernetes_validate", reason="needs Kubernetes' schemas")
    own = {"podDisruptionBudget": {"minAvailable": 0}}
    resources = rendered({"server": {"servedModelName": "llama: 8B #1", **own}, "router": own})
    for one in resources:
        validation.validate(one, "1.34", strict=True)
    budgets = [one["spec"] for one in resources if one["kind"] == "PodDisruptionBudget"]
    assert [(one.get("minAvailable"), "maxUnavailable" in one) for one in budgets] == [(0, False)] * 2
    server = next(one for name, one in pods(resources) if name == "r-manylora-server")
    assert "--served-model-name=llama: 8B #1" in server["spec"]["containers"][0]["args"]


def test_a_router_that_looks_for_pods_may_do_that_and_no_more() -> None:
    resources = rendered(VALUES["over pods of others"])
    by_kind = {kind: [one for one in resources if one["kind"] == kind] for kind in ("Role", "RoleBinding")}
    pods_rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    rules = {one["metadata"]["namespace"]: one["rules"] for one in by_kind["Role"]}
    assert set(rules) == {"models", "two"}
    for namespace, pool in (("models", "llama"), ("two", "qwen")):
        of_pods, of_pools = rules[namespace]
        assert of_pods == pods_rule
        assert (of_pools["resources"], of_pools["resourceNames"]) == (["inferencepools"], [pool])
        assert of_pools["verbs"] == ["get"]
    specs = {name: template["spec"] for name, template in pods(resources)}
    router, server = specs["r-manylora-router"], specs["r-manylora-server"]
    assert router["automountServiceAccountToken"] and not server["automountServiceAccountToken"]
    account = {"kind": "ServiceAccount", "name": router["serviceAccountName"], "namespace": "space"}
    assert router["serviceAccountName"] != server["serviceAccountName"]
    assert account["name"] in {one["metadata"]["name"] for one in resources if one["kind"] == "ServiceAccount"}
    for binding in by_kind["RoleBinding"]:
        assert binding["subjects"] == [account]
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", binding["metadata"]["name"])
    # Without such sources there is neither a right nor a token, and an account of one's own gets the rights.
    plain = rendered({})
    assert not [one for one in plain if one["kind"].startswith("Role")]
    assert not any(template["spec"]["automountServiceAccountToken"] for _, template in pods(plain))
    own = rendered({**VALUES["over pods of others"], "serviceAccount": {"create": False, "name": "mine"}})
    assert {one["subjects"][0]["name"] for one in own if one["kind"] == "RoleBinding"} == {"mine"}


def test_the_chart_is_linted_and_refuses_values_that_it_does_not_know() -> None:
    helm = pytest.importorskip("helm_python", reason="needs Helm's library")
    report = helm.lint(str(CHART), strict=True, kube_version="v1.34.0")
    assert report["errors"] == []
    assert [one["error"] for one in report["messages"]] == ["icon is recommended"]
    for wrong in (
        {"server": {"gpu": 1}},
        {"preStopSeconds": "5"},
        {"image": {"digest": "latest"}},
        {"router": {"backends": ["gpu1:8000"]}},
    ):
        with pytest.raises(helm.HelmError, match=next(iter(wrong))):
            rendered(wrong)


def test_the_chart_has_the_version_of_the_program() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == manylora.__version__


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
        ["docker", "run", "--rm", "--read-only", "--tmpfs", "/tmp", "-v", "/cache", "manylora:test", "demo", "--once"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("project", [".", "packages/light"])
def test_the_description_on_a_package_index_has_no_link_into_the_repository(project: str) -> None:
    metadata = tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]
    text = (ROOT / project / metadata["readme"]).read_text()
    assert re.findall(r"\]\((?!https?:)([^)]*)\)", text) == []
