"""Leak cases of deltas, publishers and followers."""

import numpy as np
from leak_cases import case, each, methods, raises

from mlstate import errors
from mlstate.checkpoint import Layout
from mlstate.follow import Follower, Publisher, _delta


@case()
def deltas(_):
    base = np.arange(60, dtype=np.float32).reshape(6, 10)
    new, target = base.copy(), base.copy()
    new[::2, 3] = -1
    delta = _delta.compare_arrays(base, new)
    damaged = _delta.Delta(60, delta.gaps[:-1], delta.values)
    rows, columns = (Layout.rows(1), 0), (Layout.axis(1, 2), 0)
    log = []

    def apply_and_roll_back():
        _delta.apply_delta(target, delta, log)
        _delta.roll_back(log)

    return each(
        lambda: _delta.compare_arrays(base, new),
        lambda: _delta.compare_arrays(base.T, new.T, checksum=False),
        apply_and_roll_back,
        lambda: _delta.compose_deltas(delta, delta),
        lambda: _delta.filter_delta(delta, (6, 10), rows, columns),
        raises(errors.FormatError, _delta.apply_delta, target, damaged, log),
        raises(errors.CompatibilityError, _delta.apply_delta, target[1:], delta, log),
        raises(errors.CompatibilityError, _delta.compare_arrays, base, new.T),
        raises(errors.CompatibilityError, _delta.filter_delta, delta, (5, 10), rows, columns),
    ), [base, new, target, delta, log]


@case(*methods(Publisher), *methods(Follower), "Publisher", "Follower", calls=12)
def versions(folder):
    model, step = {"w": np.zeros((40, 50), np.float32)}, [0]
    publisher = Publisher(folder / "weights", anchor_every=2)
    other = Publisher(folder / "weights")
    into, rows = {"w": np.zeros((40, 50), np.float32)}, {"w": np.zeros((20, 50), np.float32)}
    followers = (
        Follower(publisher.path, into=into),
        Follower(publisher.path, into=rows, layout="rows", rank=1, world_size=2),
        Follower(publisher.path, into=into, double_buffer=True),
    )
    publisher.publish(0, model)

    def publish():
        for _ in range(4):
            step[0] += 1
            model["w"][step[0] % 40, 7] += 1
            publisher.publish(step[0], model)
            for follower in followers:
                assert follower.poll() == follower.advance() == follower.version
                follower.verify()
                assert follower.state.keys() == model.keys()

    def new_objects():
        Publisher(folder / "other", base="disk", keep=2).publish(1, model)
        assert Follower(folder / "other", into=into).path.endswith("other")

    return each(
        publish,
        new_objects,
        raises(FileNotFoundError, followers[0].advance, 1 << 40),
        raises(TypeError, other.publish, 1, {"w": 3}),
    ), [publisher, other, followers, model, into, rows]
