"""The detokenizer: the sum of the deltas is the text, whatever the pieces, the stops and the tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from text_tokenizers import MAKERS, make_tokenizer

from manylora.core.types import SampledToken, SamplingParams
from manylora.serving.text import Detokenizer, StopMatch, StopStrings, TextDelta, Tokenizer
from manylora.serving.text.pieces import BytePieces, DecodedPieces

KINDS = list(MAKERS)
WORDS = st.lists(
    st.sampled_from(
        ["hello", " world", " ", "  ", "STOP", "ST", "OP", "</s>", " naïve", "世界", "🙂", "🙃👩‍👧", "\n", "é", "a"]
    ),
    max_size=12,
).map("".join)


def tokens(ids: list[int], **kwargs) -> list[SampledToken]:
    return [SampledToken(token_id=token_id, **kwargs) for token_id in ids]


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in pairwise(edges)]


def run(detokenizer: Detokenizer, parts: list[list[int]]) -> tuple[str, TextDelta, int]:
    """Push piece by piece until the end; return the text, the last delta and the tokens taken."""
    text, taken = "", 0
    for part in parts:
        delta = detokenizer.push(tokens(part))
        text, taken = text + delta.text, taken + delta.num_tokens
        if delta.finished:
            return text, delta, taken
    delta = detokenizer.finish()
    return text + delta.text, delta, taken


def one_shot(tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skip: bool = True) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    return tokenizer.decode(prompt + ids, skip_special_tokens=skip)[len(before) :]


def stopped(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Cut the text at the stop string that completes first, the longest of them, by looking at every prefix."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=200)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(["", "hello", "the quick brown fox ", "世", " "]),
    WORDS,
    st.lists(st.integers(0, 100), max_size=8),
    st.booleans(),
)
def test_any_pieces_add_up_to_the_text(kind: str, before: str, answer: str, cuts: list[int], skip: bool) -> None:
    tokenizer = make_tokenizer(kind)
    prompt = tokenizer.encode(before)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    sampling = SamplingParams(skip_special_tokens=skip)
    text, last, taken = run(Detokenizer(tokenizer, prompt, sampling), pieces(ids, cuts))
    assert text == one_shot(tokenizer, prompt, ids, skip=skip)
    assert last.finished and last.stop_reason is None and taken == len(ids)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 319), max_size=30), st.lists(st.integers(0, 100), max_size=8))
def test_tokens_that_are_no_text_add_up_too(ids: list[int], cuts: list[int]) -> None:
    tokenizer = make_tokenizer("byte_level")
    prompt = tokenizer.encode("hello")
    text, _, _ = run(Detokenizer(tokenizer, prompt, SamplingParams()), pieces(ids, cuts))
    assert text == one_shot(tokenizer, prompt, ids)


@settings(max_examples=300)
@given(
    WORDS,
    st.lists(st.sampled_from(["STOP", "ST", "TOP", " wor", "lo w", "o", "世", "界🙂", "aaaa"]), max_size=3),
    st.lists(st.integers(0, 100), max_size=8),
    st.booleans(),
)
def test_stop_strings_cut_the_text_wherever_the_pieces_fall(
    answer: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    tokenizer = make_tokenizer("byte_level")
    ids = tokenizer.encode(answer, add_special_tokens=False)
    sampling = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    text, last, taken = run(Detokenizer(tokenizer, [], sampling), pieces(ids, cuts))
    expected, stop = stopped(tokenizer.decode(ids), tuple(stops))
    assert text == expected + (stop if include and stop else "")
    assert last.stop_reason == stop
    if stop is not None:
        fewer = tokenizer.decode(ids[: taken - 1]).rstrip("\ufffd")
        assert stopped(fewer, tuple(stops))[1] is None, "tokens after the stop were counted"


@settings(max_examples=200)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    watcher, released, seen = StopStrings(stops), "", ""
    while len(seen) < len(text):
        piece = text[len(seen) : len(seen) + data.draw(st.integers(1, 5))]
        seen += piece
        out = watcher.feed(piece)
        if isinstance(out, StopMatch):
            assert (released + out.before, out.stop) == stopped(text, tuple(stops))
            return
        released += out
        held = seen[len(released) :]
        assert seen.startswith(released)
        assert not held or any(stop.startswith(held) for stop in stops)
    assert released + watcher.flush() == text == stopped(text, tuple(stops))[0]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_half_a_character_waits_and_is_given_out_at_the_end(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode("🙃", add_special_tokens=False)[-4:]
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("hello"), SamplingParams())
    *first, last = [detokenizer.push(tokens([i])).text for i in ids]
    assert len(first) >= 2 and not any(first) and last.endswith("🙃")
    assert detokenizer.push(tokens(ids[:1])).text == ""
    assert set(detokenizer.finish().text) == {"\ufffd"}


def test_an_answer_can_finish_the_character_its_prompt_began() -> None:
    tokenizer = make_tokenizer("byte_level")
    ids = tokenizer.encode("hello 🙃", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, ids[:-2], SamplingParams())
    assert detokenizer.push(tokens(ids[-2:])).text == "🙃"


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 319), max_size=6),
    st.lists(st.one_of(st.integers(0, 325), st.integers(100, 255)), max_size=20),
    st.booleans(),
)
def test_a_table_of_bytes_says_what_decoding_twice_says(prompt: list[int], ids: list[int], skip: bool) -> None:
    """Whatever the bytes: characters cut in the middle, by the prompt too, special tokens, and numbers of no token."""
    tokenizer = make_tokenizer("byte_level")
    # Decoding twice says the marks before a character that the prompt began once more; the table knows whose they are.
    assume(not tokenizer.decode(prompt, skip_special_tokens=skip).endswith("\ufffd\ufffd"))
    quick = tokenizer.pieces(prompt, skip_special_tokens=skip)
    sure = DecodedPieces(prompt, lambda ids: tokenizer.decode(ids, skip_special_tokens=skip))
    assert isinstance(quick, BytePieces)
    said, surely = "", ""
    for token_id in ids:
        said, surely = said + quick.add(token_id), surely + sure.add(token_id)
        assert said.startswith(surely)  # a lone byte that nothing can mend is said at once
    assert said + quick.end() == surely + sure.end()


@pytest.mark.parametrize("kind", ["byte_fallback", "characters"])
def test_other_decoders_have_no_table(kind: str) -> None:
    assert isinstance(make_tokenizer(kind).pieces([1]), DecodedPieces)


def test_the_first_token_keeps_its_space() -> None:
    tokenizer = make_tokenizer("byte_fallback")
    world = tokenizer.encode("world", add_special_tokens=False)
    after_text = Detokenizer(tokenizer, tokenizer.encode("hello"), SamplingParams())
    alone = Detokenizer(tokenizer, [], SamplingParams())
    assert after_text.push(tokens(world)).text == " world"
    assert alone.push(tokens(world)).text == "world"


def test_a_stop_token_is_counted_but_not_part_of_the_answer() -> None:
    tokenizer = make_tokenizer("byte_level")
    (eos,) = tokenizer.eos_token_ids
    comma = tokenizer.encode(",", add_special_tokens=False)[0]
    hello = tokenizer.encode("hello", add_special_tokens=False)

    def answer(stop_token: int, **params) -> TextDelta:
        detokenizer = Detokenizer(tokenizer, [], SamplingParams(**params))
        return detokenizer.push(tokens([*hello, stop_token]), stop_token=stop_token)

    ended = answer(eos, skip_special_tokens=False)
    assert (ended.text, ended.finished, ended.stop_reason) == ("hello", True, None)
    assert ended.num_tokens == len(hello) + 1
    asked = answer(comma, stop_token_ids=(comma,))
    assert (asked.text, asked.finished, asked.stop_reason) == ("hello", True, comma)
    kept = answer(comma, stop_token_ids=(comma,), include_stop_str_in_output=True)
    assert (kept.text, kept.stop_reason) == ("hello,", comma)


def test_text_held_for_a_stop_string_comes_with_the_end() -> None:
    tokenizer = make_tokenizer("characters")
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=("STOP",)))
    assert detokenizer.push(tokens(tokenizer.encode("the ST", add_special_tokens=False))).text == "the "
    assert detokenizer.finish() == TextDelta(text="ST", num_tokens=0, finished=True)
    assert detokenizer.finish().text == "", "given out twice"


def test_min_tokens_hold_for_stop_strings() -> None:
    tokenizer = make_tokenizer("characters")
    ids = tokenizer.encode("STOP STOP", add_special_tokens=False)
    for min_tokens, expected in [(0, ""), (3, "STO"), (4, "STOP "), (9, "STOP STOP")]:
        sampling = SamplingParams(stop=("STOP", "P"), min_tokens=min_tokens)
        text, _, _ = run(Detokenizer(tokenizer, [], sampling), [[i] for i in ids])
        assert text == expected, min_tokens


def test_thousands_of_silent_tokens_stay_cheap_and_lose_no_space() -> None:
    tokenizer = make_tokenizer("byte_fallback")
    silent = tokenizer.encode("<|user|>", add_special_tokens=False)[-1:]
    world = tokenizer.encode("world", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("hello"), SamplingParams())
    assert detokenizer.push(tokens(silent * 5000)).text == ""
    assert detokenizer.push(tokens(world)).text == " world"


def test_logprobs_come_with_bytes_and_offsets() -> None:
    tokenizer = make_tokenizer("byte_level")
    ids = tokenizer.encode("hello 🙃 world", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(logprobs=1))
    delta = detokenizer.push(tokens(ids, logprob=-0.5, top=((ids[0], -0.25),)))
    assert b"".join(entry.raw for entry in delta.logprobs).decode() == delta.text == "hello 🙃 world"
    assert [entry.token_id for entry in delta.logprobs] == ids
    offsets = [entry.text_offset for entry in delta.logprobs]
    assert offsets == sorted(offsets) and offsets[0] == 0
    last = delta.logprobs[-1]
    assert delta.text[last.text_offset :] == last.text
    assert (last.logprob, last.top[0].token_id, last.top[0].logprob) == (-0.5, ids[0], -0.25)


class Counted(str):
    """A text that counts how often a character is looked at."""

    num_looks = 0

    def __getitem__(self, index):
        self.num_looks += 1
        return super().__getitem__(index)


def test_a_character_costs_few_steps_however_long_the_stop_string() -> None:
    stop = Counted("a" * 4095 + "b")
    watcher = StopStrings([stop])
    most = 0
    for char in "a" * 5000 + "c" + "a" * 4094 + "c":
        before = stop.num_looks
        assert isinstance(watcher.feed(char), str)
        most = max(most, stop.num_looks - before)
    assert most <= 64, "a fallback through every shorter beginning takes thousands"
    found = watcher.feed("a" * 4095 + "b")
    assert isinstance(found, StopMatch) and found.before == ""
