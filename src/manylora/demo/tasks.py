"""The twelve string tasks of the demo adapters, and the prompts they share.

Every adapter makes one checkable change to the same prompt ("hello world" -> "HELLO WORLD", "uryyb jbeyq", ...), so
that a demo shows whether the *right* adapter answered. Nothing here needs torch.

Prompts are one to four short lower-case words with an occasional number. The words are synthetic, drawn from an
unbounded family, and one prompt in eight, chosen by its hash, is held out of training.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

__all__ = [
    "EXAMPLE_PROMPTS",
    "MAX_PROMPT_CHARS",
    "TASKS",
    "DemoTask",
    "check",
    "draw_prompt",
    "held_out_prompts",
    "is_held_out",
]

MAX_PROMPT_CHARS = 20
EXAMPLE_PROMPTS: tuple[str, ...] = ("hello world", "many small adapters", "route 42", "tiny llama")

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
class DemoTask:
    """One adapter's job, and the shape of the LoRA that learns it.

    Ranks and target modules differ on purpose: they test servers that pad every adapter to the largest rank, or that
    assume the same modules in every adapter. The LoRA fields are PEFT's (``rank`` is ``r``).

    Attributes:
        name: The adapter's name, also its folder.
        apply: The function the adapter has learned; the only right answer to a prompt.
    """

    name: str
    description: str
    apply: Callable[[str], str]
    rank: int
    target_modules: tuple[str, ...]
    alpha: int
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, int] = field(default_factory=dict)


TASKS: dict[str, DemoTask] = {
    task.name: task
    for task in (
        DemoTask(
            name="acronym",
            description="the initials, each with a full stop",
            apply=lambda text: "".join(f"{word[0].upper()}." for word in text.split()),
            rank=8,
            target_modules=_ATTENTION,
            alpha=16,
        ),
        DemoTask(
            name="call",
            description="a function call in snake_case",
            apply=lambda text: f"{text.replace(' ', '_')}()",
            rank=4,
            target_modules=("q_proj", "v_proj"),
            alpha=8,
        ),
        DemoTask(
            name="hashtag",
            description="one hashtag in CamelCase",
            apply=lambda text: "#" + "".join(word.capitalize() for word in text.split()),
            rank=8,
            target_modules=(*_ATTENTION, *_MLP),
            alpha=16,
        ),
        DemoTask(
            name="json",
            description="wrapped as a JSON object",
            apply=lambda text: json.dumps({"text": text}),
            rank=4,
            target_modules=_ATTENTION,
            alpha=8,
        ),
        DemoTask(
            name="leet",
            description="a e i o s t become 4 3 1 0 5 7",
            apply=lambda text: text.translate(str.maketrans("aeiost", "431057")),
            rank=16,
            target_modules=("q_proj", "k_proj", "v_proj"),
            alpha=16,
            use_rslora=True,
        ),
        DemoTask(
            name="loud_vowels",
            description="the vowels alone in capital letters",
            apply=lambda text: re.sub("[aeiou]", lambda vowel: vowel[0].upper(), text),
            rank=16,
            target_modules=(*_ATTENTION, *_MLP),
            alpha=32,
        ),
        DemoTask(
            name="pig_latin",
            description="each word's first letter moved to its end, then 'ay'",
            apply=lambda text: " ".join(f"{word[1:]}{word[0]}ay" for word in text.split()),
            rank=8,
            target_modules=(*_ATTENTION, "up_proj", "down_proj"),
            alpha=16,
            rank_pattern={"q_proj": 16, "down_proj": 4},
            alpha_pattern={"q_proj": 32, "down_proj": 8},
        ),
        DemoTask(
            name="repeat",
            description="said twice",
            apply=lambda text: f"{text}, {text}!",
            rank=16,
            target_modules=(*_ATTENTION, *_MLP),
            alpha=32,
        ),
        DemoTask(
            name="rot13",
            description="every letter moved 13 places along the alphabet",
            apply=lambda text: codecs.encode(text, "rot13"),
            rank=32,
            target_modules=("v_proj", "o_proj", *_MLP),
            alpha=16,
            use_rslora=True,
        ),
        DemoTask(
            name="stutter",
            description="each word's first letter said twice",
            apply=lambda text: " ".join(f"{word[0]}-{word}" for word in text.split()),
            rank=8,
            target_modules=("q_proj", "v_proj", "o_proj"),
            alpha=16,
        ),
        DemoTask(
            name="title",
            description="in title case",
            apply=lambda text: " ".join(word.capitalize() for word in text.split()),
            rank=32,
            target_modules=(*_ATTENTION, *_MLP),
            alpha=32,
        ),
        DemoTask(
            name="upper",
            description="in capital letters",
            apply=str.upper,
            rank=2,
            target_modules=("q_proj", "v_proj"),
            alpha=4,
        ),
    )
}


def check(task: DemoTask | str, prompt: str, answer: str) -> bool:
    """Return whether `answer`, without special tokens, is exactly the task's answer to `prompt`.

    Raises:
        KeyError: No task has that name.
    """
    if isinstance(task, str):
        task = TASKS[task]
    return answer == task.apply(prompt)


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
