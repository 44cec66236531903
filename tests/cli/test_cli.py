"""The commands: what they make of a command line, and what a person sees when something is wrong."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from bad_adapters import tiny_base, write_good_adapter
from cli_runs import Served, app, run_main, served
from rich.console import Console
from typer.testing import CliRunner

import manylora
import manylora.cli
import manylora.serving.server
from manylora.cli.app import main
from manylora.cli.commands.demo import Answer, print_answers
from manylora.core.config import AdapterConfig, EngineConfig, ServerConfig
from manylora.core.errors import ConfigError
from manylora.core.server_config import FleetConfig
from manylora.core.types import SamplingParams
from manylora.demo import TASKS, demo_adapters, demo_model_path
from manylora.route.config import ProxyConfig
from manylora.serving.hosting.engine.startup import TORCH_BUILDER
from manylora.serving.offline import Generation

__all__ = ["served"]  # a fixture


def test_serve_options_become_configuration(served: list[Served], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    line = [
        *("serve", str(tmp_path / "model"), "--served-model-name", "base", "--lora-modules", "a=/x", "b=/y"),
        *("--port", "0", "--host", "0.0.0.0", "--api-key", "k1", "--api-key", "k2", "--admin-key", "root"),
        *("--memory", "2GiB", "--block-size", "32", "--no-prefix-caching", "--max-num-seqs", "7", "--max-loras", "3"),
        *("--max-cpu-loras", "9", "--host-memory", "1GiB", "--seed", "5", "--dtype", "float32", "--lora-kernel"),
        *("reference", "--max-model-len", "512", "--drain-timeout", "1.5", "--in-process", "--max-waiting", "11"),
        *("--step-log", str(tmp_path / "steps"), "--max-num-batched-tokens", "64", "--simulate", "a40:llama-7b"),
        *("--lora-dir", str(tmp_path)),
    ]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    (call,) = served
    assert call.adapters == {"a": "/x", "b": "/y"}
    engine, server = call.engine, call.server
    assert (engine.simulate, engine.step_log) == ("a40:llama-7b", str(tmp_path / "steps"))
    assert (engine.model.model, engine.model.served_model_name) == (str(tmp_path / "model"), "base")
    assert (engine.model.dtype, engine.model.lora_kernel, engine.model.max_model_len) == ("float32", "reference", 512)
    assert (engine.memory.memory_bytes, engine.memory.block_size) == (2 * 2**30, 32)
    assert not engine.memory.prefix_caching
    scheduler = engine.scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (7, 64)
    assert (scheduler.max_loras, scheduler.max_waiting) == (3, 11)
    assert (engine.adapters.max_cpu_loras, engine.adapters.host_bytes, engine.seed) == (9, 2**30, 5)
    assert (server.host, server.port, server.api_keys, server.admin_key) == ("0.0.0.0", 0, ("k1", "k2"), "root")
    assert (server.drain_timeout_s, server.in_process, server.lora_dirs) == (1.5, True, (str(tmp_path),))


def test_adapters_from_registries_are_urls_below_an_option(served: list[Served], tmp_path: Path) -> None:
    line = [
        "serve",
        str(tmp_path),
        "--lora-modules",
        "a=https://Host.org/x/a/",
        "--lora-registry",
        "https://host.org/x",
    ]
    assert CliRunner().invoke(app, line).exit_code == 0
    (call,) = served
    assert call.adapters == {"a": "https://host.org/x/a"}
    assert call.engine.adapters == AdapterConfig(registries=("https://host.org/x",))
    for command in (["serve"], ["generate", "--adapter", "a"]):
        refused = CliRunner().invoke(app, [command[0], str(tmp_path), *command[1:], *line[2:4]], input="hello")
        assert "--lora-registry" in str(refused.exception)
    for wrong, message in (("--lora-registry=x", "Got the URL 'x'"), ("--lora-on-demand", "without --lora-registry")):
        assert message in str(CliRunner().invoke(app, ["serve", str(tmp_path), wrong]).exception)


def test_serve_defaults_are_the_configuration_s(served: list[Served], tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["serve", str(tmp_path)], env={"XDG_CACHE_HOME": str(tmp_path)}).exit_code == 0
    defaults = EngineConfig(
        model=served[0].engine.model,
        cache_dir=str(tmp_path / "manylora"),
    )
    assert served[0].engine == defaults
    assert CliRunner().invoke(app, ["serve", str(tmp_path), "--cache-dir", "off"]).exit_code == 0
    assert served[1].engine.cache_dir is None
    assert served[0].server == ServerConfig()
    assert served[0].adapters == {}


def test_replicas_are_options_of_serve(served: list[Served]) -> None:
    line = "serve demo --replicas 3 --devices cpu,cuda:1 --router least-loaded --max-resumes 0"
    assert CliRunner().invoke(app, line.split()).exit_code == 0
    (call,) = served
    fleet = FleetConfig(replicas=3, devices="cpu,cuda:1", router="least-loaded", max_resumes=0)
    assert call.server == ServerConfig(fleet=fleet)
    refused = CliRunner().invoke(app, [*line.split(), "--router-option", "a=1"])
    assert "router option 'a'" in str(refused.exception)


def test_serve_demo_brings_its_adapters(served: list[Served]) -> None:
    assert CliRunner().invoke(app, ["serve", "demo"]).exit_code == 0
    assert served[0].engine.model.model == str(demo_model_path())
    assert served[0].engine.model.served_model_name == "demo"
    assert set(served[0].adapters) == set(TASKS)


def test_adapters_asked_for_by_name_are_required_and_those_found_in_a_folder_are_not(
    served: list[Served], tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    line = ["serve", str(tmp_path), "--lora-dir", str(tmp_path), "--lora-modules", f"two={tmp_path / 'two'}", "x=/y"]
    assert CliRunner().invoke(app, line).exit_code == 0
    assert set(served[0].adapters) == {"one", "two", "x"}
    assert served[0].required == {"two", "x"}


def test_an_engine_process_is_started_before_the_options_are_read_where_it_will_be_needed(
    monkeypatch: pytest.MonkeyPatch, served: list[Served]
) -> None:
    started: list[str] = []
    monkeypatch.setattr("manylora.cli.app.prestart_engine", started.append)
    assert run_main(monkeypatch, "serve", "demo", "--port", "0") == 0
    assert started == [TORCH_BUILDER]
    for other in ("--replicas=2", "--simulate=a40:llama-7b", "--in-process"):
        run_main(monkeypatch, "serve", "demo", other)
    run_main(monkeypatch, "serve", "--help")
    run_main(monkeypatch, "version")
    assert len(started) == 1


def test_a_chat_template_is_a_file_or_itself_and_models_have_a_folder(
    served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "before")
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    line = ["serve", "demo", "--download-dir", str(tmp_path), "--served-model-name", "a", "b"]
    for template in (str(tmp_path / "t.jinja"), "{{ messages }}"):
        assert CliRunner().invoke(app, [*line, "--chat-template", template]).exit_code == 0
    assert {call.server.web.chat_template for call in served} == {"{{ messages }}"}
    assert (served[0].engine.model.served_model_name, served[0].server.web.aliases) == ("a", ("b",))
    assert os.environ["HF_HUB_CACHE"] == str(tmp_path)
    refused = CliRunner().invoke(app, [*line, "--chat-template", "nowhere"])
    assert "cannot be read" in str(refused.exception)


def test_a_vllm_command_line_starts(served: list[Served], tmp_path: Path) -> None:
    line = ["serve", str(tmp_path), "--enable-lora", "--max-lora-rank", "64", "--lora-modules", "a=/x", "b=/y"]
    result = CliRunner().invoke(app, [*line, "--tensor-parallel-size", "1", "--gpu-memory-utilization", "0.5"])
    assert result.exit_code == 0, result.output
    assert served[0].adapters == {"a": "/x", "b": "/y"}
    assert "--max-lora-rank is not needed" in result.stderr


def test_file_environment_and_line_in_this_order(served: list[Served], tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        f'model = "{tmp_path}"\nport = 1\nmax-num-seqs = 3\nadmin-key = "file"\nno-prefix-caching = true\n'
        '[lora-modules]\nsql = "/a"\n'
    )
    line = ["serve", "--config", str(file), "--port", "2"]
    result = CliRunner().invoke(app, line, env={"MANYLORA_ADMIN_KEY": "env", "MANYLORA_API_KEY": "one two"})
    assert result.exit_code == 0, result.output
    (call,) = served
    assert call.engine.model.model == str(tmp_path)
    assert (call.server.port, call.engine.scheduler.max_num_seqs) == (2, 3)
    assert (call.server.admin_key, call.server.api_keys) == ("env", ("one", "two"))
    assert not call.engine.memory.prefix_caching
    assert call.adapters == {"sql": "/a"}


def test_a_router_reads_its_options_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file of the documentation, a flag that overrides it, and the file read again."""
    page = (Path(__file__).parents[2] / "docs" / "route.md").read_text()
    text = page.split("```toml\n")[1].split("```")[0]
    (tmp_path / "route.toml").write_text(text)
    routed: list[ProxyConfig] = []

    def note(config: ProxyConfig, *, environment: Mapping[str, str], file: str, read: Callable[[], ProxyConfig]) -> int:
        routed.append(config)
        Path(file).write_text('backend = ["http://b:1"]\nname = ["x=y:1"]\nport = 5\nretries = 9\n')
        routed.append(read())
        for wrong in ('retries = "many"', "retrys = 3", 'backend = ["http://b:1"]\nretries = -1', "= 3"):
            Path(file).write_text(f"{wrong}\n")
            with pytest.raises(ConfigError, match=r"retr|TOML"):
                read()
        return 0

    monkeypatch.setattr("manylora.route.serve.run", note)
    result = CliRunner().invoke(app, ["route", "--config", str(tmp_path / "route.toml"), "--port", "9001"])
    assert result.exit_code == 0, result.output
    config, again = routed
    assert (again.backends, again.names, again.port, again.retries) == (("http://b:1",), ("x=y:1",), 9001, 9)
    assert (config.backends, config.host, config.port) == (("dns:vllm.default.svc:8000",), "0.0.0.0", 9001)
    assert (config.router, config.max_in_flight, config.manage_adapters, config.max_placed) == (
        "auto",
        200,
        True,
        64,
    )
    (tmp_path / "route.toml").write_text('backend = ["http://a:1"]\nmax-plced = 3\n')
    result = CliRunner().invoke(app, ["route", "--config", str(tmp_path / "route.toml")])
    assert result.exit_code != 0
    assert "max-plced" in str(result.exception)


def test_the_command_of_the_ray_deployment_is_understood(
    served: list[Served], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    documents = list(yaml.safe_load_all((Path(__file__).parents[2] / "deploy" / "ray.yaml").read_text()))
    assert [one["kind"] for one in documents] == ["RayCluster", "Deployment", "Service"]
    (container,) = documents[1]["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    words = shlex.split(script.split("exec manylora")[1])
    (tmp_path / "llama").mkdir()
    (tmp_path / "adapters").mkdir()
    line = [word.replace("/models", str(tmp_path)) for word in words]
    result = CliRunner().invoke(app, [*line, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    (call,) = served
    fleet = call.server.fleet
    assert (fleet.ray, fleet.min_replicas, fleet.max_replicas) == ("auto", 1, 8)
    port = container["ports"][0]
    assert (documents[2]["spec"]["ports"][0]["targetPort"], port["containerPort"]) == (port["name"], call.server.port)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["serve", "/nonexistent/model"], "no such folder"),
        (["serve", "demo", "--max-num-seqs", "0"], "max_num_seqs = 0"),
        (["serve", "demo", "--memory", "lots"], "'lots'"),
        (["serve", "demo", "--lora-modules", "sql"], "expected name=path"),
        (["serve", "demo", "--lora-dir", "/nonexistent"], "expected a folder"),
        (["serve", "demo", "--lora-dir", str(demo_adapters()["upper"])], "which is an adapter: expected the folder"),
        (["serve", "demo", "--policy", "lifo"], "policy = 'lifo', expected one of"),
        (["serve", "demo", "--eviction", "mru"], "eviction = 'mru', expected one of"),
        (["serve", "demo", "--predictor", "psychic"], "predictor = 'psychic', expected one of"),
        (["serve", "demo", "--step-log", "/nonexistent/log"], "'/nonexistent/log', which cannot be written"),
        (["serve", "demo", "-pp", "2"], "divides one model among devices"),
        (["serve", "demo", "--config", "/nonexistent.toml"], "cannot be read"),
        (["serve", "demo", "--log-level", "loud"], "loud"),
        (["serve"], "MODEL"),
        (["serve", "demo", "--no-such-option"], "--no-such-option"),
        (["serve", "demo", "--port", "many"], "--port"),
        (["serve", "demo", "--uds", "/nonexistent/socket"], "no such folder for the socket"),
        (["serve", "demo", "--lora-modules", f"x={Path(__file__).parent}"], "there is no adapter_config.json"),
        (["bench", "serve", "--popularity", "flat"], "popularity = 'flat', expected one of"),
        (["bench", "offline", "demo", "--device", "tpu"], "device = 'tpu', expected auto, cpu or cuda"),
        (["serv", "demo"], "Did you mean 'serve'?"),
        (["check"], "ADAPTER"),
        (["generate", "demo", "hi", "--adapter", "nobody"], "'nobody'"),
        (["generate", "demo", "hi", "--temperature", "-1"], "temperature"),
    ],
)
def test_what_is_asked_wrongly_is_one_message_and_code_2(
    line: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    served: list[Served],
) -> None:
    assert run_main(monkeypatch, *line) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert not said.out
    assert not served


def test_a_home_directory_is_understood(served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an option's value (``--lora-dir=~/a``) and in a file, no shell has done it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "adapters").mkdir()
    line = ["serve", str(tmp_path), "--lora-dir=~/adapters", "--lora-modules=x=~/x", "--trust-remote-code"]
    assert CliRunner().invoke(app, line).exit_code == 0
    (call,) = served
    assert call.server.lora_dirs == (str(tmp_path / "adapters"),)
    assert call.adapters == {"x": str(tmp_path / "x")}
    assert call.engine.model.trust_remote_code


@pytest.mark.parametrize("module", ["manylora.cli.app", "manylora.cli.commands.route"])
def test_ctrl_c_while_modules_are_read_is_no_traceback(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *rest: object) -> None:
            if name == module:
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["manylora", "route"])
    with pytest.raises(SystemExit) as left:
        manylora.cli.main()
    assert left.value.code == 130


def test_a_full_disk_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(*args: object, **kwargs: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(vars(manylora.serving.server), "run", run)
    assert run_main(monkeypatch, "serve", str(tmp_path)) == 1
    assert capsys.readouterr().err.endswith("error: the output is incomplete: No space left on device\n")


def test_a_path_that_cannot_be_used_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        vars(manylora.serving.server), "run", lambda *args, **kwargs: (tmp_path / "x" / "y").read_text()
    )
    assert run_main(monkeypatch, "serve", str(tmp_path)) == 2
    assert capsys.readouterr().err.endswith(f"\nerror: {tmp_path / 'x' / 'y'}: No such file or directory\n")


def test_a_bug_is_one_line_and_code_1_unless_debugging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(*args: object, **kwargs: object) -> int:
        raise RuntimeError("the disk is on fire")

    monkeypatch.setitem(vars(manylora.serving.server), "run", run)
    monkeypatch.setenv("MANYLORA_DEBUG", "")
    assert run_main(monkeypatch, "serve", str(tmp_path)) == 1
    assert "RuntimeError: the disk is on fire" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["manylora", "--debug", "serve", str(tmp_path)])
    with pytest.raises(RuntimeError, match="fire"):
        main()


class FakeEngine:
    """The offline engine, with answers that say who was asked what."""

    made: dict[str, Any]
    sampling: SamplingParams

    def __init__(self, model: str, **options: Any) -> None:
        FakeEngine.made = {"model": model, **options}

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def generate(self, prompts: list[Any], *, adapter: list[str | None], sampling: SamplingParams) -> list[Generation]:
        FakeEngine.sampling = sampling
        return [
            Generation(
                prompt=prompt,
                text=f"{name} on {prompt}",
                token_ids=(1, 2),
                finish_reason="stop",
                adapter=name,
                error="too long" if prompt == "fail" else None,
            )
            for prompt, name in zip(prompts, adapter, strict=True)
        ]

    def chat(self, turns: list[Any], **options: Any) -> list[Generation]:
        return self.generate([json.dumps(turn) for turn in turns], **options)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    monkeypatch.setitem(vars(manylora), "Engine", FakeEngine)
    return FakeEngine


def test_generate_prints_the_answer_alone(engine: type[FakeEngine], tmp_path: Path) -> None:
    line = ["generate", str(tmp_path), "hello", "--memory", "1GiB", "--max-tokens", "5", "--stop", "x"]
    result = CliRunner().invoke(app, line)
    assert (result.exit_code, result.stdout) == (0, "None on hello\n")
    assert engine.made["memory_bytes"] == 2**30
    assert engine.sampling == SamplingParams(max_tokens=5, temperature=0.0, stop=("x",))


def test_generate_asks_every_adapter_every_prompt(engine: type[FakeEngine], tmp_path: Path) -> None:
    line = ["generate", str(tmp_path), "--lora-modules", "a=/x", "--lora-modules", "b=/y", "--adapter", "all", "--json"]
    result = CliRunner().invoke(app, line, input="one\n\ntwo\n")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    asked = [(answer["model"], answer["prompt"]) for answer in answers]
    assert asked == [("base", "one"), ("a", "one"), ("b", "one"), ("base", "two"), ("a", "two"), ("b", "two")]
    assert engine.made["adapters"] == {"a": "/x", "b": "/y"}
    line[3], line[8:] = "a=https://host.org/a", ["--lora-registry", "https://host.org"]
    assert CliRunner().invoke(app, line, input="one").exit_code == 0
    assert engine.made["registries"] == ("https://host.org",)


def test_generate_chats(engine: type[FakeEngine], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["generate", str(tmp_path), "hello", "--system", "be brief"])
    assert '{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}' in result.stdout


def test_generate_fails_if_an_answer_does(
    engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "generate", str(tmp_path), "fine", "fail") == 1
    said = capsys.readouterr()
    assert "1 of 2 answers failed: too long" in said.err
    assert "None on fine" in said.out


def test_generate_without_a_prompt(engine: type[FakeEngine], tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["generate", str(tmp_path)], input=" \n").exit_code == 2


def test_check_says_what_is_in_a_folder_and_whether_it_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base = tiny_base()
    monkeypatch.setattr("manylora.cli.commands.check.describe_base", lambda model: base)
    good = write_good_adapter(tmp_path / "good", base, rank=4, targets=("q_proj", "v_proj"))
    result = CliRunner().invoke(app, ["check", str(good)])
    assert result.exit_code == 0, result.output
    shown = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.split()}
    assert shown["rank"] == ["4"]
    assert shown["q_proj"][:2] == [str(base.num_layers), "4"]
    assert "fits" not in shown

    result = CliRunner().invoke(app, ["check", str(good), "--base", "tiny", "--json"])
    report = json.loads(result.stdout)["report"]
    assert (result.exit_code, report["fits"], report["rank"]) == (0, True, 4)
    assert report["version"]["num_modules"] == len(report["modules"]) == 2 * base.num_layers

    result = CliRunner().invoke(app, ["check", str(good), "--base", "tiny"])
    assert ("not the name of this model" in result.stdout) == (base.name != "tiny-llama")

    other = tiny_base(hidden=64, fingerprint="other")
    monkeypatch.setattr("manylora.cli.commands.check.describe_base", lambda model: other)
    result = CliRunner().invoke(app, ["check", str(good), "--base", "other"])
    assert result.exit_code == 1
    assert "no: " in result.stdout


def test_check_refuses_what_is_no_adapter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_main(monkeypatch, "check", str(tmp_path)) == 2
    assert "adapter_model.safetensors" in capsys.readouterr().err


def test_the_demo_s_table_marks_right_and_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr("manylora.cli.commands.demo.out", Console(file=written, width=120))
    prompt = "tiny llama"
    good, bad = list(TASKS)[:2]
    answers = [
        Answer("demo", prompt, "tiny llama?", 4),
        Answer(good, prompt, TASKS[good].apply(prompt), 4),
        Answer(bad, prompt, "nonsense", 4),
    ]
    assert print_answers(answers, base="demo", prompts=[prompt]) == 1
    lines = written.getvalue()
    assert f"✓ {TASKS[good].apply(prompt)}" in lines
    assert f"✗ nonsense (not {TASKS[bad].apply(prompt)})" in lines
    assert "  tiny llama?" in lines


def test_help_explains_every_option() -> None:
    group = typer.main.get_command(app)
    paths = [(), ("serve",), ("generate",), ("check",), ("demo",), ("version",)]
    for path in paths:
        command: Any = group
        for name in path:
            command = command.commands[name]
        assert command.help, path
        plain = {"device", "port", "log_level"}
        silent = [
            p.name for p in command.params if not p.help and p.name not in plain and not getattr(p, "hidden", False)
        ]
        assert not silent, f"{path} does not explain {silent}"
        result = CliRunner().invoke(app, [*path, "--help"])
        assert result.exit_code == 0


def test_help_shows_the_model_of_a_server_first_and_tenants_after_http() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"]).stdout
    assert text.index("─ Model ─") < text.index("─ HTTP ─") < text.index("─ Tenants ─")


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.stdout.strip() == metadata.version("manylora")
    assert CliRunner().invoke(app, ["version"]).stdout.startswith(f"manylora {metadata.version('manylora')}\npython 3.")
