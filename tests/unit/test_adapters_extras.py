"""Files beside an adapter's weights: used, or named with the reason."""

from __future__ import annotations

from pathlib import Path

from manylora.adapters.extras import AdapterExtras, read_extras
from manylora.generation import GenerationDefaults


def test_settings_of_a_folder(tmp_path: Path) -> None:
    assert read_extras("a", str(tmp_path)) == AdapterExtras()
    (tmp_path / "generation_config.json").write_text('{"top_k": 5, "num_beams": 2}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": "y"}]}'
    )
    (tmp_path / "tokenizer.json").write_text('{"model": {}, "added_tokens": [{"id": 9, "content": "<t>"}]}')
    extras = read_extras("a", str(tmp_path))
    assert extras.defaults == GenerationDefaults(top_k=5)
    assert (extras.chat_template, extras.tokens) == ("y", (("<t>", 9),))
    assert extras.problems == ("generation_config.json: num_beams has no effect",)


def test_a_broken_file_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (tmp_path / "secret").write_text("key")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    (folder / "generation_config.json").write_text('{"top_p": "high"}')
    (folder / "tokenizer.json").write_text('{"added_tokens": 3}')
    (folder / "added_tokens.json").write_text('{"<t>": 9}')
    extras = read_extras("a", str(folder))
    assert extras.chat_template is None and extras.tokens == (("<t>", 9),)
    named = " ".join(extras.problems)
    assert all(part in named for part in ("leads out of the folder", "got top_p = 'high'", "tokenizer.json: Expected"))
