"""The twelve string tasks of the demo adapters.

Every adapter makes one checkable change to the same prompt ("hello world" -> "HELLO WORLD", "uryyb jbeyq", ...), so
that a demo shows whether the *right* adapter answered. Nothing here needs torch.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["EXAMPLE_PROMPTS", "TASKS", "DemoTask", "check"]

EXAMPLE_PROMPTS: tuple[str, ...] = ("hello world", "many small adapters", "route 42", "tiny llama")


@dataclass(frozen=True, slots=True)
class DemoTask:
    """One adapter's job.

    Args:
        name: The adapter's name, also its folder.
        description: The answer, in words.
        apply: The function the adapter has learned; the only right answer to a prompt.
    """

    name: str
    description: str
    apply: Callable[[str], str]


TASKS: dict[str, DemoTask] = {
    task.name: task
    for task in (
        DemoTask(
            "acronym",
            "the initials, each with a full stop",
            lambda text: "".join(f"{word[0].upper()}." for word in text.split()),
        ),
        DemoTask("call", "a function call in snake_case", lambda text: f"{text.replace(' ', '_')}()"),
        DemoTask(
            "hashtag",
            "one hashtag in CamelCase",
            lambda text: "#" + "".join(word.capitalize() for word in text.split()),
        ),
        DemoTask("json", "wrapped as a JSON object", lambda text: json.dumps({"text": text})),
        DemoTask(
            "leet", "a e i o s t become 4 3 1 0 5 7", lambda text: text.translate(str.maketrans("aeiost", "431057"))
        ),
        DemoTask(
            "loud_vowels",
            "the vowels alone in capital letters",
            lambda text: re.sub("[aeiou]", lambda vowel: vowel[0].upper(), text),
        ),
        DemoTask(
            "pig_latin",
            "each word's first letter moved to its end, then 'ay'",
            lambda text: " ".join(f"{word[1:]}{word[0]}ay" for word in text.split()),
        ),
        DemoTask("repeat", "said twice", lambda text: f"{text}, {text}!"),
        DemoTask("rot13", "every letter moved 13 places along the alphabet", lambda text: codecs.encode(text, "rot13")),
        DemoTask(
            "stutter",
            "each word's first letter said twice",
            lambda text: " ".join(f"{word[0]}-{word}" for word in text.split()),
        ),
        DemoTask("title", "in title case", lambda text: " ".join(word.capitalize() for word in text.split())),
        DemoTask("upper", "in capital letters", str.upper),
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
