"""A model of schedules and their costs in plain Python, to compare the C planner with.

Nothing here depends on the planner.  `simulate` follows a list of steps one by one and refuses
invalid ones; `persistent_front` is the recursion of the persistent class over Pareto sets of (peak,
time), exact to the byte; `any_front` searches through every state that valid steps can reach.  All
are deliberately simple and slow.

A chain is any object with the arrays of `Chain`; times that are multiples of 1/64 add up without
rounding, so that two ways to the same optimum can be compared for equality.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from hypothesis import strategies as st

FORWARD, SAVE, BACKWARD, DROP = "forward", "save", "backward", "drop"
OFFLOAD, LOAD = "offload", "load"


@dataclass(frozen=True)
class ChainModel:
    """The numbers of a chain, as tuples; `gradient` is as long as `activation`."""

    forward: tuple
    backward: tuple
    activation: tuple
    saved: tuple
    gradient: tuple = ()
    forward_temporary: tuple = ()
    saving_temporary: tuple = ()
    backward_temporary: tuple = ()
    offload_rate: float | None = None
    load_rate: float | None = None

    def __post_init__(self):
        zeros = (0,) * len(self.forward)
        for name in ("forward_temporary", "saving_temporary", "backward_temporary"):
            object.__setattr__(self, name, getattr(self, name) or zeros)
        object.__setattr__(self, "gradient", self.gradient or self.activation)

    @property
    def blocks(self):
        return len(self.forward)

    def arguments(self):
        """Positional and keyword arguments that make the `Chain` of these numbers."""
        return (self.forward, self.backward, self.activation, self.saved), {
            "gradient_bytes": self.gradient,
            "forward_temporary_bytes": self.forward_temporary,
            "saving_temporary_bytes": self.saving_temporary,
            "backward_temporary_bytes": self.backward_temporary,
            "offload_bytes_per_second": self.offload_rate,
            "load_bytes_per_second": self.load_rate,
        }


class InvalidSchedule(ValueError):
    """A step that is invalid in its state, or missing backwards."""

    def __init__(self, number, text):
        super().__init__(f"step {number}: {text}")
        self.number = number


@dataclass(frozen=True)
class State:
    """The memory in use: activations alone, and saved blocks on the device and on the host."""

    alone: frozenset
    saved: frozenset
    host: frozenset
    next_backward: int

    @classmethod
    def begin(cls, chain):
        return cls(frozenset({0}), frozenset(), frozenset(), chain.blocks - 1)

    def has(self, activation):
        return activation in self.alone or activation - 1 in self.saved

    def bytes(self, chain):
        """Activation 0 counts from start to end; the last gradient counts from its backward on."""
        after = self.next_backward + 1
        return (
            sum(chain.activation[k] for k in self.alone)
            + sum(chain.saved[i] for i in self.saved)
            + (chain.gradient[after] if after < chain.blocks else 0)
        )


def refusal(chain, state, kind, index):
    """Why a step is invalid in a state, or None."""
    blocks = chain.blocks
    if kind not in (FORWARD, SAVE, BACKWARD, DROP, OFFLOAD, LOAD):
        return f"{kind!r} is not a kind of step"
    if not 0 <= index <= (blocks if kind == DROP else blocks - 1):
        return f"{kind} {index}: there is no such number"
    reasons = {
        FORWARD: [
            (index > state.next_backward, f"backward {index} has run already"),
            (not state.has(index), f"activation {index} does not exist"),
            (state.has(index + 1), f"activation {index + 1} already exists"),
        ],
        SAVE: [
            (index > state.next_backward, f"backward {index} has run already"),
            (not state.has(index), f"activation {index} does not exist"),
            (index in state.saved, f"saved {index} already exists"),
            (index in state.host, f"saved {index} is on the host"),
            (state.has(index + 1), f"activation {index + 1} already exists"),
        ],
        BACKWARD: [
            (index != state.next_backward, f"backward {state.next_backward} comes next"),
            (not state.has(index), f"activation {index} does not exist"),
            (index not in state.saved, f"saved {index} does not exist"),
        ],
        DROP: [
            (index == 0, "activation 0 stays"),
            (index not in state.alone, f"activation {index} is not a separate tensor"),
        ],
        OFFLOAD: [
            (chain.offload_rate is None, "the chain has no rate"),
            (index not in state.saved, f"saved {index} does not exist"),
        ],
        LOAD: [
            (chain.load_rate is None, "the chain has no rate"),
            (index not in state.host, f"saved {index} is not on the host"),
            (state.has(index + 1), f"activation {index + 1} already exists"),
        ],
    }
    return next((text for bad, text in reasons[kind] if bad), None)


def run(chain, state, kind, index):
    """The state after a step, the peak during it, and its duration."""
    before = state.bytes(chain)
    alone, saved, host, after = state.alone, state.saved, state.host, state.next_backward
    live = seconds = 0
    if kind == FORWARD:
        alone = alone | {index + 1}
        live = chain.activation[index + 1] + chain.forward_temporary[index]
        seconds = chain.forward[index]
    elif kind == SAVE:
        saved = saved | {index}
        live = chain.saved[index] + chain.saving_temporary[index]
        seconds = chain.forward[index]
    elif kind == BACKWARD:
        saved, after = saved - {index}, index - 1
        live = chain.gradient[index] + chain.backward_temporary[index]
        if index == chain.blocks - 1:
            live += chain.gradient[index + 1]
        seconds = chain.backward[index]
    elif kind == DROP:
        alone = alone - {index}
    elif kind == OFFLOAD:  # the output stays, as an activation alone
        saved, host, alone = saved - {index}, host | {index}, alone | {index + 1}
        seconds = chain.saved[index] / chain.offload_rate
    elif kind == LOAD:
        saved, host = saved | {index}, host - {index}
        live = chain.saved[index]
        seconds = chain.saved[index] / chain.load_rate
    return State(alone, saved, host, after), before + live, seconds


@dataclass
class Simulation:
    """Per step: bytes before, peak, bytes after, seconds; and the two totals."""

    before: list = field(default_factory=list)
    most: list = field(default_factory=list)
    after: list = field(default_factory=list)
    seconds: list = field(default_factory=list)

    @property
    def peak_bytes(self):
        return max(self.most)

    @property
    def total_seconds(self):
        return sum(self.seconds)


def simulate(chain, steps):
    """Follow (kind, index) pairs; InvalidSchedule names the first invalid step."""
    state, result, number = State.begin(chain), Simulation(), -1
    for number, (kind, index) in enumerate(steps):
        why = refusal(chain, state, kind, index)
        if why:
            raise InvalidSchedule(number, why)
        result.before.append(state.bytes(chain))
        state, most, seconds = run(chain, state, kind, index)
        result.most.append(most)
        result.after.append(state.bytes(chain))
        result.seconds.append(seconds)
    if state.next_backward >= 0:
        raise InvalidSchedule(number + 1, f"backward {state.next_backward} is missing")
    return result


def front_of(pairs):
    """The (peak, time) pairs that no other pair dominates, by increasing peak."""
    best = []
    for peak, seconds in sorted(pairs):
        if not best or seconds < best[-1][1]:
            best.append((peak, seconds))
    return best


def fastest(front, budget):
    """The shortest time within a budget; None if nothing fits."""
    return min((seconds for peak, seconds in front if peak <= budget), default=None)


def persistent_front(chain, offload=False):
    """The Pareto front (peak, time) of the persistent class, exact to the byte."""
    last = chain.blocks - 1
    begin = chain.activation[0]
    return [(begin + peak, seconds) for peak, seconds in _segments(chain, offload)(0, last)]


def _segments(chain, offload):
    """Make solve(s, t): peaks in excess of the memory in use as segment s..t begins.

    That memory is activation s and, except at the end of the chain, gradient t + 1.
    """
    blocks = chain.blocks

    def stored_gradient(t):
        return chain.gradient[t + 1] if t < blocks - 1 else 0

    def save(s, t):
        saved = chain.saved[s]
        first = saved + chain.saving_temporary[s]
        if s == t:
            coming = chain.gradient[blocks] if t == blocks - 1 else 0
            ends = saved + coming + chain.gradient[s] + chain.backward_temporary[s]
            yield max(first, ends), chain.forward[s] + chain.backward[s]
            return
        change = chain.gradient[s + 1] - stored_gradient(t)
        ends = saved + change + chain.gradient[s] + chain.backward_temporary[s]
        for peak, seconds in solve(s + 1, t):
            yield max(first, saved + peak, ends), chain.forward[s] + seconds + chain.backward[s]

    def away(s, t):
        if s == t:
            return
        saved, lone = chain.saved[s], chain.activation[s + 1]
        first = saved + chain.saving_temporary[s]
        change = chain.gradient[s + 1] - stored_gradient(t)
        ends = saved + change + max(0, chain.gradient[s] + chain.backward_temporary[s])
        moves = saved / chain.offload_rate + saved / chain.load_rate
        for peak, seconds in solve(s + 1, t):
            total = chain.forward[s] + seconds + chain.backward[s] + moves
            yield max(first, lone + peak, ends), total

    def restart(s, t):
        swept, seconds, above = 0, 0, 0
        for k in range(s + 1, t + 1):
            live = chain.activation[k]
            swept = max(swept, above + live + chain.forward_temporary[k - 1])
            seconds += chain.forward[k - 1]
            above = live
            change = chain.gradient[k] - stored_gradient(t)
            for peak_right, right in solve(k, t):
                for peak_left, left in solve(s, k - 1):
                    yield max(swept, live + peak_right, change + peak_left), seconds + right + left

    @cache
    def solve(s, t):
        ways = [*save(s, t), *restart(s, t)]
        return front_of([*ways, *away(s, t)] if offload else ways)

    return solve


def any_front(chain, offload=False):
    """The Pareto front (peak, time) of all valid schedules.

    States are (alone, saved, host, backwards left) with sets as bits; activation 0 has no bit.
    """
    blocks = chain.blocks
    stored_bytes = cache(
        lambda alone, saved: _bytes_of(chain.activation, alone) + _bytes_of(chain.saved, saved)
    )

    @cache
    def steps(state):
        alone, saved, host, left = state
        now = stored_bytes(alone | 1, saved) + (chain.gradient[left] if left < blocks else 0)
        successor = alone | saved << 1 | 1
        successors = []
        for i in range(blocks):
            bit, out = 1 << i, 2 << i
            if successor & bit and not successor & out:
                live = chain.activation[i + 1] + chain.forward_temporary[i]
                successors.append(((alone | out, saved, host, left), now + live, chain.forward[i]))
            if successor & bit and not successor & out and not host & bit:
                live = chain.saved[i] + chain.saving_temporary[i]
                successors.append(((alone, saved | bit, host, left), now + live, chain.forward[i]))
            if alone & out:
                successors.append(((alone ^ out, saved, host, left), now, 0))
            if offload and saved & bit:
                after = (alone | out, saved ^ bit, host | bit, left)
                successors.append((after, now, chain.saved[i] / chain.offload_rate))
            if offload and host & bit and not successor & out:
                after = (alone, saved | bit, host ^ bit, left)
                successors.append((after, now + chain.saved[i], chain.saved[i] / chain.load_rate))
        i = left - 1
        if successor >> i & 1 and saved >> i & 1:
            live = chain.gradient[i] + chain.backward_temporary[i]
            live += chain.gradient[blocks] if left == blocks else 0
            successors.append(((alone, saved ^ 1 << i, host, i), now + live, chain.backward[i]))
        return successors

    return _dijkstra((0, 0, 0, blocks), steps, lambda state: state[3] == 0)


def _bytes_of(sizes, bits):
    return sum(size for k, size in enumerate(sizes) if bits >> k & 1)


def _dijkstra(begin, steps, is_end):
    """By time, then peak: a state is visited again only at a lower peak."""
    queue = [(0, 0, 0, begin)]
    lowest, reached, count = {}, [], 0
    while queue:
        seconds, peak, _, state = heapq.heappop(queue)
        if peak >= lowest.get(state, float("inf")) or (reached and peak >= reached[-1][0]):
            continue
        lowest[state] = peak
        if is_end(state):
            reached.append((peak, seconds))
            continue
        for after, most, step_seconds in steps(state):
            most = max(most, peak)
            if most < lowest.get(after, float("inf")):
                count += 1
                heapq.heappush(queue, (seconds + step_seconds, most, count, after))
    return front_of(reached)


def budgets_of(*fronts):
    """Budgets at which a plan may change, and one byte below and above them."""
    peaks = {peak for front in fronts for peak, _ in front}
    return sorted({peak + d for peak in peaks for d in (-1, 0, 1)})


def random_chain(rng, blocks, kind="mixed", temporaries=True, rates=False):
    """A chain of `kind` mixed, uniform, pyramid (bytes fall, times rise) or tokens.

    In the last one the first activation is small and has no gradient.
    """

    def bytes_(low, high, size):
        return rng.integers(low, high, size).astype(int)

    def ticks(low, high):
        return tuple((rng.integers(low, high, blocks) / 64).tolist())

    activation = bytes_(1, 100, blocks + 1)
    extra = bytes_(0, 150, blocks)
    forward, backward = ticks(1, 256), ticks(1, 512)
    if kind == "uniform":
        activation[:], extra[:] = activation[0], extra[0]
        forward, backward = forward[:1] * blocks, backward[:1] * blocks
    elif kind == "pyramid":
        activation = np.sort(activation)[::-1].copy()
        extra = np.sort(extra)[::-1].copy()
        forward = tuple(sorted(forward))
    gradient = activation.copy()
    if kind == "tokens":
        activation[0], gradient[0] = 1, 0

    def some():
        return tuple(bytes_(0, 40, blocks).tolist()) if temporaries else ()

    return ChainModel(
        forward,
        backward,
        tuple(activation.tolist()),
        tuple((activation[1:] + extra).tolist()),
        tuple(gradient.tolist()),
        some(),
        some(),
        some(),
        *((float(2 ** rng.integers(4, 9)), float(2 ** rng.integers(4, 9))) if rates else ()),
    )


KINDS = ("mixed", "uniform", "pyramid", "tokens")


def random_chains(seed, count, most_blocks=5, **options):
    """A fixed set of chains of every kind and length, from one block on."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        blocks = 1 + int(rng.integers(most_blocks))
        yield random_chain(rng, blocks, KINDS[number % len(KINDS)], **options)


@st.composite
def chains(draw, most_blocks=5, most_bytes=200, rates=False):
    """A Hypothesis strategy: chains of small numbers, zeros included."""
    blocks = draw(st.integers(1, most_blocks))

    def lists(low, high, size):
        return st.lists(st.integers(low, high), min_size=size, max_size=size)

    def times():
        return tuple(t / 64 for t in draw(lists(0, 640, blocks)))

    activation = draw(lists(0, most_bytes, blocks + 1))
    extra = draw(lists(0, most_bytes, blocks))
    has_input = draw(st.booleans())
    temporaries = [tuple(draw(lists(0, most_bytes // 4, blocks))) for _ in range(3)]
    rate = st.sampled_from([16.0, 64.0, 1024.0])
    return ChainModel(
        times(),
        times(),
        tuple(activation),
        tuple(own_bytes + more for own_bytes, more in zip(activation[1:], extra, strict=True)),
        (activation[0] if has_input else 0, *activation[1:]),
        *temporaries,
        *((draw(rate), draw(rate)) if rates else ()),
    )
