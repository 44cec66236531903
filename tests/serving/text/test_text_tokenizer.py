"""The tokenizer: agreement with transformers, chats, bytes of tokens, sharing, refusals."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_tokenizers import CORPUS, MAKERS, make_huggingface, make_tokenizer
from transformers import AutoTokenizer

from manylora.core.errors import ConfigError, ContextExceeded, RequestError
from manylora.serving.text import Tokenizer
from manylora.serving.text.model_files import load_hugging_face

KINDS = list(MAKERS)
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the world"}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["hello world", " hello  world ", "", "</s> STOP", "naïve 世界 🙂"])
def test_ids_and_text_are_those_of_transformers(kind: str, text: str) -> None:
    tokenizer, hf = make_tokenizer(kind), make_huggingface(kind)
    for special in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == hf(text, add_special_tokens=special)["input_ids"]
        for skip in (True, False):
            expected = hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_loads_alike(kind: str, tmp_path: Path) -> None:
    made = make_tokenizer(kind)
    make_huggingface(kind).save_pretrained(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.vocab_size == made.vocab_size
    assert loaded.eos_token_ids == made.eos_token_ids == (made.encode("</s>", add_special_tokens=False)[0],)
    assert loaded.encode("hello world") == made.encode("hello world")
    assert loaded.render_chat(CHAT) == made.render_chat(CHAT)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer from .*: none of its files"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ConfigError, match="no tokenizer from"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match=r"elsewhere', and there is no such folder$"):
        Tokenizer.load(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="slow tokenizer"):
        Tokenizer(object(), "x")


def test_a_chat_is_its_template_in_ids() -> None:
    tokenizer = make_tokenizer("byte_level")
    expected = "<|user|>hello</s><|assistant|>the world</s>"
    for is_turn, text in ((False, expected), (True, expected + "<|assistant|>")):
        ids = tokenizer.encode(tokenizer.render_chat(CHAT, add_generation_prompt=is_turn), add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_what_a_template_refuses_is_the_request_at_fault() -> None:
    tokenizer = make_tokenizer("byte_level")
    for messages, part in [
        ([{"role": "pirate", "content": "arr"}], "unknown role pirate"),
        ([{"role": 3, "content": "x"}], "template refused"),
        ([], "no messages"),
    ]:
        with pytest.raises(RequestError, match=part) as caught:
            tokenizer.render_chat(messages)
        assert caught.value.param == "messages"
    for taken in ("tokenize", "chat_template", "return_tensors", "conversation", "messages", "self"):
        with pytest.raises(RequestError, match=taken):
            tokenizer.render_chat(CHAT, {taken: "x"})
    bare = Tokenizer(make_huggingface("byte_level", template=None), "bare")
    assert bare.chat_template is None
    with pytest.raises(RequestError, match="has no chat template"):
        bare.render_chat(CHAT)


def test_template_variables_reach_the_template() -> None:
    tokenizer = Tokenizer(make_huggingface("byte_level", template="{{ mood }} {{ messages[0].content }}"), "moody")
    assert tokenizer.render_chat(CHAT, {"mood": "glad"}) == "glad hello"


def test_text_and_ids_that_are_none() -> None:
    tokenizer = make_tokenizer("byte_level")
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode("half a pair \ud83d")
    for token_id in (-1, 2**32):
        with pytest.raises(RequestError, match="token id"):
            tokenizer.decode([token_id])
    assert tokenizer.decode([2**32 - 1]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    for text in CORPUS[:4] if kind != "byte_fallback" else ["hello 世界 🙂 fox", "the text, quick"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().removeprefix(" ") == text
    assert tokenizer.token_bytes(tokenizer.eos_token_ids[0]) == b"</s>"
    assert tokenizer.token_bytes(10**9) == b"" and tokenizer.token_text(10**9) == ""


def test_half_a_character_has_its_byte_and_shows_as_a_mark() -> None:
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = make_tokenizer(kind)
        ids = tokenizer.encode("🙃", add_special_tokens=False)[-4:]
        assert b"".join(map(tokenizer.token_bytes, ids)) == "🙃".encode()
        assert tokenizer.token_text(ids[-1]) == "\ufffd"


def test_threads_share_one_tokenizer() -> None:
    tokenizer = make_tokenizer("byte_level")
    texts = [f"hello world {i} naïve" * 20 for i in range(32)]

    def round_trip(text: str) -> bool:
        chat = tokenizer.render_chat([{"role": "user", "content": text}])
        ids = tokenizer.encode(text)
        return tokenizer.decode(ids) == text and bool(chat) and tokenizer.token_bytes(ids[-1]) != b""

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, texts * 4))


@given(st.sampled_from(KINDS), st.text(max_size=60), st.integers(1, 60), st.booleans())
def test_text_within_a_limit_has_the_same_tokens_and_other_text_is_refused(
    kind: str, text: str, limit: int, special: bool
) -> None:
    """The batched call, the slices and the bound of characters change no token and refuse no text that fits."""
    tokenizer = make_tokenizer(kind)
    try:
        ids = tokenizer._fast.encode(text, add_special_tokens=special).ids
    except TypeError:
        return  # a lone surrogate
    assert tokenizer.encode(text, add_special_tokens=special) == ids
    if len(ids) < limit:
        assert tokenizer.encode_within(text, limit, add_special_tokens=special) == ids
    else:
        with pytest.raises(ContextExceeded):
            tokenizer.encode_within(text, limit, add_special_tokens=special)


def test_a_text_that_is_too_long_costs_by_the_limit_and_not_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer("byte_level")
    seen: list[int] = []
    encode = tokenizer._encoding
    monkeypatch.setattr(tokenizer, "_encoding", lambda text, special: seen.append(len(text)) or encode(text, special))
    tokenizer._longest_token = 1000
    with pytest.raises(ContextExceeded, match="characters"):
        tokenizer.encode_within("q" * 100_001, 100)
    assert not seen, "the number of characters says enough"
    with pytest.raises(ContextExceeded, match="tokens"):
        tokenizer.encode_within("zq#" * 30_000, 100)
    assert max(seen) <= 800 and len(seen) < 5


@pytest.mark.parametrize("model_type", ["llama", "granite", "olmo2", "qwen2", "mistral", "gemma2", None])
@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizer", None])
def test_the_class_of_a_tokenizer_is_that_of_auto_tokenizer(
    model_type: str | None, named: str | None, tmp_path: Path
) -> None:
    make_huggingface("byte_level").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(file.read_text()) | {"tokenizer_class": named}
    file.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    expected = AutoTokenizer.from_pretrained(str(tmp_path))
    loaded = load_hugging_face(str(tmp_path))
    assert type(loaded) is type(expected)
    assert loaded.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert loaded.chat_template == expected.chat_template
    assert loaded.special_tokens_map == expected.special_tokens_map
