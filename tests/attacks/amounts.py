"""How many points the attacks try, by MLSTATE_FAULTS and MLSTATE_FAULTS_SEED.

MLSTATE_FAULTS is "few" (the default, for the ordinary test run), "slice" or "all" (every point).
"""

import collections
import os
import random

AMOUNT = os.environ.get("MLSTATE_FAULTS", "few")
SEED = int(os.environ.get("MLSTATE_FAULTS_SEED", "20"))
TRIED = collections.Counter()  # points, by attack; printed after the tests


def amount(few, some, every=None):
    """The amount for MLSTATE_FAULTS; None means all."""
    return {"few": few, "slice": some, "all": every}[AMOUNT]


def spread(count, most):
    """Numbers from 1 to `count`, at most `most` of them, including the first and the last."""
    if most is None or count <= most:
        return list(range(1, count + 1))
    if most == 1:
        return [1]
    return sorted({1 + round(i * (count - 1) / (most - 1)) for i in range(most)})


def choose(groups, most, seed):
    """At most `most` of the points in lists, by turns from each list; None: all."""
    chance = random.Random(f"{SEED} {seed}")
    groups = [chance.sample(points, len(points)) for points in groups if points]
    chance.shuffle(groups)
    turns = [points[turn] for turn in range(max(map(len, groups), default=0))
             for points in groups if turn < len(points)]  # fmt: skip
    return turns[:most]
