"""The training side of the demo's tasks: the prompts, which of them are held out, and the LoRA that learns each task.

Prompts are one to four short lower-case words with an occasional number. The words are synthetic, drawn from an
unbounded family, and one prompt in eight, chosen by its hash, is held out of training. Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

from manylora.demo import EXAMPLE_PROMPTS

MAX_PROMPT_CHARS = 20

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
# fmt: off
_ONSETS = (
    *"bcdfghjklmnprstvwyz",
    "bl", "br", "ch", "cl", "cr", "dr", "fl", "gr", "pl", "pr", "qu", "sh", "sl", "sm", "st", "th", "tr", "wh",
)
_VOWELS = (*"aeiouaeio", "ai", "ea", "ee", "oo", "ou")
_CODAS = (
    "", "", "", *"dgklmnprstx",
    "ck", "ll", "mp", "nd", "ng", "nt", "pt", "rd", "rs", "st", "tt",
)
# fmt: on
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_HELD_OUT_ONE_IN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """The LoRA of one task, in PEFT's terms (``rank`` is ``r``).

    Ranks and target modules differ on purpose: they test servers that pad every adapter to the largest rank, or that
    assume the same modules in every adapter.
    """

    rank: int
    target_modules: tuple[str, ...]
    alpha: int
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, int] = field(default_factory=dict)


SHAPES: dict[str, LoraShape] = {
    "acronym": LoraShape(rank=8, target_modules=_ATTENTION, alpha=16),
    "call": LoraShape(rank=4, target_modules=("q_proj", "v_proj"), alpha=8),
    "hashtag": LoraShape(rank=8, target_modules=(*_ATTENTION, *_MLP), alpha=16),
    "json": LoraShape(rank=4, target_modules=_ATTENTION, alpha=8),
    "leet": LoraShape(rank=16, target_modules=("q_proj", "k_proj", "v_proj"), alpha=16, use_rslora=True),
    "loud_vowels": LoraShape(rank=16, target_modules=(*_ATTENTION, *_MLP), alpha=32),
    "pig_latin": LoraShape(
        rank=8,
        target_modules=(*_ATTENTION, "up_proj", "down_proj"),
        alpha=16,
        rank_pattern={"q_proj": 16, "down_proj": 4},
        alpha_pattern={"q_proj": 32, "down_proj": 8},
    ),
    "repeat": LoraShape(rank=16, target_modules=(*_ATTENTION, *_MLP), alpha=32),
    "rot13": LoraShape(rank=32, target_modules=("v_proj", "o_proj", *_MLP), alpha=16, use_rslora=True),
    "stutter": LoraShape(rank=8, target_modules=("q_proj", "v_proj", "o_proj"), alpha=16),
    "title": LoraShape(rank=32, target_modules=(*_ATTENTION, *_MLP), alpha=32),
    "upper": LoraShape(rank=2, target_modules=("q_proj", "v_proj"), alpha=4),
}
"""By task."""


def draw_prompt(rng: Random, *, max_chars: int = MAX_PROMPT_CHARS) -> str:
    """Draw a synthetic prompt of one to four words, at most `max_chars` characters long (at least 2)."""
    num_words = rng.choice((1, 2, 2, 2, 3, 3, 3, 4))
    prompt = _draw_word(rng, numbers=False)[:max_chars]
    for _ in range(num_words - 1):
        longer = f"{prompt} {_draw_word(rng)}"
        if len(longer) <= max_chars:
            prompt = longer
    return prompt


def is_held_out(prompt: str) -> bool:
    """Return whether `prompt` is held out of training: one in eight by its hash, and every example prompt."""
    return prompt in EXAMPLE_PROMPTS or sha256(prompt.encode()).digest()[0] % _HELD_OUT_ONE_IN == 0


def held_out_prompts(rng: Random, num_prompts: int) -> list[str]:
    """Draw distinct prompts that no adapter was trained on, in the order drawn."""
    prompts: dict[str, None] = {}
    while len(prompts) < num_prompts:
        prompt = draw_prompt(rng)
        if is_held_out(prompt):
            prompts[prompt] = None
    return list(prompts)


def _draw_word(rng: Random, *, numbers: bool = True) -> str:
    """Draw a synthetic word of at most 8 characters: pronounceable, random letters or (if allowed) a number.

    Random letters keep a model from learning letter pairs; numbers keep it from expecting letters alone.
    """
    kind = rng.random()
    if numbers and kind < 0.08:
        return str(rng.randrange(1, 1000))
    if kind < 0.33:
        return "".join(rng.choices(_LETTERS, k=rng.randint(2, 8)))
    word = rng.choice(_ONSETS) if rng.random() < 0.85 else ""
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        word += rng.choice(_VOWELS) + rng.choice(_CODAS) + (rng.choice(_ONSETS) if rng.random() < 0.3 else "")
    return word[:8] if len(word) > 1 else word + rng.choice(_LETTERS)
