"""The parts of `manylora functions` that need no process: files, decisions, accounts, REST, and one address for all."""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import structs
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from manylora.core.config import ServerConfig
from manylora.core.errors import ConfigError, RequestError
from manylora.functions.agent.dispatch import Dispatch
from manylora.functions.agent.supervise import supervise
from manylora.functions.controller.app import make_app
from manylora.functions.controller.bill import make_bill, write_csv
from manylora.functions.controller.controller import LOST_AFTER_S, Controller
from manylora.functions.controller.process import bind_guarded
from manylora.functions.controller.store import Store, read_ledger, read_prices
from manylora.functions.decisions.batching import FirstTokenFit, FirstTokenTime
from manylora.functions.decisions.billing import PLATFORM, Usage
from manylora.functions.decisions.holding import HoldingCost, NodeRoom, Wanted, revise_holding
from manylora.functions.decisions.meter import MachineState, UsageMeter
from manylora.functions.decisions.rates import RequestRate
from manylora.functions.deployment import Deployment, FunctionSpec, check_folder, read_deployment
from manylora.functions.wire import Account, BackboneState, NodeReport
from manylora.serving.http.auth import Gate
from manylora.serving.http.room import BodyRoom
from manylora.serving.metrics.status_report import FunctionState

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


def test_every_state_of_a_machine_is_charged_until_the_next() -> None:
    meter = UsageMeter(0, num_cpus=2)
    meter.change(10, MachineState(awake=["a", "b"], host_bytes={"a": 3}, shared_host_bytes=[(10, ["a", "b"])]))
    meter.change(25, MachineState(running=["a"], awake=["a", "b"]))
    meter.use_cpu("a", 7)
    meter.use_cpu("b", 1000)  # readings may exceed the machine's time: the rest is charged with the next interval
    taken = meter.take(30)
    assert dict(taken.accounts) == {
        PLATFORM: Usage(idle_device_ns=10),
        "a": Usage(active_device_ns=5, idle_device_ns=8, cpu_ns=7, host_byte_ns=45 + 75),
        "b": Usage(idle_device_ns=7, cpu_ns=53, host_byte_ns=75),
    }
    assert (taken.device_ns, taken.cpu_ns, taken.host_byte_ns) == (30, 60, 45 + 150)
    later = meter.take(530)
    assert later.accounts["b"].cpu_ns == 947
    assert sum(one.cpu_ns for one in later.accounts.values()) == 1000


def test_the_time_of_a_batch_is_learned_from_batches() -> None:
    fit = FirstTokenFit(FirstTokenTime(1.0, 1.0))
    for size in (1, 4, 2, 8, 3):
        fit.observe(size, 0.2 + 0.05 * (size - 1))
    assert fit.time.alone_s == pytest.approx(0.2)
    assert fit.time.each_s == pytest.approx(0.05)


def test_rates_fade() -> None:
    rate = RequestRate(window_s=10.0)
    for second in range(100):
        rate.note(float(second), 3)
    assert rate.per_s(99.0) == pytest.approx(3.0, rel=0.06)
    assert rate.per_s(300.0) == 0.0


def test_what_is_held_is_most_value_with_all_that_it_needs() -> None:
    base, libraries = HoldingCost(100, 10.0), HoldingCost(50, 5.0)
    wanted = [
        Wanted(
            name="busy", backbone="b", requests_per_s=1.0, adapter=HoldingCost(1, 0.1), process=HoldingCost(40, 0.3)
        ),
        Wanted(
            name="calm", backbone="b", requests_per_s=0.1, adapter=HoldingCost(1, 0.1), process=HoldingCost(40, 0.3)
        ),
        Wanted(
            name="idle", backbone="b", requests_per_s=0.0, adapter=HoldingCost(1, 0.1), process=HoldingCost(40, 0.3)
        ),
    ]
    nodes = [NodeRoom("n", 193), NodeRoom("small", 99)]
    held = revise_holding({}, wanted, {"b": (base, libraries)}, nodes)
    assert held == {
        "n": {"backbone:b", "libraries:b", "adapter:busy", "adapter:calm", "process:busy"},
        "small": frozenset(),
    }
    equal = [replace(one, requests_per_s=1.0 + 0.01 * (one.name == "calm")) for one in wanted[:2]]
    assert revise_holding(held, equal, {"b": (base, libraries)}, nodes) == held  # another choice is worth little more
    alone = revise_holding(held, equal[1:], {"b": (base, libraries)}, nodes)
    assert alone["n"] == {"backbone:b", "libraries:b", "adapter:calm", "process:calm"}
    assert not revise_holding(held, wanted, {"b": (base, libraries)}, [NodeRoom("n", 99)])["n"]  # no longer fits


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

    again = Controller(store, deployment, now=clock)  # killed, and started again: nodes are remembered
    assert set(again.report("b", report(0, 0, is_first=True, run="next")).functions or ()) == {"team/one"}
    assert set(again.report("a", report(10, 20, states=[busy])).functions or ()) == {"two"}
    clock.now += LOST_AFTER_S
    moved = again.report("b", report(0, 10, run="next"))
    assert set(moved.functions or ()) == {"team/one", "two"}
    again.remove("two")
    assert [row.name for row in again.overview().functions] == ["team/one"]


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


def test_a_report_that_does_not_add_up_is_not_recorded(store: Store) -> None:
    store.record("n", report(0, 0, is_first=True), {})
    wrong = msgspec.structs.replace(report(0, 10), device_ns=11)
    for one, message in ((wrong, "device_ns = 11"), (report(-5, 5), "the ledger ends at 0")):
        with pytest.raises(ConfigError, match=message):
            store.record("n", one, {})
    assert store.record("n", report(5, 15), {}) == 15  # a gap is the platform's


def test_a_bill_has_every_cost_once(store: Store, deployment: Deployment, tmp_path: Path) -> None:
    store.configure(deployment.functions, deployment.prices)
    store.record("n", report(0, 0, is_first=True), {})
    store.record("n", report(10**9, 3 * 10**9), {})
    path = tmp_path / "ledger.db"
    bill = make_bill(*read_ledger(path, 0, 2**62), read_prices(path), by_tenant=True)
    assert bill.adds_up
    assert bill.lost_ns == 10**9
    assert [(line.name, line.usage.cpu_ns) for line in bill.lines] == [("=team", 2 * 10**9), ("(platform)", 10**9)]
    assert bill.lines[0].cost == pytest.approx(2 * 0.5 + 2 * 7e-6 * 48)
    file = io.StringIO()
    write_csv(bill, "tenant", file)
    assert file.getvalue().splitlines()[1].startswith("'=team,0.0,2.0,2.0,")  # no formula for a spreadsheet
    assert not make_bill(*read_ledger(path, 60 * 10**9, 2**62), read_prices(path), by_tenant=True).lines


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


def test_an_open_address_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="without token and certificate"):
        bind_guarded("0.0.0.0", 0, is_guarded=False)
    bind_guarded("127.0.0.1", 0, is_guarded=False).close()


def test_one_address_serves_several_backbones() -> None:
    def app(name: str) -> Starlette:
        async def answer(request: Request) -> JSONResponse:
            return JSONResponse({"by": name, "num_bytes": len(await request.body())})

        async def models(request: Request) -> JSONResponse:
            return JSONResponse({"data": [{"id": name}]})

        return Starlette(
            routes=[
                Route("/v1/models", models),
                Route("/v1/models/{name}", answer),
                Route("/v1/completions", answer, methods=["POST"]),
                Route("/status", answer),
            ]
        )

    dispatch = Dispatch({"a": app("a"), "b": app("b")}, {"one": "a", "two": "b"}.get, gate=Gate(), max_body_bytes=1000)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(dispatch), base_url="http://agent") as client:
            for model, backbone in (("one", "a"), ("two", "b"), ("none", "a")):
                answer = (await client.post("/v1/completions", json={"model": model, "prompt": "x"})).json()
                assert (answer["by"], answer["num_bytes"]) == (backbone, len(f'{{"model":"{model}","prompt":"x"}}'))
                assert (await client.get(f"/v1/models/{model}")).json()["by"] == backbone
            broken = (await client.post("/v1/completions", content=b'{"model": "two"' + b" " * 5000)).json()
            assert broken == {"by": "a", "num_bytes": 5015}
            assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["a", "b"]
            assert (await client.get("/status?backbone=b")).json()["by"] == "b"

    asyncio.run(ask())


def test_bodies_that_stall_before_the_choice_of_a_backbone_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BodyRoom.__init__, "__defaults__", (100_000,))
    statuses: list[int] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def note(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def main() -> None:
        dispatch = Dispatch({"a": answer, "b": answer}, {}.get, gate=Gate(), max_body_bytes=1_000_000)
        may_end = asyncio.Event()
        parts = iter([b" " * 80_000, b"{}"])

        async def stalled() -> Message:
            part = next(parts)
            if part == b"{}":
                await may_end.wait()
            return {"type": "http.request", "body": part, "more_body": part != b"{}"}

        async def whole() -> Message:
            return {"type": "http.request", "body": b" " * 80_000, "more_body": False}

        scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
        first = asyncio.create_task(dispatch(scope, stalled, note))
        await asyncio.sleep(0)
        await dispatch(scope, whole, note)
        may_end.set()
        await first
        await dispatch(scope, whole, note)

        async def unread() -> Message:
            raise AssertionError("the body of a request without a key is read")

        guarded = Dispatch({"a": answer, "b": answer}, {}.get, gate=Gate(["secret"]), max_body_bytes=1_000_000)
        await guarded(scope, unread, note)  # the application refuses it
        with pytest.raises(AssertionError):
            await guarded(scope | {"headers": [(b"authorization", b"Bearer secret")]}, unread, note)

    asyncio.run(main())
    assert statuses == [429, 200, 200, 200]
