"""Long answers that wait for their clients have a bound, and the slowest readers of the largest client give way."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from manylora.serving.http.room import READ_WITHIN_S, SHORT_BODY_BYTES, WaitingAnswers

MIB = 1 << 20


@dataclass
class World:
    """Answers of callers: the first letter of a name is the caller."""

    now_s: float = 0.0
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting = WaitingAnswers(10 * MIB, lambda: self.now_s)
        self.sending: dict[str, contextlib.ExitStack] = {}

    def send(self, name: str, num_bytes: int) -> None:
        stack = self.sending[name] = contextlib.ExitStack()
        stack.enter_context(self.waiting.hold(lambda: name[0], num_bytes, lambda: self.left.append(name)))

    def end(self, *names: str) -> None:
        for name in names:
            self.sending.pop(name).close()


def test_beyond_the_bound_the_longest_wait_of_the_largest_caller_ends() -> None:
    world = World()
    world.send("b1", 3 * MIB)
    world.send("a1", 4 * MIB)
    world.send("a2", 3 * MIB)
    world.now_s = READ_WITHIN_S
    world.send("c1", MIB)
    assert world.left == ["a1"]
    world.end("a1")
    assert world.waiting.num_bytes == 7 * MIB
    world.send("b2", 3 * MIB)
    assert world.left == ["a1"]
    world.end("b1", "a2", "c1", "b2")
    assert world.waiting.num_bytes == 0


def test_every_client_has_time() -> None:
    world = World()
    for index in range(5):
        world.send(f"a{index}", 4 * MIB)
    assert not world.left
    world.now_s = READ_WITHIN_S
    world.send("a5", 4 * MIB)
    assert world.left == ["a0", "a1", "a2", "a3"]


def test_short_answers_do_not_count() -> None:
    world = World()
    world.send("a", SHORT_BODY_BYTES)
    assert world.waiting.num_bytes == 0
    world.end("a")
