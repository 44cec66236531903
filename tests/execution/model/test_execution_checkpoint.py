"""A name that is no model's: told within seconds, with what was looked at; and everything else let through."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from cli_runs import app
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from typer.testing import CliRunner

from manylora.core.config import ModelConfig
from manylora.core.errors import ConfigError
from manylora.execution.checkpoint import files as checkpoint
from manylora.execution.checkpoint.files import check_checkpoint
from manylora.execution.model.load import load_model
from manylora.serving.text import Tokenizer


class Hub:
    """A hub that answers as it is told, and an empty cache before it."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.asked: list[str] = []

    def answer(self, url: str, *, timeout: float) -> None:
        assert timeout <= 3.0
        self.asked.append(url)
        if self.error is not None:
            raise self.error


def http_error(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    error = kind.__new__(kind)
    Exception.__init__(error, f"HTTP {status}")
    return error


@pytest.fixture
def hub(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(getattr(request, "param", None))
    monkeypatch.setattr(checkpoint, "get_hf_file_metadata", hub.answer)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return hub


UNREACHABLE = httpx.ConnectError("Name or service not known")


@pytest.mark.parametrize("hub", [UNREACHABLE], indirect=True)
def test_a_name_that_is_no_folder_without_a_network(hub: Hub) -> None:
    with pytest.raises(ConfigError, match=r"Got 'nodir': there is no such folder here, and .*Name or service.* path$"):
        check_checkpoint("nodir")
    assert hub.asked == ["https://huggingface.co/nodir/resolve/main/config.json"], "once"


@pytest.mark.parametrize("hub", [UNREACHABLE], indirect=True)
@pytest.mark.parametrize(
    "command", [["serve", "nodir"], ["generate", "nodir", "hello"], ["calibrate", "--run", "nodir"]]
)
def test_every_command_says_so(hub: Hub, command: list[str]) -> None:
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ConfigError)
    assert "there is no such folder here" in str(result.exception)
    assert len(hub.asked) == 1


@pytest.mark.parametrize("hub", [UNREACHABLE], indirect=True)
def test_loaders_ask_as_well(hub: Hub) -> None:
    for load in (lambda: Tokenizer.load("nodir"), lambda: load_model(ModelConfig(model="nodir", device="cpu"))):
        with pytest.raises(ConfigError, match="there is no such folder here"):
            load()
    assert len(hub.asked) == 2


@pytest.mark.parametrize("hub", [http_error(RepositoryNotFoundError, 404)], indirect=True)
def test_a_name_that_the_hub_does_not_know(hub: Hub) -> None:
    with pytest.raises(ConfigError, match=r"huggingface\.co has no such model.*HF_TOKEN"):
        check_checkpoint("some/model", "v2")
    assert hub.asked == ["https://huggingface.co/some/model/resolve/v2/config.json"]


@pytest.mark.parametrize("hub", [None, http_error(GatedRepoError, 403), http_error(HfHubHTTPError, 503)], indirect=True)
def test_what_the_hub_has_is_left_to_the_loader(hub: Hub) -> None:
    check_checkpoint("some/model")
    assert len(hub.asked) == 1


def test_offline_means_that_nobody_is_asked(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"not in the cache .*HF_HUB_OFFLINE"):
        check_checkpoint("some/model")
    snapshot = tmp_path / "cache" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    check_checkpoint("some/model")
    assert not hub.asked


@pytest.mark.parametrize("name", ["/no/where", "./nowhere", "~/nowhere", "a/b/c", "no where", "a--b"])
def test_what_can_be_no_name_is_told_at_once(hub: Hub, name: str) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        check_checkpoint(name)
    assert not hub.asked


def test_a_folder_is_a_folder(hub: Hub, tmp_path: Path) -> None:
    check_checkpoint(str(tmp_path))
    assert not hub.asked
