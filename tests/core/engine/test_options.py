"""Options, each stated once: a field gives the command line, files and messages; and options of one's own policies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_runs import Served, app, run_main, served
from harness import policy_context
from test_plugins import SCENARIO

from manylora.cli.options.fields import PLUGINS, Flag, flags_of
from manylora.core.config import (
    AdapterConfig,
    EngineConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from manylora.core.errors import ConfigError
from manylora.core.memory import ReloadCosts, make_eviction_policy
from manylora.core.options import check_options, option, option_of
from manylora.core.plugins import options_for, options_of
from manylora.core.scheduling import POLICIES, make_policy, make_predictor
from manylora.core.scheduling.policies.fifo import FifoPolicy
from manylora.core.server_config import FleetConfig, PublishConfig, TlsConfig, TraceConfig, WebConfig
from manylora.lab.sim.scenario import read_scenario

__all__ = ["served"]  # a fixture

OWN = Path(__file__).parents[3] / "examples" / "own_policy.py"

OF_COMMANDS = {
    "backbone": "model socket dtype base_dtype log_level",
    **dict.fromkeys(("adapters", "experiment", "predictor", "bench"), ""),
    "": "_debug _version",
    "functions": "",
    "functions serve": "config node log_level",
    "functions controller": "config host port log_level",
    "functions agent": "controller node log_level",
    "functions ps": "all_functions as_json",
    "functions logs": "name",
    "functions bill": "by since until as_csv prices",
    "serve": "download_dir model config lora_modules log_level builder",
    "generate": "model prompts adapter lora_modules lora_dir chat system as_json",
    "calibrate": "logs output model seconds num_adapters ranks step_log seed",
    "top": "url key interval once",
    "simulate": "file traces output sets",
    "compare": "file traces sets policies",
    "plan": "file traces sets compare json_file",
    "experiment list": "",
    "experiment run": "names traces seeds processes quick output fresh",
    "experiment report": "names traces seeds processes output",
    "predictor train": "log out_file",
    "bench serve": "",
    "bench offline": "model lora_modules lora_dir num_prompts random_input_len random_output_len rounds save_to",
    "route": "config log_level",
    "demo": "once host port",
    "version": "",
    "check": "adapter base against name prompt max_tokens tolerance api_key as_json",
    "check-vllm": "url",
    "tenant": "",
    "tenant key": "",
    "usage": "ledger by since as_csv",
}
"""Options of commands that are no fields of the configuration: inputs, outputs and the workload of a measurement."""


def commands() -> Iterator[tuple[str, list[str], tuple[Flag, ...]]]:
    """Yield every command's name, the names of its options, and those of them that come from fields."""

    def visit(group: typer.Typer, command: Any, path: str) -> Iterator[tuple[str, list[str], tuple[Flag, ...]]]:
        yield path, [param.name for param in command.params], ()
        for one in group.registered_commands:
            assert one.callback is not None
            name = one.name or one.callback.__name__
            inner = command.commands[name]
            yield f"{path} {name}".strip(), [p.name for p in inner.params], getattr(one.callback, "flags", ())
        for below in group.registered_groups:
            assert below.typer_instance is not None
            yield from visit(below.typer_instance, command.commands[below.name], f"{path} {below.name}".strip())

    yield from visit(app, typer.main.get_command(app), "")


def test_every_option_of_every_command_is_a_field_or_the_command_s_own() -> None:
    for path, found, flags in commands():
        from_fields = {flag.name for flag in flags}
        own = set(found) - from_fields
        assert own == set(OF_COMMANDS[path].split()), path
        assert from_fields <= set(found)


def test_every_field_in_a_panel_is_an_option_of_serve() -> None:
    asked = {flag.field.name for path, _, flags in commands() if path == "serve" for flag in flags}
    owners = [ModelConfig, MemoryConfig, SchedulerConfig, AdapterConfig, EngineConfig, FleetConfig, ServerConfig]
    owners += [WebConfig, TlsConfig, TraceConfig, PublishConfig]
    owners += [owner for kind in ("policy", "predictor", "eviction") for owner in options_of(PLUGINS[kind]).values()]
    assert asked == {flag.field.name for flag in flags_of(*owners)}


def test_a_field_gives_name_value_and_message() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Sizes:
        wait_s: float = option(1.0, panel="P", unit="s", above=0, help="How long.")
        pool_bytes: int | None = option(None, panel="P", unit="bytes", help="How much.")
        is_kept: bool = option(True, panel="P", help="Keep.", without="Drop.")
        names: tuple[str, ...] = option((), panel="P", flag="--name", help="Which.")
        share: float = option(0.5, above=0, at_most=1, help="Not on a command line.")
        kind: str = option("a", panel="P", choices=("a", "b"), help="Of what kind.")

        def __post_init__(self) -> None:
            check_options(self)

    # Local classes have no names that annotations could be resolved by.
    Sizes.__annotations__ = {
        "wait_s": float,
        "pool_bytes": int | None,
        "is_kept": bool,
        "names": tuple[str, ...],
        "share": float,
        "kind": str,
    }
    flags = {flag.field.name: flag for flag in flags_of(Sizes)}
    spelled = {name: (flag.spelled, flag.metavar, flag.help) for name, flag in flags.items()}
    assert spelled == {
        "wait_s": ("--wait", "SECONDS", "How long."),
        "pool_bytes": ("--pool-bytes", "SIZE", "How much."),
        "is_kept": ("--no-is-kept", None, "Drop."),
        "names": ("--name", None, "Which."),
        "kind": ("--kind", "a|b", "Of what kind."),
    }
    assert flags["pool_bytes"].read("2KiB") == 2048
    assert (flags["is_kept"].read(True), flags["names"].read(None)) == (False, ())
    for name, value, words in (
        ("wait_s", 0.0, "above 0 seconds"),
        ("wait_s", float("inf"), "above 0 seconds"),
        ("share", 1.5, r"a number in \(0, 1\]"),
        ("kind", "c", "one of a, b"),
    ):
        with pytest.raises(ConfigError, match=f"Got {name} = {value!r}, expected {words}"):
            Sizes(**{name: value})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["--policy", "sjf", "--ageing", "7"], {"ageing_tokens_per_s": 7.0}),
        (["--policy", "sjf", "--policy-option", "ageing-tokens-per-s=7"], {"ageing-tokens-per-s": "7"}),
        (["--slo", "3", "--queue-refresh", "9", "--queue-criterion", "wcss", "--request-size", "output"], None),
        (["--ageing", "7", "--policy-option", "ageing_tokens_per_s=8"], {"ageing_tokens_per_s": "8"}),
    ],
)
def test_flags_of_built_in_policies_become_their_options(
    line: list[str], expected: dict[str, object] | None, served: list[Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_main(monkeypatch, "serve", "demo", *line) == 0
    scheduler = served[0].engine.scheduler
    others = {"slo_s": 3.0, "refresh_s": 9.0, "queue_criterion": "wcss", "request_size": "output"}
    assert scheduler.policy_options == (expected or others)
    made = options_for("policy", scheduler.policy, POLICIES, scheduler.policy_options)
    if scheduler.policy == "sjf":
        assert made.ageing_tokens_per_s == 7.0


def test_a_file_takes_fields_by_their_names(
    served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'prefix_caching = false\nstep_target_s = 0.5\nhost-bytes = 4096\npolicy = "sjf"\n'
        "[policy-options]\nageing_tokens_per_s = 3\n[predictor_options]\naccuracy = 0.7\n"
    )
    assert run_main(monkeypatch, "serve", "demo", "--config", str(file)) == 0
    engine = served[0].engine
    assert not engine.memory.prefix_caching
    assert (engine.scheduler.step_target_s, engine.adapters.host_bytes) == (0.5, 4096)
    assert engine.scheduler.policy_options == {"ageing_tokens_per_s": "3"}
    assert engine.scheduler.predictor_options == {"accuracy": "0.7"}


def test_options_of_one_s_own_policy_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = {"policy": f"{OWN}:least_work", "policy_options": {"answer_weight": 2}}
    scenario = read_scenario({**SCENARIO, "setup": {"scheduler": scheduler}})
    assert options_for("policy", scheduler["policy"], POLICIES, scenario.setup.scheduler.policy_options) is not None
    line = ["simulate", "--requests", "20", "--rate", "5", "--warm-up", "0", "--policy", f"{OWN}:least_work"]
    assert run_main(monkeypatch, *line, "--policy-option", "answer_weight=0.5") == 0
    assert run_main(monkeypatch, *line, "--policy-option", "answer_weight=-1") == 2


@pytest.mark.parametrize(
    ("policy", "given", "message"),
    [
        (
            f"{OWN}:least_work",
            {"weight": 1},
            "policy option 'weight' for policy .*least_work', expected.*answer_weight",
        ),
        (f"{OWN}:least_work", {"answer_weight": "much"}, "policy option answer_weight = 'much': expected `float`"),
        (f"{OWN}:least_work", {"answer_weight": -1}, "answer_weight = -1.0, expected 0 or more"),
        ("fifo", {"weight": 1}, "policy option 'weight' for policy 'fifo', which has none"),
        ("sjf", {"ageing": 1}, "policy option 'ageing' for policy 'sjf', expected one of ageing_tokens_per_s"),
        ("sjf", {"ageing_tokens_per_s": 0}, "ageing_tokens_per_s = 0.0, expected above 0"),
        ("chameleon", {"request_size": "degree-3"}, "request_size = 'degree-3', expected one of degree-2, degree-1"),
    ],
)
def test_a_wrong_option_is_named_with_those_there_are(policy: str, given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(policy, policy_context(policy_options=given))


def test_an_option_without_a_value_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "serve", "demo", "--policy-option", "slo_s") == 2
    assert "Got --policy-option 'slo_s', expected KEY=VALUE" in capsys.readouterr().err


def test_options_of_another_policy_wait_for_it() -> None:
    policy = make_policy("fifo", policy_context(policy_options={"slo_s": 5.0, "ageing-tokens-per-s": 1}))
    assert isinstance(policy, FifoPolicy)


def test_predictors_and_evictions_get_theirs_as_an_argument(tmp_path: Path) -> None:
    file = tmp_path / "ideas.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from manylora.core.memory.eviction import KeyedEviction\n"
        "from manylora.core.options import option\n"
        "from manylora.core.plugins import takes\n"
        "from manylora.core.scheduling import LengthEstimate\n"
        "@dataclass(frozen=True)\n"
        "class Options:\n"
        "    tokens: int = option(2, help='Always.')\n"
        "@takes(Options)\n"
        "def always(config, seed, options):\n"
        "    class Always:\n"
        "        tokens = options.tokens\n"
        "        def predict(self, sequence): return LengthEstimate(self.tokens, self.tokens)\n"
        "        def observe(self, sequence): ...\n"
        "    return Always()\n"
        "@takes(Options)\n"
        "def oldest(costs, options):\n"
        "    assert options.tokens == 5\n"
        "    return KeyedEviction(lambda item: item.idle_since)\n"
    )
    config = SchedulerConfig(predictor=f"{file}:always", predictor_options={"tokens": "5"})
    assert make_predictor(config, 0).tokens == 5  # type: ignore[attr-defined]
    make_eviction_policy(f"{file}:oldest", ReloadCosts(), {"tokens": 5})
    with pytest.raises(ConfigError, match=r"eviction option 'token' for eviction .*, expected one of tokens"):
        make_eviction_policy(f"{file}:oldest", ReloadCosts(), {"token": 5})


def test_every_option_says_what_it_means() -> None:
    owners = [ModelConfig, MemoryConfig, SchedulerConfig, AdapterConfig, EngineConfig, FleetConfig, ServerConfig]
    owners += [WebConfig, TlsConfig, TraceConfig, PublishConfig]
    for owner in [*owners, *(one for ours in PLUGINS.values() for one in options_of(ours).values())]:
        for name, field in owner.__dataclass_fields__.items():
            known = option_of(field)
            if known is not None:
                assert known.help.endswith("."), f"{owner.__name__}.{name}"
