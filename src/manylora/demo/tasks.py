"""The twelve string tasks of the demo adapters, and the prompts they share.

A demo of many adapters is only convincing when anyone can see that the *right* adapter answered. So every adapter does
one small, checkable thing to the same prompt ("hello world" -> "HELLO WORLD", "uryyb jbeyq", ...), and `check` says
whether an answer is exactly right. Nothing here needs torch: the serving tests and the command line use this module
without loading a model.

Prompts are one to four short lower-case words with an occasional number. They are drawn from an unbounded family of
made-up words rather than from a list, and one prompt in eight, chosen by its hash, is never trained on: accuracy on
those is accuracy on strings the weights have not seen.
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
    "Task",
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
class Task:
    """One adapter's job, and the shape of the LoRA that learns it.

    Ranks and target modules differ on purpose: a server that pads every adapter to the largest rank, or assumes that
    every adapter touches the same modules, gets some of these wrong or slow.

    Attributes:
        name: The adapter's name, also its folder.
        description: What it does, for people.
        apply: The function the adapter has learned; the only right answer to a prompt.
        rank: LoRA rank `r`.
        target_modules: The projections that carry a LoRA.
        alpha: LoRA `lora_alpha`; the update is scaled by `alpha / rank`, or `alpha / sqrt(rank)` with `use_rslora`.
        use_rslora: Scale by the square root of the rank (Kalajdzievski, 2023).
        rank_pattern: Module-name suffix to rank, where it departs from `rank`.
        alpha_pattern: Module-name suffix to alpha, where it departs from `alpha`.
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


def _as_json(text: str) -> str:
    return json.dumps({"text": text})


def _acronym(text: str) -> str:
    return "".join(f"{word[0].upper()}." for word in text.split())


def _rot13(text: str) -> str:
    return codecs.encode(text, "rot13")


def _call(text: str) -> str:
    return f"{text.replace(' ', '_')}()"


def _hashtag(text: str) -> str:
    return "#" + "".join(word.capitalize() for word in text.split())


def _leet(text: str) -> str:
    return text.translate(str.maketrans("aeiost", "431057"))


def _loud_vowels(text: str) -> str:
    return re.sub("[aeiou]", lambda vowel: vowel[0].upper(), text)


def _title(text: str) -> str:
    return " ".join(word.capitalize() for word in text.split())


def _pig_latin(text: str) -> str:
    return " ".join(f"{word[1:]}{word[0]}ay" for word in text.split())


def _stutter(text: str) -> str:
    return " ".join(f"{word[0]}-{word}" for word in text.split())


def _repeat(text: str) -> str:
    return f"{text}, {text}!"


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="acronym",
            description="the initials, each with a full stop",
            apply=_acronym,
            rank=8,
            target_modules=_ATTENTION,
            alpha=16,
        ),
        Task(
            name="call",
            description="a function call in snake_case",
            apply=_call,
            rank=4,
            target_modules=("q_proj", "v_proj"),
            alpha=8,
        ),
        Task(
            name="hashtag",
            description="one hashtag in CamelCase",
            apply=_hashtag,
            rank=8,
            target_modules=(*_ATTENTION, *_MLP),
            alpha=16,
        ),
        Task(
            name="json",
            description="wrapped as a JSON object",
            apply=_as_json,
            rank=4,
            target_modules=_ATTENTION,
            alpha=8,
        ),
        Task(
            name="leet",
            description="a e i o s t become 4 3 1 0 5 7",
            apply=_leet,
            rank=16,
            target_modules=("q_proj", "k_proj", "v_proj"),
            alpha=16,
            use_rslora=True,
        ),
        Task(
            name="loud_vowels",
            description="the vowels alone in capital letters",
            apply=_loud_vowels,
            rank=16,
            target_modules=(*_ATTENTION, *_MLP),
            alpha=32,
        ),
        Task(
            name="pig_latin",
            description="each word's first letter moved to its end, then 'ay'",
            apply=_pig_latin,
            rank=8,
            target_modules=(*_ATTENTION, "up_proj", "down_proj"),
            alpha=16,
            rank_pattern={"q_proj": 16, "down_proj": 4},
            alpha_pattern={"q_proj": 32, "down_proj": 8},
        ),
        Task(
            name="repeat",
            description="said twice",
            apply=_repeat,
            rank=16,
            target_modules=(*_ATTENTION, *_MLP),
            alpha=32,
        ),
        Task(
            name="rot13",
            description="every letter moved 13 places along the alphabet",
            apply=_rot13,
            rank=32,
            target_modules=("v_proj", "o_proj", *_MLP),
            alpha=16,
            use_rslora=True,
        ),
        Task(
            name="stutter",
            description="each word's first letter said twice",
            apply=_stutter,
            rank=8,
            target_modules=("q_proj", "v_proj", "o_proj"),
            alpha=16,
        ),
        Task(
            name="title",
            description="in title case",
            apply=_title,
            rank=32,
            target_modules=(*_ATTENTION, *_MLP),
            alpha=32,
        ),
        Task(
            name="upper",
            description="in capital letters",
            apply=str.upper,
            rank=2,
            target_modules=("q_proj", "v_proj"),
            alpha=4,
        ),
    )
}


def check(task: Task | str, prompt: str, answer: str) -> bool:
    """Say whether `answer` is exactly what `task` makes of `prompt`.

    Args:
        task: A task or its name.
        prompt: What the user typed.
        answer: What came back, without special tokens.

    Raises:
        KeyError: No task has that name.
    """
    if isinstance(task, str):
        task = TASKS[task]
    return answer == task.apply(prompt)


def draw_prompt(rng: Random, *, max_chars: int = MAX_PROMPT_CHARS) -> str:
    """Make up a prompt of one to four words, at most `max_chars` characters long.

    Args:
        rng: Where chance comes from; the same state gives the same prompt.
        max_chars: Length limit, at least 2.
    """
    num_words = rng.choice((1, 2, 2, 2, 3, 3, 3, 4))
    prompt = _draw_word(rng, numbers=False)[:max_chars]
    for _ in range(num_words - 1):
        longer = f"{prompt} {_draw_word(rng)}"
        if len(longer) <= max_chars:
            prompt = longer
    return prompt


def is_held_out(prompt: str) -> bool:
    """Say whether training must never see `prompt`: one prompt in eight by its hash, and every example prompt."""
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
    """Make up a word of at most 8 characters: mostly pronounceable, at times any letters or (if allowed) a number.

    Letters at random keep a model from learning which letters follow which; numbers keep it from taking every character
    for a letter.
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
