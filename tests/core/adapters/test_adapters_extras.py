"""Files beside an adapter's weights: used, or named with the reason."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from manylora.core.adapters.request_files import MAX_JSON_BYTES, MAX_TOKENS, AdapterRequestFiles, read_request_files
from manylora.core.generation import GenerationDefaults
from manylora.serving.api import model_settings
from manylora.serving.api.model_settings import ModelSettings


def test_settings_of_a_folder(tmp_path: Path) -> None:
    assert read_request_files("a", str(tmp_path)) == AdapterRequestFiles()
    (tmp_path / "generation_config.json").write_text('{"top_k": 5, "num_beams": 2}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": "y"}],'
        ' "added_tokens_decoder": {"9": {"content": "<t>", "special": true}}}'
    )
    (tmp_path / "tokenizer.json").write_text("not read")
    extras = read_request_files("a", str(tmp_path))
    assert extras.defaults == GenerationDefaults(top_k=5)
    assert (extras.chat_template, extras.tokens) == ("y", (("<t>", 9),))
    assert extras.problems == ("generation_config.json: num_beams has no effect",)


def test_a_broken_file_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (tmp_path / "secret").write_text("key")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    (folder / "generation_config.json").write_text('{"top_p": "high"}')
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": 3}')
    (folder / "added_tokens.json").write_text('{"<t>": 9}')
    extras = read_request_files("a", str(folder))
    assert extras.chat_template is None and extras.tokens == (("<t>", 9),)
    named = " ".join(extras.problems)
    assert all(
        part in named for part in ("leads out of the folder", "got top_p = 'high'", "tokenizer_config.json: Expected")
    )


def test_a_folder_of_any_size_and_place_costs_little(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(b" " * (MAX_JSON_BYTES + 1))
    (tmp_path / "added_tokens.json").write_text(json.dumps({str(n): n for n in range(MAX_TOKENS + 1)}))
    extras = read_request_files("a", str(tmp_path))
    assert extras.tokens == () and len(extras.problems) == 2
    link = tmp_path / "allowed" / "a"
    link.parent.mkdir()
    link.symlink_to(tmp_path)
    (problem,) = read_request_files("a", str(link), [str(link.parent)]).problems
    assert "leads outside" in problem


def test_requests_for_one_adapter_share_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []

    def counted(name: str, path: str, roots: object) -> AdapterRequestFiles:
        reads.append(name)
        return AdapterRequestFiles(chat_template=name * 100)

    monkeypatch.setattr(model_settings, "read_request_files", counted)
    loaded = {name: SimpleNamespace(path=str(tmp_path), num_loads=1) for name in ("a", "b", "c")}
    settings = ModelSettings(
        base_defaults=None,
        base_name="base",
        adapters=loaded,  # type: ignore[arg-type]
        tokenizer=SimpleNamespace(chat_template=None),  # type: ignore[arg-type]
        trusts_templates=True,
        base_names=(),
    )

    async def ask() -> None:
        monkeypatch.setattr(model_settings, "MAX_KEPT_CHARS", 200)
        first = asyncio.ensure_future(settings.of("a"))
        asked = [asyncio.ensure_future(settings.of("a")) for _ in range(20)]
        await asyncio.sleep(0)
        first.cancel()  # its client has left
        assert {one.chat_template for one in await asyncio.gather(*asked)} == {"a" * 100}
        assert reads == ["a"]
        for name in ("b", "a", "c", "a", "b"):
            await settings.of(name)
        assert reads == ["a", "b", "c", "b"], "the least recently requested template went"

    asyncio.run(ask())
