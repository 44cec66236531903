"""The controller without processes: nodes of functions, the ledger and its bill, REST."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import msgspec
import pytest
from msgspec import structs

from manylora.core.config import ServerConfig
from manylora.core.errors import CapacityError, ConfigError, RequestError
from manylora.functions.agent.supervise import supervise
from manylora.functions.controller import store as stores
from manylora.functions.controller.bill import make_bill, write_csv
from manylora.functions.controller.client import ControllerClient
from manylora.functions.controller.controller import LOST_AFTER_S, Controller
from manylora.functions.controller.server import ControllerServer, bind_guarded, make_app
from manylora.functions.controller.store import Store, read_ledger, read_prices
from manylora.functions.decisions.billing import Usage
from manylora.functions.deployment import Deployment, FunctionSpec, read_deployment
from manylora.functions.wire import Account, BackboneState, ControllerSetup, NodeReport
from manylora.serving.http.listening import bind
from manylora.serving.metrics.status_report import FunctionStart, FunctionState

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


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "ledger.db")
    yield store
    store.close()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def report(since: int, until: int, *, is_first: bool = False, run: str = "run", states: Any = ()) -> NodeReport:
    accounts = [Account(name="two", tenant="=team", usage=Usage(idle_device_ns=until - since, cpu_ns=until - since))]
    return NodeReport(
        incarnation=run,
        is_first=is_first,
        since_ns=since,
        until_ns=until,
        num_devices=1,
        num_cpus=1,
        accounts=[] if is_first else accounts,
        device_ns=until - since,
        cpu_ns=until - since,
        host_byte_ns=0,
        address="http://node",
        pid=1,
        generation=0,
        free_bytes=1 << 30,
        functions=list(states),
        backbones=[BackboneState(name="base", state="ready", num_bytes=1 << 20, load_s=3.0, zygote_s=2.0)],
    )


def test_a_function_stays_on_its_node_until_that_is_lost(store: Store, deployment: Deployment) -> None:
    clock = Clock()
    controller = Controller(store, deployment, now=clock)
    first = controller.report("a", report(0, 0, is_first=True))
    assert set(first.functions or ()) == {"team/one", "two"}
    busy = FunctionState(name="two", state="awake", requests_per_s=1.0, own_bytes=1 << 20)
    clock.now += 6.0
    assert "process:two" in controller.report("a", report(0, 10, states=[busy])).hold
    joined = controller.report("b", report(0, 0, is_first=True))
    assert set(joined.functions or ()) == {"team/one"}  # the other one is in use
    with pytest.raises(RequestError, match="replaced"):
        controller.report("a", report(10, 20, run="another"))
    other = structs.replace(report(0, 0, is_first=True, run="another"), address="http://other")
    with pytest.raises(RequestError, match="node 'a' by an agent at http://other, and one at http://node"):
        controller.report("a", other)

    again = Controller(store, deployment, now=clock)  # killed, and started again: nodes are remembered
    assert set(again.report("b", report(0, 0, is_first=True, run="next")).functions or ()) == {"team/one"}
    assert set(again.report("a", report(10, 20, states=[busy])).functions or ()) == {"two"}
    clock.now += LOST_AFTER_S
    moved = again.report("b", report(0, 10, run="next"))
    assert set(moved.functions or ()) == {"team/one", "two"}
    again.remove("two")
    assert [row.name for row in again.overview().functions] == ["team/one"]


def test_nothing_is_kept_of_a_function_that_was_removed(store: Store, deployment: Deployment) -> None:
    controller = Controller(store, deployment, now=Clock())
    controller.report("a", report(0, 0, is_first=True))
    start = FunctionStart(at=1.0, begun_from="zygote", stages_s={"fork": 1.0}, total_s=1.0)
    awake = FunctionState(name="two", state="awake", last_start=start)
    controller.report("a", report(0, 10, states=[awake]))
    assert store.starts() == {"two": start}
    controller.remove("two")
    controller.report("a", report(10, 20, states=[awake]))  # made before the node has learnt of it
    assert store.starts() == {}


def test_the_last_lines_of_a_function_are_kept_and_taken_once(store: Store, deployment: Deployment) -> None:
    controller = Controller(store, deployment, now=Clock())
    controller.report("a", report(0, 0, is_first=True))
    told = structs.replace(report(0, 10), lines={"two": ["one line", "another"], "unknown": ["x"]})
    controller.report("a", told)
    controller.report("a", told)  # its answer was lost
    assert controller.lines("two") == ["one line", "another"]
    assert controller.lines("team/one") == []
    for until in range(20, 50, 10):
        controller.report("a", structs.replace(report(until - 10, until), lines={"two": [str(until)] * 100}))
    assert controller.lines("two") == ["30"] * 100 + ["40"] * 100
    with pytest.raises(RequestError, match="unknown"):
        controller.lines("unknown")


def test_a_function_gets_the_node_that_is_expected_to_answer_first(store: Store, deployment: Deployment) -> None:
    clock = Clock()
    controller = Controller(store, deployment, now=clock)
    absent = [BackboneState(name="base", state="absent")]
    controller.report("a", structs.replace(report(0, 0, is_first=True), backbones=absent))
    controller.report("b", structs.replace(report(0, 0, is_first=True), backbones=absent))
    assert {row.node for row in controller.overview().functions} == {"a", "b"}  # none has the base
    joined = controller.report("c", report(0, 0, is_first=True))
    assert set(joined.functions or ()) == {"team/one", "two"}  # it has, and they have not been used
    clock.now += LOST_AFTER_S
    controller.report("a", structs.replace(report(0, 0), backbones=absent))
    assert {row.node for row in controller.overview().functions} == {"a"}  # the others are lost


def test_a_function_whose_backbone_left_the_configuration_holds_up_no_report(
    store: Store, deployment: Deployment
) -> None:
    store.register("orphan", FunctionSpec(backbone="gone", adapter="/a"))
    controller = Controller(store, deployment, now=Clock())
    orders = controller.report("a", report(0, 0, is_first=True))
    assert set(orders.functions or ()) >= {"team/one", "two"}


def test_a_report_that_does_not_add_up_is_not_recorded(store: Store) -> None:
    store.record("n", report(0, 0, is_first=True), {})
    wrong = msgspec.structs.replace(report(0, 10), device_ns=11)
    for one, message in ((wrong, "device_ns = 11"), (report(-5, 5), "the ledger ends at 0")):
        with pytest.raises(ConfigError, match=message):
            store.record("n", one, {})
    assert store.record("n", report(5, 15), {}) == 15  # a gap is the platform's


def test_a_bill_has_every_cost_once(deployment: Deployment, tmp_path: Path) -> None:
    path = tmp_path / "a#b?c%20d.db"  # it is read by a URI
    store = Store(path)
    store.configure(deployment.functions, deployment.prices)
    store.record("n", report(0, 0, is_first=True), {})
    store.record("n", report(10**9, 3 * 10**9), {})
    bill = make_bill(*read_ledger(path, 0, 2**62), read_prices(path), by_tenant=True)
    store.close()
    assert bill.adds_up
    assert bill.machines.lost_ns == 10**9
    assert [(line.name, line.usage.cpu_ns) for line in bill.lines] == [("=team", 2 * 10**9), ("(platform)", 10**9)]
    assert bill.lines[0].cost == pytest.approx(2 * 0.5 + 2 * 7e-6 * 48)
    file = io.StringIO()
    write_csv(bill, "tenant", file)
    assert file.getvalue().splitlines()[1].startswith("'=team,0.0,2.0,2.0,")  # no formula for a spreadsheet
    assert not make_bill(*read_ledger(path, 60 * 10**9, 2**62), read_prices(path), by_tenant=True).lines


def test_a_bill_takes_memory_by_its_accounts_and_not_by_its_minutes(store: Store, tmp_path: Path) -> None:
    minute = 60 * 10**9
    store.record("n", report(0, 0, is_first=True), {})
    for begin in range(0, 5 * minute, minute):
        store.record("n", report(begin, begin + minute), {})
    accounts, machines = read_ledger(tmp_path / "ledger.db", minute, 4 * minute)
    assert [(one.name, one.usage.cpu_ns) for one in accounts] == [("two", 3 * minute)]
    assert (machines.device_ns, machines.cpu_ns, machines.lost_ns) == (3 * minute, 3 * minute, 0)


def test_the_controller_asks_for_its_token_and_names_wrong_fields(store: Store, deployment: Deployment) -> None:
    app = make_app(Controller(store, deployment, now=Clock()), "secret")

    async def ask() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://controller") as client:
            assert (await client.get("/health")).status_code == 200
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
                assert (await client.get("/v1/functions", headers=headers)).status_code == 401
            client.headers["Authorization"] = "Bearer secret"
            answer = await client.put("/v1/functions/three", json={"backbone": "base", "adapter": "/a", "max-batch": 0})
            assert (answer.status_code, "max-batch" in answer.text) == (400, True)
            answer = await client.put("/v1/functions/three", json={"backbone": "other", "adapter": "/a"})
            assert (answer.status_code, "functions.three" in answer.text) == (400, True)
            assert (await client.put("/v1/functions/three", content=b"x" * (1 << 17))).status_code == 413
            assert (await client.put("/v1/functions/three", json={"backbone": "base", "adapter": "/a"})).is_success
            assert (await client.delete("/v1/functions/none")).status_code == 400
            rows = (await client.get("/v1/functions")).json()["functions"]
            assert [row["name"] for row in rows] == ["team/one", "two", "three"]
            answer = await client.post("/v1/nodes/n/report", content=b'{"incarnation": ""}')
            assert (answer.status_code, "incarnation" in answer.text) == (400, True)

    asyncio.run(ask())
    assert store.functions()["three"] == FunctionSpec(backbone="base", adapter="/a")


def test_an_adapter_that_cannot_be_read_is_refused_by_name(
    store: Store, deployment: Deployment, tmp_path: Path
) -> None:
    app = make_app(Controller(store, deployment, now=Clock()), None, has_adapters=True)
    missing, empty = tmp_path / "gone", tmp_path / "empty"
    empty.mkdir()

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://controller") as client:
            for folder, reason in ((missing, "no directory"), (empty, "no weight file")):
                answer = await client.put("/v1/functions/three", json={"backbone": "base", "adapter": str(folder)})
                assert answer.status_code == 400
                for part in ("functions.three", str(folder), reason):
                    assert part in answer.json()["error"]
            listed = (await client.get("/v1/functions")).json()["functions"]
            assert [one["name"] for one in listed] == ["team/one", "two"]

    asyncio.run(ask())
    with pytest.raises(ConfigError, match=rf"functions\.team/one: adapter = '{tmp_path}/one', which .*no directory"):
        supervise(
            tmp_path / "functions.toml", tmp_path / "state", ServerConfig(), node="n", token_file=None, log_level=0
        )
    assert not (tmp_path / "state").exists()


def test_an_open_address_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="without token and certificate"):
        bind_guarded("0.0.0.0", 0, is_guarded=False)
    bind_guarded("127.0.0.1", 0, is_guarded=False).close()


def test_a_folder_of_state_has_one_controller(deployment: Deployment, tmp_path: Path) -> None:
    def begin() -> ControllerServer:
        with bind("127.0.0.1", 0) as bound:
            setup = ControllerSetup(
                config=str(tmp_path / "functions.toml"), folder=str(tmp_path), token=None, socket=os.dup(bound.fileno())
            )
            return ControllerServer(setup)

    async def end(one: ControllerServer) -> None:
        one.drain()
        await one.serve(lambda: None)

    async def begin_two() -> None:
        first = begin()
        with mock.patch.object(stores, "LOCKED_S", 0.1), pytest.raises(ConfigError, match="another controller"):
            begin()
        assert json.loads((tmp_path / "controller.json").read_text()) == {"url": first.url}
        await end(first)
        await end(begin())

    asyncio.run(begin_two())


def test_a_commit_that_fails_leaves_no_transaction_open(tmp_path: Path) -> None:
    class Busy(sqlite3.Connection):
        """Where there is no write-ahead log, a reader that takes long makes a commit fail."""

        is_busy = False

        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            if statement == "COMMIT" and self.is_busy:
                raise sqlite3.OperationalError("database is locked")
            return super().execute(statement, *values)

    with mock.patch.object(sqlite3, "connect", partial(sqlite3.connect, factory=Busy)):
        store = Store(tmp_path / "ledger.db")
    spec = FunctionSpec(backbone="base", adapter="/a")
    with mock.patch.object(Busy, "is_busy", True), pytest.raises(CapacityError, match="locked"):
        store.register("lost", spec)
    store.register("kept", spec)
    assert list(store.functions()) == ["kept"]
    store.close()


def test_a_caller_tells_a_refusal_from_a_controller_that_is_not_there() -> None:
    """An agent whose report is refused ends with all its functions."""
    answers = [(200, "<html>Welcome</html>"), (200, "{}"), (408, "late"), (429, "busy"), (500, "broken")]

    async def ask(status: int, text: str) -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, text=text))
        async with ControllerClient("http://controller", None) as client:
            await client._http.aclose()
            client._http = httpx.AsyncClient(transport=transport, base_url="http://controller")
            await client.report("n", report(0, 1))

    for status, text in answers:
        with pytest.raises(CapacityError, match="http://controller"):
            asyncio.run(ask(status, text))
    with pytest.raises(RequestError, match="refused POST /v1/nodes/n/report: no"):
        asyncio.run(ask(400, '{"error": "no"}'))
