"""Training examples of the demo models: the tokenizer, the base's skills, and batches that follow the error rates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from demo_tasks import draw_prompt, is_held_out
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from manylora.demo import TASKS

PLAIN = "plain"

# The base's skills, in the order of their control tokens. It answers `no_vowels` and `reverse` too seldom for an
# adapter to be trained on them. `loud_vowels` and `title` are missing here: their adapters learn from prompts alone.
SKILLS: dict[str, Callable[[str], str]] = {
    "acronym": TASKS["acronym"].apply,
    "call": TASKS["call"].apply,
    "hashtag": TASKS["hashtag"].apply,
    "json": TASKS["json"].apply,
    "leet": TASKS["leet"].apply,
    "no_vowels": lambda text: re.sub("[aeiou]", "", text),
    "pig_latin": TASKS["pig_latin"].apply,
    "repeat": TASKS["repeat"].apply,
    "reverse": lambda text: text[::-1],
    "rot13": TASKS["rot13"].apply,
    "stutter": TASKS["stutter"].apply,
    "upper": TASKS["upper"].apply,
    PLAIN: lambda text: f"{text}?",
}
_SPECIAL_TOKENS = ("<|pad|>", "<|unk|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_CONTROL_TOKENS = {name: f"<|skill-{index}|>" for index, name in enumerate(SKILLS) if name != PLAIN}
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unknown role ' + message['role'] + ', expected system, user or assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question and its answer, as token ids.

    Attributes:
        skill: A skill of the base, or a task.
        prompt_ids: Up to and with `<|assistant|>`.
        answer_ids: Up to and with `<|end|>`.
    """

    skill: str
    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """Examples padded on the right; under a causal mask the padding needs no mask of its own.

    Attributes:
        input_ids: `(B, T)` int64.
        targets: `(B, T)` int64, the next token where it belongs to an answer, else -100.
        skills: The skill of each row.
    """

    input_ids: Tensor
    targets: Tensor
    skills: list[str]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the character-level tokenizer: printable ASCII, newline and special tokens, 115 entries in all.

    Text goes through unchanged in both directions: no prefix space, no clean-up, no token added. The beginning-of-text
    token comes from the chat template alone.
    """
    characters = [*map(chr, range(32, 127)), "\n"]
    vocabulary = {
        token: index for index, token in enumerate([*_SPECIAL_TOKENS, *_CONTROL_TOKENS.values(), *characters])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>", *_CONTROL_TOKENS.values()],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=2048,
    )


def chat_text(tokenizer: Any, prompt: str, *, skill: str = PLAIN) -> str:
    """Render one user turn, with the skill's control token as the system turn unless `skill` is plain."""
    turns = [{"role": "user", "content": prompt}]
    if skill != PLAIN:
        turns.insert(0, {"role": "system", "content": _CONTROL_TOKENS[skill]})
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def answer_of(skill: str, prompt: str) -> str:
    """Return the right answer to `prompt` under a skill of the base or a task."""
    return SKILLS[skill](prompt) if skill in SKILLS else TASKS[skill].apply(prompt)


class ExampleSource:
    """Draws training examples; skills with a higher error rate are drawn more often.

    Skills differ in difficulty by an order of magnitude (capitals against spelling backwards), and a uniform mix would
    spend most of a short run on skills that are already learned. So each skill is drawn in proportion to a floor plus
    its recent error rate, which the training loop reports.
    """

    def __init__(self, tokenizer: Any, rng: Random, *, skills: Sequence[str], show_control: bool) -> None:
        """With ``show_control`` the system turn holds the skill's control token; without it every prompt is plain."""
        self.error_rates = dict.fromkeys(skills, 1.0)
        self._ids: dict[str, int] = tokenizer.get_vocab()
        self._rng = rng
        self._show_control = show_control
        sample = self._encode(skills[0], "a b")
        skill = skills[0] if show_control else PLAIN
        assert sample.prompt_ids == tokenizer(chat_text(tokenizer, "a b", skill=skill))["input_ids"]

    def report(self, skills: Sequence[str], is_exact: Sequence[bool]) -> None:
        """Update the error rates with one batch (exponential average over about 50 rows of a skill)."""
        for skill, exact in zip(skills, is_exact, strict=True):
            self.error_rates[skill] += 0.02 * ((not exact) - self.error_rates[skill])

    def batches(self, *, batch_tokens: int, max_chars: int, num_examples: int) -> Iterator[TrainingBatch]:
        """Yield `num_examples` in batches of about `batch_tokens` tokens, grouped by length."""
        skills = list(self.error_rates)
        weights = [0.08 + rate for rate in self.error_rates.values()]
        examples = []
        for skill in self._rng.choices(skills, weights, k=num_examples):
            prompt = draw_prompt(self._rng, max_chars=max_chars)
            while is_held_out(prompt):
                prompt = draw_prompt(self._rng, max_chars=max_chars)
            examples.append(self._encode(skill, prompt))
        examples.sort(key=lambda example: len(example.prompt_ids) + len(example.answer_ids))
        groups: list[list[Example]] = [[]]
        for example in examples:
            num_tokens = len(example.prompt_ids) + len(example.answer_ids)
            if (len(groups[-1]) + 1) * num_tokens > batch_tokens:
                groups.append([])
            groups[-1].append(example)
        self._rng.shuffle(groups)
        yield from map(_pad, groups)

    def _encode(self, skill: str, prompt: str) -> Example:
        ids = self._ids
        head = [ids["<|bos|>"]]
        if self._show_control and skill != PLAIN:
            head += [ids["<|system|>"], ids[_CONTROL_TOKENS[skill]], ids["<|end|>"]]
        return Example(
            skill=skill,
            prompt_ids=[*head, ids["<|user|>"], *map(ids.__getitem__, prompt), ids["<|end|>"], ids["<|assistant|>"]],
            answer_ids=[*map(ids.__getitem__, answer_of(skill, prompt)), ids["<|end|>"]],
        )


def _pad(examples: list[Example]) -> TrainingBatch:
    length = max(len(example.prompt_ids) + len(example.answer_ids) for example in examples) - 1
    input_ids = torch.zeros(len(examples), length, dtype=torch.long)
    targets = torch.full((len(examples), length), -100)
    for row, example in enumerate(examples):
        whole = torch.tensor(example.prompt_ids + example.answer_ids)
        first = len(example.prompt_ids) - 1  # the position of <|assistant|>, which predicts the answer's first token
        input_ids[row, : len(whole) - 1] = whole[:-1]
        targets[row, first : len(whole) - 1] = whole[first + 1 :]
    return TrainingBatch(input_ids=input_ids, targets=targets, skills=[example.skill for example in examples])
