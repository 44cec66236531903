"""`manylora functions serve --ray`: an agent on every node; a lost node is a lost agent."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from functions_folder import NAMES, PATIENCE_S, ask, functions_folder, tokens_of

from manylora.core.errors import CapacityError
from manylora.core.isolation.landlock import landlock_version
from manylora.functions.controller.bill import make_bill
from manylora.functions.controller.client import ControllerClient
from manylora.functions.controller.server import LEDGER
from manylora.functions.controller.store import read_ledger
from manylora.functions.decisions.billing import PriceList
from manylora.functions.wire import Overview, TlsFiles

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or landlock_version() < 4, reason="needs a Linux kernel with Landlock 4"
    ),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, which has no resources for an agent, and two nodes that have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 2}
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": quick}
        one = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            one.add_node(wait=False, num_cpus=1)
        one.wait_for_nodes()
        yield one
        one.shutdown()


def certificates(folder: Path, address: str) -> TlsFiles:
    authority = trustme.CA()
    member = authority.issue_cert(address)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    member.private_key_and_cert_chain_pem.write_to_path(folder / "member.pem")
    return TlsFiles(cert=str(folder / "member.pem"), key=str(folder / "member.pem"), ca=str(folder / "ca.pem"))


def wait_for(state: Path, tls: TlsFiles, is_so: Callable[[Overview], bool]) -> Overview:
    async def look() -> Overview:
        seen = None
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                url = json.loads((state / "controller.json").read_text())["url"]
                async with ControllerClient(url, None, tls) as client:
                    seen = await client.overview()
                if is_so(seen):
                    return seen
            except (CapacityError, FileNotFoundError):
                pass
            await asyncio.sleep(0.2)
        raise AssertionError(f"the platform is not as expected: {seen}")

    return asyncio.run(look())


def homes(seen: Overview) -> dict[str, str]:
    """Return the address of each function's node, if that reports."""
    nodes = {one.name: one.address for one in seen.nodes if one.is_up}
    return {row.name: nodes[row.node] for row in seen.functions if row.node in nodes}


def answer_of(state: Path, tls: TlsFiles, name: str) -> list[str]:
    """Return the answer of a function, wherever it is.

    A node learns of its functions with its next report, and one that reports late on a busy machine loses them.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        seen = wait_for(state, tls, lambda seen: name in homes(seen))
        answer = ask(homes(seen)[name], name, key="secret")
        if answer.status_code == 200 or time.monotonic() > deadline:
            return tokens_of(answer)
        time.sleep(0.2)


def test_functions_of_a_lost_node_go_to_another(cluster: Any, tmp_path: Path) -> None:
    tls, state = certificates(tmp_path, cluster.address.rpartition(":")[0]), tmp_path / "state"
    with functions_folder() as folder:
        command = [sys.executable, "-m", "manylora", "functions", "serve", "--ray", cluster.address, "--port", "0"]
        command += ["--config", str(folder / "functions.toml"), "--state-dir", str(state), "--drain-timeout", "1"]
        command += ["--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca, "--api-key", "secret"]
        process = subprocess.Popen(command)
        try:
            seen = wait_for(state, tls, lambda seen: len(set(homes(seen).values())) == 2)
            before = homes(seen)
            assert set(before) == set(NAMES)
            assert ask(before["f0"], "f0").status_code == 401  # the keys came from the controller
            expected = {name: answer_of(state, tls, name) for name in NAMES}

            before = homes(wait_for(state, tls, lambda seen: "f0" in homes(seen)))
            (lost,) = (one.name for one in seen.nodes if one.address == before["f0"])
            (node,) = (one for one in cluster.worker_nodes if one.node_id[:8] == lost.rpartition("-")[2])
            cluster.remove_node(node, allow_graceful=False)
            wait_for(state, tls, lambda seen: homes(seen).get("f0", before["f0"]) != before["f0"])
            assert answer_of(state, tls, "f0") == expected["f0"]

            cluster.add_node(num_cpus=1)
            wait_for(state, tls, lambda seen: sum(one.is_up for one in seen.nodes) == 2)
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()
    bill = make_bill(*read_ledger(state / LEDGER, 0, 2**62), PriceList(), by_tenant=True)
    assert bill.adds_up
