"""What people type: sizes, adapters, vLLM's flags, configuration files."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import typer
from options_page import SAME_NAMES, vllm_section

from manylora.cli import main
from manylora.cli.app import make_app
from manylora.cli.commands.bench import save
from manylora.cli.commands.functions import _nanoseconds
from manylora.cli.options.adapter_folders import adapters_below, collect_adapters
from manylora.cli.options.config_file import read_config_file
from manylora.cli.options.values import command_line, parse_adapter, parse_address, parse_size
from manylora.cli.options.vllm import exposure_warning, near_names, spread_lists, take_out, with_vllm_environment
from manylora.cli.options.vllm_flag_table import TRANSLATED, VLLM_FLAGS
from manylora.cli.views.terminal import out, progress_bar
from manylora.core.config import ServerConfig
from manylora.core.errors import ConfigError
from manylora.lab.measure.tables import FigureTable
from manylora.serving.http.listening import bind


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("2GiB", 2 * 2**30),
        ("512 MiB".replace(" ", ""), 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("4g", 4 * 2**30),
        (" 10k ", 10 * 1024),
        ("3b", 3),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("key", [["--api-key", "sk-1"], ["--api-key=sk-1"]])
def test_results_name_their_command_without_its_key(key: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/manylora", "bench", "serve", *key, "--extra-body", '{"a": 1}'])
    line = command_line()
    assert "sk-1" not in line
    assert shlex.split(line)[:3] == ["manylora", "bench", "serve"] and shlex.split(line)[-1] == '{"a": 1}'


def test_a_command_runs_where_its_streams_are_closed() -> None:
    command = f"exec {shlex.quote(sys.executable)} -m manylora version <&- >&-"
    result = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_character_that_the_output_lacks_is_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr("manylora.cli.app.main", lambda: print("a long cell\u2026", flush=True))
    main()
    assert written.getvalue() == b"a long cell?\n"


def test_results_have_the_name_that_was_given(tmp_path: Path) -> None:
    table = FigureTable(columns=("", "n"), rows=())
    for name in ("rate-0.5", "rate-0.7"):
        save(str(tmp_path / "out" / name), {}, table)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"rate-0.5.json", "rate-0.5.md", "rate-0.7.json", "rate-0.7.md"}


def test_a_bill_begins_on_the_day_that_was_given() -> None:
    """A day without hyphens is a day, too, and not so many seconds after 1970."""
    day = round(datetime(2026, 1, 31).timestamp()) * 10**9
    assert [_nanoseconds(text, 5) for text in ("2026-01-31", "20260131", "2026-01-31T00:00", None)] == [day] * 3 + [5]
    with pytest.raises(typer.BadParameter, match="expected a date and time"):
        _nanoseconds("1769817600", 0)


def test_brackets_in_names_and_errors_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """They are no markup, which would be left out or, where it closes nothing, end the command."""
    told = "HTTP 400: [dim] no [/INST]"
    out.print(told)
    out.print(FigureTable(title="[bold]", columns=("[b]", "n"), rows=((told, "[/]"),)).rich())
    with progress_bar("[/x]", 1) as update:
        update(completed=1, description="[/y]")
    printed = capsys.readouterr().out
    assert printed.count(told) == 2 and all(part in printed for part in ("[bold]", "[b]", "[/]"))


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 2", "2XiB", "1e9", "many"])
def test_sizes_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Got a size of"):
        parse_size(text)


def test_adapters_as_name_and_path_or_json() -> None:
    assert parse_adapter("sql=/a/b=c") == ("sql", "/a/b=c")
    assert parse_adapter('{"name": "sql", "path": "/a", "base_model_name": "llama"}') == ("sql", "/a")


@pytest.mark.parametrize(
    "text", ["sql", "=x", "sql=", "{", '{"name": "a"}', '{"name": 3, "path": "/a"}', '{"nam": "a"}']
)
def test_adapters_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--lora-modules"):
        parse_adapter(text)


def _make_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_a_folder_gives_its_adapters_by_name(tmp_path: Path) -> None:
    _make_adapter(tmp_path / "many" / "sql")
    _make_adapter(tmp_path / "many" / "poet")
    (tmp_path / "many" / "notes").mkdir()
    one = _make_adapter(tmp_path / "one")
    assert collect_adapters([f"mine={one}"], [str(tmp_path / "many")]) == {
        "mine": str(one),
        "poet": str(tmp_path / "many" / "poet"),
        "sql": str(tmp_path / "many" / "sql"),
    }


def test_a_name_stands_for_one_path(tmp_path: Path) -> None:
    first, second = _make_adapter(tmp_path / "a" / "sql"), _make_adapter(tmp_path / "b" / "sql")
    assert collect_adapters([f"sql={first}"], [str(tmp_path / "a")]) == {"sql": str(first)}
    with pytest.raises(ConfigError, match="two adapters named 'sql'"):
        collect_adapters([f"sql={first}", f"sql={second}"], [])
    assert collect_adapters([], [str(tmp_path / "b"), str(tmp_path / "a")]) == {"sql": str(second)}


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        collect_adapters([], [str(tmp_path / "nowhere")])


def test_vllm_flags_are_taken_out_and_explained() -> None:
    ours, remarks = take_out(
        [
            *("llama", "--enable-lora", "--max-lora-rank", "64", "--port", "1"),
            *("-tp", "1", "--lora-dtype=auto", "--no-enable-prefix-caching"),
            *("--no-enable-chunked-prefill", "--no-chunked-prefill"),
        ]
    )
    assert ours[:5] == ["llama", "--port", "1", "--tensor-parallel-size", "1"]
    assert ours[5:] == ["--no-prefix-caching", *["--step-composition=whole-prompts"] * 2]
    assert [remark.split(":")[0] for remark in remarks] == [
        "--enable-lora is not needed",
        "--max-lora-rank is not needed",
        "--lora-dtype is not needed",
    ]


def test_vllm_flags_under_other_names_are_translated() -> None:
    line = "--model llama --scheduling_policy priority --kv-cache-memory-bytes=2GiB --no-async-scheduling --max_loras 2"
    ours, remarks = take_out(line.split())
    assert ours == [
        *("llama", "--policy=priority", "--memory=2GiB", "--no-plan-ahead"),
        *("--max-loras", "2"),
    ]
    assert remarks == []


def test_the_opposite_of_a_missing_feature_is_fine_and_of_one_that_is_always_on_is_not() -> None:
    assert take_out(["--no-enable-expert-parallel"])[0] == []
    with pytest.raises(ConfigError, match="always enabled"):
        take_out(["--no-enable-lora"])


def test_one_setting_of_a_configuration_is_as_the_whole() -> None:
    assert take_out(["--compilation-config.mode", "3", "--port", "1"])[0] == ["--port", "1"]
    with pytest.raises(ConfigError, match="speculative"):
        take_out(["--speculative-config.method=ngram"])


def test_every_other_flag_of_vllm_is_refused_with_its_reason() -> None:
    for name, flag in VLLM_FLAGS.items():
        if flag.fine is not None:
            with pytest.raises(ConfigError, match=re.escape(f"{flag.why}")):
                take_out([name, "some value"])
        else:
            assert take_out([name, *(["some value"] if flag.has_value else [])])[0] == []


def test_the_page_s_rows_are_as_the_command_line_does() -> None:
    serve = typer.main.get_command(make_app(["serve"])).commands["serve"]  # type: ignore[attr-defined]
    known = {name for param in serve.params for name in (*param.opts, *param.secondary_opts)}
    rows = [line.split("|")[1:4] for line in vllm_section().splitlines() if line.startswith("| `")]
    assert len(rows) == len({row[0] for row in rows}) > 200
    for flag, here, _ in ((one.strip().strip("`") for one in row) for row in rows):
        if flag in SAME_NAMES:
            assert flag in known
        elif here == "refused":
            with pytest.raises(ConfigError, match="not supported"):
                take_out([flag, "x"])
        elif here.endswith(" only"):
            for value in here.removesuffix(" only").split(" or "):
                assert take_out([flag, value])[0] == []
            with pytest.raises(ConfigError, match="not supported"):
                take_out([flag, "something else"])
        elif here == "ignored":
            assert take_out([f"{flag}=1"])[0] == []
        else:
            assert here == "works"
            for value in TRANSLATED.get(flag, ("a model",)):
                (ours,) = take_out([flag, *([value] if value else [])])[0]
                assert flag == "--model" or ours.partition("=")[0] in known


def test_several_names_and_keys_follow_one_flag_after_the_model() -> None:
    assert spread_lists(["llama", "--served-model-name", "a", "b", "--api-key", "k", "l", "--port", "1"]) == [
        *("llama", "--served-model-name", "a", "--alias", "b"),
        *("--api-key", "k", "--api-key", "l", "--port", "1"),
    ]
    line = ["--served-model-name", "a", "llama"]
    assert spread_lists(line) == line


def test_lists_as_json() -> None:
    origins = ["--allowed-origins", '["https://a", "https://b"]']
    args = ["llama", *origins, '--allowed-methods=["GET"]', "--allowed-headers", "x"]
    assert spread_lists(args) == [
        *("llama", "--allowed-origins", "https://a", "--allowed-origins", "https://b"),
        *("--allowed-methods", "GET", "--allowed-headers", "x"),
    ]
    for wrong in ("[1]", "[oops"):
        with pytest.raises(ConfigError, match="allowed-origins"):
            spread_lists(["--allowed-origins", wrong])


def test_hints_are_near_in_meaning() -> None:
    names = ["--max-loras", "--max-logprobs", "--max-num-seqs", "--max-num-batched-tokens", "--host", "--host-memory"]
    assert near_names("--max-log", names) == []
    assert near_names("--max-lora", names) == ["--max-loras"]
    assert near_names("--max-num-sequences", names) == ["--max-num-seqs"]
    assert near_names("--memory-host", names) == ["--host", "--host-memory"]


@pytest.mark.parametrize("line", ["-pp 2", "--pipeline-parallel-size=4", "--lora-dtype float16", "--swap-space"])
def test_vllm_flags_that_would_mislead_are_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="--"):
        take_out(line.split())


def test_nothing_after_a_double_dash_is_a_flag() -> None:
    assert take_out(["--", "--enable-lora"]) == (["--", "--enable-lora"], [])


def test_every_flag_says_why() -> None:
    assert all(flag.why and name.startswith("--") for name, flag in VLLM_FLAGS.items())


def test_one_flag_takes_several_adapters_but_not_the_model() -> None:
    line = ["--lora-modules", "a=x", '{"name": "b"}', "c=z", "llama", "--port", "80", "d=no"]
    assert spread_lists(line) == [
        *("--lora-modules", "a=x", "--lora-modules", '{"name": "b"}', "--lora-modules", "c=z"),
        *("llama", "--port", "80", "d=no"),
    ]


def test_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('model = "llama"\nmax-num-seqs = 4\nlora_dir = "x"\nforecast = true\n[lora-modules]\nsql = "/a"\n')
    options, lists = ["model", "max_num_seqs", "lora_dir", "forecast", "lora_modules"], ["lora_dir", "lora_modules"]
    assert read_config_file(str(file), options=options, lists=lists, switches=["forecast"]) == {
        "model": "llama",
        "forecast": True,
        "max_num_seqs": 4,
        "lora_dir": ["x"],
        "lora_modules": ["sql=/a"],
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = 1", "'port' in .*expected one of lists, max_num_seqs"),
        ("max-num-seq = 1", "'max-num-seq' in .*did you mean 'max-num-seqs'"),
        ("max_nums_seq = 1", "'max_nums_seq' in .*did you mean 'max_num_seqs'"),
        ("max-num-seqs = 1\nmax_num_seqs = 2", "twice"),
        ("max-num-seqs = [1]", "expected a string, a number or a boolean"),
        ("max-num-seqs = true", "max-num-seqs = true in .*expected a string or a number"),
        ("lists = [1]", "list of strings"),
        ("max-num-seqs =", "not TOML"),
    ],
)
def test_configuration_file_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_config_file(str(file), options=["max_num_seqs", "lists"], lists=["lists"])


def test_configuration_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_config_file("/nonexistent.toml", options=[], lists=[])


def test_adapters_are_found_at_depth_and_named_by_their_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("plain", "org/nested", "org/nested/checkpoint-5", "a/b/c/d/too-deep"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").touch()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "adapter_model.safetensors").touch()
    (tmp_path / "org" / "up").symlink_to(tmp_path / "half")
    found = adapters_below(str(tmp_path))
    assert found == {name: str(tmp_path / name) for name in ("org/nested", "plain")}
    assert sorted(str(record.args[0]) for record in caplog.records if isinstance(record.args, tuple)) == [
        str(tmp_path / "half"),
        str(tmp_path / "org" / "up"),
    ]


def test_vllms_environment_is_read_or_refused() -> None:
    plain, allowed = ServerConfig(), ServerConfig(allowed_lora_paths=("/x",))
    assert with_vllm_environment(plain, {"VLLM_API_KEY": "k"}).api_keys == ("k",)
    assert with_vllm_environment(ServerConfig(api_keys=("own",)), {"VLLM_API_KEY": "k"}).api_keys == ("own",)
    name = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    assert with_vllm_environment(allowed, {name: "True"}) == allowed
    assert with_vllm_environment(plain, {name: "1"}, ("https://host.org",)) == plain
    assert with_vllm_environment(plain, {name: "0"}) == plain
    for server, value in ((plain, "1"), (allowed, "false")):
        with pytest.raises(ConfigError, match="--allowed-lora-path"):
            with_vllm_environment(server, {name: value})


@pytest.mark.parametrize("host", ["..", 64 * "a"])
def test_a_host_that_is_no_name_is_said(host: str) -> None:
    with pytest.raises(ConfigError, match=f"^Got host = '{re.escape(host)}', expected an address"):
        bind(host, 0)
    with pytest.raises(ConfigError, match=f"^Got URL = 'http://{re.escape(host)}:1', expected"):
        parse_address(f"http://{host}:1")


@pytest.mark.parametrize(
    ("host", "warns"), [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True)]
)
def test_an_open_server_beyond_this_machine_is_warned_of(host: str, warns: bool) -> None:
    assert (exposure_warning(ServerConfig(host=host)) is not None) == warns
    assert exposure_warning(ServerConfig(host=host, api_keys=("k",))) is None


def test_a_tenants_folder_cannot_stop_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    good = [_make_adapter(root / name) for name in ("good", "日本")]
    os.mkdir(os.fsencode(root) + b"/\xff\xfe")
    Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe/adapter_config.json")).write_text("{}")
    for name in ("a\nforged=1", "\x1b[2J", " lead", "/".join(["x" * 120] * 3)):
        _make_adapter(root / name)
    _make_adapter(outside / "theirs")
    (root / "link").symlink_to(outside / "theirs")
    (root / "up").symlink_to(outside)
    (root / "alias").symlink_to(root / "good")
    (root / "loop").symlink_to("loop")
    found = adapters_below(str(root), [os.path.realpath(root)])
    assert found == {"alias": str(root / "alias"), "good": str(good[0]), "日本": str(good[1])}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 7 and all(line.isprintable() and line.isascii() for line in lines)
    assert adapters_below(str(root)).keys() == {*found, "link", "up/theirs"}
