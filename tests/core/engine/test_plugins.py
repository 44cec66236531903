"""Policies of one's own: found by name in a module or a file, seen to be whole, and served by them."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import policy_context

from manylora.core.config import AdapterConfig, SchedulerConfig
from manylora.core.errors import ConfigError
from manylora.core.memory import ReloadCosts, make_eviction_policy
from manylora.core.plugins import source_of, with_files_found
from manylora.core.scheduling import make_policy, make_predictor
from manylora.core.scheduling.policies.fifo import FifoPolicy
from manylora.lab.experiments import cases
from manylora.lab.experiments.cases import cases_of
from manylora.lab.experiments.read import read_experiment
from manylora.lab.experiments.running import Runner
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.scenario import read_scenario
from manylora.lab.sim.setup import Setup, make_config

EXAMPLES = Path(__file__).parents[3] / "examples"

NEWEST = """
from manylora.core.scheduling import KeyedPolicy

def newest(context):
    return KeyedPolicy(lambda sequence, now: -sequence.arrived_at)

class Half:
    def __init__(self, context): ...
    def add(self, sequence, now): ...

def broken(context):
    return 1 / 0

def always_two(config, seed):
    from manylora.core.scheduling import LengthEstimate
    class Two:
        def predict(self, sequence): return LengthEstimate(2, 2)
        def observe(self, sequence): ...
    return Two()

class First:
    def __init__(self, context): ...
    def choose(self, request, replicas, among): return 0
"""

SCENARIO = {
    "workload": {
        "num_requests": 30,
        "arrivals": {"kind": "poisson", "rate": 20.0},
        "lengths": {
            "kind": "parametric",
            "prompt": {"kind": "fixed", "tokens": 64},
            "output": {"kind": "fixed", "tokens": 8},
        },
        "adapters": {"count": 4},
        "popularity": {"kind": "uniform"},
    },
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ideas.py"
    path.write_text(NEWEST)
    return path


def test_a_policy_is_found_in_a_file_and_in_a_module(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(make_policy(f"{file}:newest", policy_context())) == 0
    assert isinstance(make_policy("manylora.core.scheduling.policies.fifo:FifoPolicy", policy_context()), FifoPolicy)
    monkeypatch.syspath_prepend(file.parent)
    assert len(make_policy("ideas:newest", policy_context())) == 0


def test_a_file_is_one_module_however_often_it_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    ones = [make_policy(name, policy_context()) for name in ("ideas.py:newest", f"{file}:newest")]
    assert ones[0]._key.__globals__ is ones[1]._key.__globals__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lifo", "expected one of adapter-aware, .* or your own as module:Name or file.py:Name"),
        ("{file}:oldest", "ideas.py has no such class or function, but newest, Half, broken, always_two, First"),
        ("{file}:Half", "which lacks __len__, remove, squash.* of manylora.core.scheduling.policy.Policy"),
        ("{file}:broken", r"making it failed: ZeroDivisionError: division by zero \(.*ideas.py:12\)"),
        ("{file}x.py:newest", "there is no file .*ideas.pyx.py"),
        (
            "no_such_module_anywhere:Policy",
            "there is no module 'no_such_module_anywhere': install it, or name its file",
        ),
        ("json.nothing:Policy", "there is no module 'json.nothing'"),
        ("{file}:", "expected one of"),
    ],
)
def test_what_is_wrong_is_said(file: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(name.format(file=file), policy_context())


@pytest.mark.parametrize("code", ["def newest(:", "import no_such_module_anywhere", "raise RuntimeError('no')"])
def test_a_file_that_cannot_be_imported_is_refused_each_time(tmp_path: Path, code: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(code)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"importing it failed: \w+Error: .*broken.py(, line |:)1"):
            make_policy(f"{path}:newest", policy_context())


def test_evictions_predictors_and_routers_are_found_alike(file: Path) -> None:
    make_eviction_policy(f"{EXAMPLES / 'own_policy.py'}:LeastUsed", ReloadCosts())
    make_predictor(SchedulerConfig(predictor=f"{file}:always_two"), 0)
    with pytest.raises(ConfigError, match="which lacks keeps_idle_adapters, used, forget"):
        make_eviction_policy(f"{file}:Half", ReloadCosts())
    scenario = read_scenario({**SCENARIO, "setup": {"num_replicas": 2, "router": f"{file}:First"}})
    run = simulate(scenario.make_workload(), scenario.make_config())
    assert [stats.num_generated_tokens > 0 for stats in run.stats] == [True, False]


@pytest.mark.parametrize("place", ["offer", "place"])
def test_an_error_of_a_plugin_names_it_and_the_line(tmp_path: Path, place: str) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(
        "from manylora.core.memory import KeyedEviction\n"
        "from manylora.core.scheduling import FifoPolicy\n"
        "class Faulty(FifoPolicy):\n"
        "    def offer(self):\n"
        "        return [][1]\n"
        "def evict(costs):\n"
        "    return KeyedEviction(lambda item: item.worth)\n"
    )
    setup = (
        {"scheduler": {"policy": f"{file}:Faulty"}} if place == "offer" else {"adapters": {"eviction": f"{file}:evict"}}
    )
    scenario = read_scenario({**SCENARIO, "setup": setup})
    with pytest.raises((IndexError, AttributeError)) as error:
        simulate(scenario.make_workload(), scenario.make_config())
    name, line = ("policy = ", 5) if place == "offer" else ("eviction = ", 7)
    (note,) = error.value.__notes__
    assert note.startswith(f"raised in the plug-in {name}") and note.endswith(f"faulty.py:{line}")


def test_names_in_a_scenario_lead_to_files_beside_it(file: Path) -> None:
    table = {**SCENARIO, "setup": {"scheduler": {"policy": "ideas.py:newest"}}}
    scenario = read_scenario(table, folders=(file.parent,))
    assert scenario.setup.scheduler.policy == f"{file}:newest"
    kept = {"policy": "elsewhere.py:newest", "values": ["ideas.py:newest", 3]}
    assert with_files_found(kept, [file.parent]) == {**kept, "values": [f"{file}:newest", 3]}


def test_the_examples_order_and_evict() -> None:
    own = EXAMPLES / "own_policy.py"
    workload = read_scenario(SCENARIO).make_workload()
    setup = Setup(
        num_pages=90,
        scheduler=SchedulerConfig(policy=f"{own}:least_work", max_num_seqs=2),
        adapters=AdapterConfig(eviction=f"{own}:LeastUsed", look_ahead=0),
    )
    run = simulate(workload, make_config(setup))
    assert all(record.error is None for record in run.records)
    assert run.stats[0].num_evictions > 0


def test_an_experiment_of_ones_own_takes_over_from_a_suite_of_ours() -> None:
    experiment = read_experiment(str(EXAMPLES / "own-policy.toml"))
    chameleon = read_experiment("chameleon/fig11")
    assert experiment.name == "own-policy"
    assert experiment.workload == chameleon.workload
    assert experiment.setups["chameleon-small-pool"]["num_pages"] == 875
    assert experiment.setups["least-work"]["scheduler"]["policy"].endswith("own_policy.py:least_work")  # type: ignore


def test_results_are_made_again_when_a_policy_was_changed(tmp_path: Path, file: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        """
        title = "Mine"
        num_seeds = 1
        [setups.mine]
        scheduler = { policy = "ideas.py:newest" }
        [setups.ours]
        [workload]
        num_requests = 5
        arrivals = { kind = "poisson", rate = 5.0 }
        lengths.kind = "parametric"
        lengths.prompt = { kind = "fixed", tokens = 8 }
        lengths.output = { kind = "fixed", tokens = 2 }
        adapters = { count = 2 }
        popularity = { kind = "uniform" }
        """
    )

    def keys() -> dict[str, str]:
        experiment = read_experiment(str(tmp_path / "mine.toml"))
        made = cases_of(experiment, seeds=1, traces=None)
        assert len(Runner(None).run(made.values())) == 2
        return {setup: case.key for (setup, _, _), case in made.items()}

    before = keys()
    file.write_text(NEWEST + "\n# changed\n")
    cases._digest.cache_clear()
    after = keys()
    assert after["ours"] == before["ours"]
    assert after["mine"] != before["mine"]


def test_a_suite_that_does_not_exist_is_said(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('suite = "chamelon"')
    with pytest.raises(ConfigError, match="Got suite = 'chamelon', did you mean 'chameleon'"):
        read_experiment(str(tmp_path / "mine.toml"))
    with pytest.raises(ConfigError, match=r"gone\.toml: cannot be read"):
        read_experiment(str(tmp_path / "gone.toml"))


def test_where_the_code_of_a_name_is() -> None:
    assert source_of("fifo") is None
    assert source_of("x.py:Policy") == Path("x.py")
    found = source_of("manylora.core.scheduling.policies.fifo:FifoPolicy")
    assert found is not None and found.name == "fifo.py"
    assert source_of("no_such_module_anywhere:Policy") is None
