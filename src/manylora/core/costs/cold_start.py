"""When a cold request should start: predicted times to first token, and the delay that each mode adds to others.

A request is *cold* if its adapter is not on the device. With ``T`` the device time of its prompt, ``beat`` a step of
the others, and all predictions counted from now:

::

    wait      | read ....... | copy ....... |                   T |     begins with the step after the copy
    assist    | read ....... |          T + delay of assisting    |     begins with the step after the read
    layers    | read ....... |                                          the copy follows the read, layer by layer
                 | copy ....... |
                          |   T   + stall |                             begins when the stall pays

* *Assisting* computes the adapter's product of a layer on the CPU while the device computes the layer: each of ``G``
  layers takes ``max(0, t_cpu - t_gpu)`` longer, and two handoffs. The gain over waiting is
  ``W - sum over G layers of max(0, t_cpu - t_gpu) - 2 G handoff``. ``G`` counts the layers that have not arrived when a
  step comes to them: the device takes over the others within the step (``take_over``).
* *Layers* stall a step by ``S = max over layers of (arrival - compute)``. Until ``S`` is over, the request may as well
  wait without a step: it starts no later for it, and others lose nothing. So it begins ``S`` from now if nothing else
  runs. Beside others it can begin only between steps. Beginning at the last step before ``S`` is over saves it ``beat -
  stall`` over beginning at the next one, and costs each of the others ``stall``.

A device that replays its steps as captured graphs launches the steps of both modes one kernel after another, unless all
weights have arrived by then. What that adds to a step is learnt by mode, and all sequences of the step pay it.

A mode is worth its delay if the gain over waiting, times the requests that gain, exceeds the delay times the sequences
that pay (break-even). All functions are pure; times are in seconds.

Source: CaraServe (Toppings, ATC '25), section 4, for assisting; the break-even against the rest of the batch is ours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from manylora.core.costs.arriving import count_on_cpu
from manylora.core.types import ColdStart

__all__ = ["AssistCosts", "ColdRequest", "Corrections", "Expected", "Route", "choose", "expect"]

BESIDE_ROW_RANK_S = 34e-6 / 64
"""Seconds per token, unit of rank and layer on the CPU beside a device, before any measurement: q, k and v of a 7B
model at rank 64 on one AVX-512 core."""

BESIDE_HANDOFF_S = 10e-6
"""Seconds per handoff between device and CPU before any measurement: twice a ping-pong between two threads."""

MOST_HANDOFF_S = 100e-6  # longest handoff that is believed; more is the CPU's own work
MOST_STALL = 0.5  # longest stall of others, in steps, whatever is gained
LEAST_CHUNK = 16  # fewest tokens of a chunk that is cut for the sake of others: fewer are not worth a step
LEARN = 0.2  # weight of an observation against all earlier observations

LEAST_SHARE = 0.25
"""Share of the layers that the CPU must have computed in a step for it to teach: a millisecond of noise in a step of 32
layers counts as 31 us for each at a share of 1, and would as 3 ms at a hundredth."""

FORGET = 0.02
"""Part of a correction that is forgotten with each observation of another mode, so that a mode is tried again."""

FORGET_LAUNCHES = 0.002  # the same of a mode's launches, which are the machine's and hardly change

MOST_CORRECTION = 8.0  # bound of a correction, and of one observation, as a factor in both directions
MOST_LAUNCH = 8.0  # bound of the launches of one observation, in steps: a kernel may have been compiled in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The hops of one adapter to the device; negative beginnings are in the past."""

    read_begins_s: float  # begin of its read from disk, behind the loads ahead of it
    read_s: float  # duration of the read; 0 if the image is in host memory
    copy_begins_s: float  # begin of its copy as far as the link is concerned
    copy_s: float  # duration of the copy
    is_chained: bool = False  # whether the copy in flight follows the read layer by layer
    is_whole: bool = False  # whether the read yields no layer before its end

    @property
    def host_s(self) -> float:
        """Time until the image in host memory is complete."""
        return max(0.0, self.read_begins_s + self.read_s) if self.read_s else 0.0

    def device_s(self, num_layers: int) -> float:
        """Return the time until all weights are on the device, if nothing more is chained."""
        if self.is_chained:
            return self.last_layer_s(num_layers)
        begins_s = max(self.host_s, self.copy_begins_s) if self.read_s else self.copy_begins_s
        return max(0.0, begins_s + self.copy_s)

    def first_layer_s(self, num_layers: int) -> float:
        """Return the time until the first layer is on the device, if the copy follows the read layer by layer."""
        return self._first_is_read_s(num_layers) + self.copy_s / num_layers

    def last_layer_s(self, num_layers: int) -> float:
        """Return the time until the last layer has arrived, with a copy that follows the read."""
        copied_s = self._first_is_read_s(num_layers) + self.copy_s
        if not self.read_s:
            return max(0.0, copied_s)
        return max(0.0, copied_s, self.read_begins_s + self.read_s + self.copy_s / num_layers)

    def _first_is_read_s(self, num_layers: int) -> float:
        if not self.read_s:
            return self.copy_begins_s
        read_s = self.read_s if self.is_whole else self.read_s / num_layers
        return max(self.copy_begins_s, self.read_begins_s + read_s)

    def stall_s(self, step_s: float, num_layers: int) -> float:
        """Return the time that a step of ``step_s`` would wait for layers, if it began now.

        Arrivals and computation are lines over the layers, so the wait is longest for the first or the last.
        """
        computed_s = step_s * (num_layers - 1) / num_layers
        return max(0.0, self.first_layer_s(num_layers), self.last_layer_s(num_layers) - computed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdRequest:
    """A cold request, and the batch that it would join."""

    route: Route  # hops of its adapter
    num_layers: int  # layers of the base
    step_s: float  # duration of its first step, with all weights on the device
    prompt_s: float  # duration of all steps of its prompt, each as long as the first
    beat_s: float  # duration of a step of the other sequences
    num_others: int  # sequences that run
    num_sharing: int  # requests that wait for this adapter, this one included; all of them gain
    row_rank: int  # sum of ranks over the tokens that its first step computes from host memory
    rank: int  # its adapter's rank
    num_tokens: int  # tokens of its prompt
    chunk_tokens: int  # tokens of its prompt in its first step
    token_s: float  # duration that a token more adds to a step


class Expected(NamedTuple):
    """The prediction for one mode."""

    first_token_s: float  # time to the first token
    others_s: float  # delay of the others, summed over them
    begins_s: float  # time until the request's first step
    # Most tokens of its prompt in a step while it is assisted, ``None`` for no limit of its own.
    chunk_tokens: int | None = None


class AssistCosts:
    """The delay of steps with rows that are computed from host memory, learnt from such steps.

    If the CPU is not ``is_beside`` a device, the base runs on the same cores and the same kernels, which read the image
    in place of pages: that costs nothing, and nothing is learnt.
    """

    def __init__(self, *, is_beside: bool) -> None:
        self.is_beside = is_beside
        self._row_rank_s = BESIDE_ROW_RANK_S
        self._handoff_s = BESIDE_HANDOFF_S

    def delay_s(self, row_rank: int, step_s: float, num_layers: int) -> float:
        """Return the delay of a step of ``step_s`` by assisted rows, with the sum of their ranks over tokens."""
        if not self.is_beside:
            return 0.0
        exposed_s = max(0.0, self._row_rank_s * row_rank - step_s / num_layers)
        return num_layers * (exposed_s + 2 * self._handoff_s)

    def hidden_tokens(self, question: ColdRequest) -> float:
        """Return the most tokens of a request in a step beside which the device hides the CPU's part."""
        num_layers, num_tokens = question.num_layers, question.chunk_tokens
        layer_s = (question.step_s - num_tokens * question.token_s) / num_layers
        others_s = self._row_rank_s * (question.row_rank - num_tokens * question.rank)
        exposed_s = self._row_rank_s * question.rank - question.token_s / num_layers
        return max(0.0, layer_s - others_s) / exposed_s if exposed_s > 0.0 else math.inf

    def observe(self, row_rank: int, step_s: float, num_layers: int, took_s: float, cpu_share: float = 1.0) -> None:
        """Learn that such a step took ``took_s``, and ``step_s`` without the rows.

        ``cpu_share`` is the share of the layers in which the CPU computed them, and not the device. The noise of the
        whole step is divided by it, so it is also the weight of the observation, and a small share teaches nothing.

        A step that should have hidden the CPU's part teaches the handoff. Any other teaches the rate; so does a delay
        that no handoff explains.
        """
        if cpu_share < LEAST_SHARE:
            return
        layer_s, excess_s = step_s / num_layers, (took_s - step_s) / (num_layers * cpu_share)
        handoff_s, learn = self._handoff_s, LEARN * cpu_share
        if is_hidden := self._row_rank_s * row_rank <= layer_s:
            # Noise counts in both directions, and only the estimate is bounded by zero: else noise would raise it.
            handoff_s = min(max(-MOST_HANDOFF_S, excess_s / 2), MOST_HANDOFF_S)
            self._handoff_s = max(0.0, self._handoff_s + learn * (handoff_s - self._handoff_s))
        excess_s -= 2 * handoff_s
        if not is_hidden or excess_s > 0.0:
            rate_s = max(0.0, layer_s + excess_s) / row_rank
            self._row_rank_s += learn * (rate_s - self._row_rank_s)

    def forget(self) -> None:
        """Let the learnt rate fade towards the initial estimate, after a request that was not assisted.

        An estimate that is too high would never be corrected: assistance would not be chosen, hence not observed.
        """
        self._row_rank_s += FORGET * (BESIDE_ROW_RANK_S - self._row_rank_s)


class Corrections:
    """A factor for each mode of a cold start, which corrects predicted delays by the delays of earlier requests.

    The delay is the time to first token less the time that the request would take with its adapter on the device.
    With actual delays of ``r`` times the predicted delays, ``n`` observations give
    ``log factor = log r * (1 - (1 - LEARN * w) ** n)``. ``w`` is the delay's share of the predicted time to first
    token: a prediction of little delay teaches little.
    """

    def __init__(self) -> None:
        self._logs = dict.fromkeys(ColdStart, 0.0)
        self._launch_s = dict.fromkeys(ColdStart, 0.0)

    def launch_s(self, mode: ColdStart) -> float:
        """Return the time by which launches one by one make a step of a mode longer."""
        return self._launch_s[mode]

    def observe_launches(self, mode: ColdStart, launch_s: float, step_s: float) -> None:
        """Learn the time of the launches of a step in a mode, 0 if it was replayed, and of the step as replayed."""
        longer_s = min(max(0.0, launch_s - step_s), MOST_LAUNCH * step_s)
        self._launch_s[mode] += LEARN * (longer_s - self._launch_s[mode])

    def factor(self, mode: ColdStart) -> float:
        """Return the factor on a mode's predicted delay."""
        return math.exp(self._logs[mode])

    def observe(self, mode: ColdStart, *, resident_s: float, delay_s: float, actual_s: float) -> None:
        """Learn the actual time to first token of a request in a mode.

        The prediction was ``resident_s`` for an adapter on the device, and a delay over that of ``delay_s`` without a
        correction.
        """
        for other in self._logs:
            if other is not mode:
                self._logs[other] *= 1.0 - FORGET
                self._launch_s[other] *= 1.0 - FORGET_LAUNCHES
        if delay_s <= 0.0:
            return
        ratio = min(max((actual_s - resident_s) / delay_s, 1.0 / MOST_CORRECTION), MOST_CORRECTION)
        share = delay_s / (resident_s + delay_s)
        self._logs[mode] += LEARN * share * (math.log(ratio) - self._logs[mode])


def expect(
    question: ColdRequest, assist: AssistCosts, corrections: Corrections, *, is_forced: bool = False
) -> dict[ColdStart, Expected]:
    """Return the predictions for all modes.

    With ``is_forced`` the mode is given: layers then begin at once, however long they stall.
    """
    plain = {
        ColdStart.WAIT: _wait(question),
        ColdStart.ASSIST: _assist(question, assist, corrections.launch_s(ColdStart.ASSIST)),
        ColdStart.LAYERS: _layers(question, corrections.launch_s(ColdStart.LAYERS), is_forced=is_forced),
    }
    found = {mode: _corrected(one, question.prompt_s, corrections.factor(mode)) for mode, one in plain.items()}
    if not assist.is_beside:
        # In place, assisting needs only the read, and waiting needs it too: no correction can make waiting the better.
        least_s = found[ColdStart.ASSIST].first_token_s
        waiting = found[ColdStart.WAIT]
        found[ColdStart.WAIT] = waiting._replace(first_token_s=max(waiting.first_token_s, least_s))
    return found


def choose(expected: Mapping[ColdStart, Expected], allowed: Collection[ColdStart], num_sharing: int) -> ColdStart:
    """Return the allowed mode with the earliest first token, of those that are worth their delay to others.

    Waiting delays no other sequence and is always allowed. Ties go to the mode that delays others less.
    """
    waiting = expected[ColdStart.WAIT]

    def is_worth(mode: ColdStart) -> bool:
        one = expected[mode]
        return not one.others_s or (waiting.first_token_s - one.first_token_s) * num_sharing > one.others_s

    modes = [mode for mode in (ColdStart.ASSIST, ColdStart.LAYERS) if mode in allowed and is_worth(mode)]
    return min([*modes, ColdStart.WAIT], key=lambda mode: (expected[mode].first_token_s, expected[mode].others_s))


def _corrected(one: Expected, resident_s: float, factor: float) -> Expected:
    delay_s = one.first_token_s - resident_s
    return one._replace(first_token_s=resident_s + factor * delay_s, begins_s=factor * one.begins_s)


def _wait(question: ColdRequest) -> Expected:
    begins_s = _next_step_s(question.route.device_s(question.num_layers), question)
    return Expected(begins_s + question.prompt_s, 0.0, begins_s)


def _assist(question: ColdRequest, assist: AssistCosts, launch_s: float) -> Expected:
    """Return the prediction for whole chunks, or for such that delay the others less, whichever is worth more."""
    whole = _assist_chunks(question, assist, launch_s, question.chunk_tokens)
    num_hidden = assist.hidden_tokens(question)
    if not whole.others_s or not LEAST_CHUNK <= num_hidden < question.chunk_tokens:
        return whole
    cut = _assist_chunks(question, assist, launch_s, int(num_hidden))
    later_s = cut.first_token_s - whole.first_token_s
    if later_s * question.num_sharing > whole.others_s - cut.others_s:
        return whole
    return cut._replace(chunk_tokens=int(num_hidden))


def _assist_chunks(question: ColdRequest, assist: AssistCosts, launch_s: float, chunk_tokens: int) -> Expected:
    """Return the prediction for a prompt in chunks of so many tokens, until its adapter is on the device."""
    num_layers, num_fewer = question.num_layers, question.chunk_tokens - chunk_tokens
    begins_s = _next_step_s(question.route.host_s, question)
    copied_s, copy_layer_s = question.route.device_s(num_layers), question.route.copy_s / num_layers
    step_s = question.step_s - num_fewer * question.token_s
    row_rank = question.row_rank - num_fewer * question.rank
    layer_delay_s = assist.delay_s(row_rank, step_s, num_layers) / num_layers
    at_s, delay_s, num_left = begins_s, 0.0, question.num_tokens
    while num_left > 0:
        num_on_cpu = count_on_cpu(at_s, step_s / num_layers, layer_delay_s, copied_s, copy_layer_s, num_layers)
        # A step that begins without its adapter is launched one kernel after another, even if each layer comes in time.
        # So is the first: a copy that was to end before it would have ended by now.
        is_launched = launch_s > 0.0 and (at_s < copied_s or num_left == question.num_tokens)
        if not num_on_cpu and not is_launched:
            break
        delay_s += launch_s + num_on_cpu * layer_delay_s
        at_s += step_s + launch_s + num_on_cpu * layer_delay_s
        num_left -= chunk_tokens
    first_token_s = at_s + question.step_s * math.ceil(max(0, num_left) / question.chunk_tokens)
    decode_delay_s = launch_s + assist.delay_s(question.rank, question.beat_s, num_layers)
    num_decodes = math.ceil(max(0.0, copied_s - first_token_s) / max(1e-9, question.beat_s + decode_delay_s))
    return Expected(first_token_s, question.num_others * (delay_s + num_decodes * decode_delay_s), begins_s)


def _layers(question: ColdRequest, launch_s: float, *, is_forced: bool) -> Expected:
    stall_s, beat_s = question.route.stall_s(question.step_s, question.num_layers), question.beat_s
    if is_forced or not stall_s:
        begins_s = 0.0
    elif not question.num_others:
        begins_s = stall_s
    else:
        gaining = question.num_sharing
        most_s = beat_s * min(MOST_STALL, gaining / (gaining + question.num_others))
        begins_s = beat_s * max(0, math.ceil((stall_s - most_s) / max(1e-9, beat_s)))
    stall_s = launch_s + max(0.0, stall_s - begins_s)
    return Expected(begins_s + stall_s + question.prompt_s, question.num_others * stall_s, begins_s)


def _next_step_s(ready_s: float, question: ColdRequest) -> float:
    """Return the time of the first step that begins when weights are there: at once, or between two steps of others."""
    if not question.num_others or ready_s <= 0.0:
        return max(0.0, ready_s)
    return question.beat_s * math.ceil(ready_s / max(1e-9, question.beat_s))
