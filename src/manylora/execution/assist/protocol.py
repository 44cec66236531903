"""The rules of the exchange between a device's stream and one CPU worker: all its decisions, and nothing that happens.

A worker and the stream share three words, in memory that both can read and write. Exchanges are numbered from the
worker's first one on, in steps of two, and a number is used once::

    stream                                  posted   done     worker
    copy x of exchange n to the host
    write ``posted``                         n        n - 2
    ... base product ...                                      sees n, computes, writes the result
    wait until ``done`` reaches n            n        n       swaps ``done`` from n - 2 to n
    copy the result to the device, add it

    last     written by the launching thread: the exchange after which the worker may rest

The stream executes its operations in order, so the result of exchange n has been taken before x of n + 2 is copied, and
one place in memory serves all exchanges. Numbers, unlike flags of 0 and 1, need no reset: a wait cannot take an earlier
exchange's flag for its own. (A captured graph would repeat one number. Steps with assisted rows run eagerly.)

A worker that fails is *held*, then *released*, by writes of ``done``::

    done     n                n + 1                                        n + 1 + RELEASED
             serving          held: the worker's swaps fail, so it         every further wait of the step passes
                              completes nothing more; n can be taken

The result is zeroed between the two, once the stream has posted the exchange that the worker owes. Zeroing and
completing could race otherwise: a worker that was only slow would complete an exchange after its result had been
zeroed, and zeros would be taken for its rows. Or zeroes would take the place of a result that it did complete.

A release leaves the number of completed exchanges in the word. Less than ``last`` means that the rows of this worker
failed. A held worker's memory is never used by another step, so a late write reaches rows that have failed, or none.

Numbers wrap at 2**32 and are compared by their difference. These functions are plain Python: workers compile them, and
the tests explore every interleaving of them.
"""

from __future__ import annotations

__all__ = [
    "FAR",
    "LEAVE",
    "MODULUS",
    "POLL",
    "RELEASED",
    "REST",
    "SERVE",
    "STEP",
    "completed",
    "decide",
    "has_failed",
    "is_held",
    "is_reached",
    "may_release",
]

MODULUS = 1 << 32
STEP = 2
RELEASED = 1 << 30
FAR = 1 << 29  # more than the numbers of a step's exchanges: ``last`` is so far ahead while a step is being launched

POLL, SERVE, REST, LEAVE = range(4)
"""Decisions of a worker: look again, compute the next exchange, wait for another step, end."""


def is_reached(word: int, number: int) -> bool:
    """Return whether ``word`` is at ``number`` or behind it; a stream's wait passes then."""
    return (word - number) % MODULUS < MODULUS // 2


def decide(posted: int, done: int, last: int, number: int) -> int:
    """Return the next action of a worker that has completed the exchanges up to ``number``, from the three words."""
    if done != number:
        return LEAVE  # it is held
    if (posted - number - STEP) % MODULUS < MODULUS // 2:
        return SERVE
    return REST if last == number else POLL


def completed(done: int, last: int) -> int:
    """Return the last exchange that the worker completed itself; ``last`` is it, or at most FAR ahead of it."""
    is_released = (done - last + FAR) % MODULUS >= RELEASED
    return (done - done % STEP - is_released * RELEASED) % MODULUS


def is_held(done: int) -> bool:
    """Return whether the worker is held: its step broke off, and it completes no further exchange."""
    return done % STEP != 0


def may_release(posted: int, done: int, last: int) -> bool:
    """Return whether a held worker's result is to be zeroed, and its waits released."""
    owed = (completed(done, last) + STEP) % MODULUS
    return is_held(done) and not is_reached(done, owed) and is_reached(posted, owed)


def has_failed(done: int, last: int) -> bool:
    """Return whether the worker missed an exchange of the step that ended with ``last``."""
    return completed(done, last) != last
