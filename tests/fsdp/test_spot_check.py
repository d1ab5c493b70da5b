"""`SpotCheck`: faults are found in their turn and attributed to the right rank; no false alarm."""

from functools import partial

import mpi_jobs
import numpy as np
import pytest
from needs import needs
from tries import tries

from mlstate import CollectiveError
from mlstate.fsdp import SpotCheck
from mlstate.testing import run_ranks

RANKS = 3
EVERY = 4
ROTATION = EVERY * RANKS
LEAVES = [
    {name: np.random.default_rng(leaf).normal(size=size) for name, size in (("w", 6), ("b", 2))}
    for leaf in range(16)
]


def gradients_of(leaf):
    return {name: gradient.copy() for name, gradient in LEAVES[leaf % len(LEAVES)].items()}


def leaf_of(group, step):
    return step * group.world_size + group.rank


def flip(gradients, name, bit):
    """Flip one bit of a gradient."""
    gradients[name].view(np.uint8)[bit // 8] ^= 1 << bit % 8


def raised_by(call, *arguments):
    """The error of a call: its rank, its name and its text; None if it returns."""
    try:
        call(*arguments)
    except CollectiveError as error:
        return error.rank, error.name, str(error)
    return None


def steps_of_a_rotation(group, check, start, spoil):
    """The first error in the steps of a rotation from `start`, and its step.

    `spoil` changes the gradients that this rank computes in a step.
    """
    for step in range(start, start + ROTATION):
        gradients = gradients_of(leaf_of(group, step))
        spoil(step, gradients)
        error = raised_by(check.compare, step, leaf_of(group, step), gradients)
        if error is not None:
            return *error[:2], step
    return None


def drawn_faults(count):
    """Draw (faulty rank, parameter, bit, first step, step of the fault), alike on every rank."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        name = ["w", "b"][rng.integers(2)]
        bit = int(rng.integers(LEAVES[0][name].nbytes * 8))
        start = int(rng.integers(50))
        yield int(rng.integers(RANKS)), name, bit, start, start + int(rng.integers(ROTATION))


def persistent_faults(group, count):
    """The rank and the parameter of the first error of each fault."""
    errors = []
    for faulty, name, bit, start, _ in drawn_faults(count):

        def spoil(_, gradients, arguments=(group.rank == faulty, name, bit)):
            if arguments[0]:
                flip(gradients, *arguments[1:])

        def recompute(leaf, spoil=spoil):
            gradients = gradients_of(leaf)
            spoil(0, gradients)
            return gradients

        check = SpotCheck(group, recompute, every=EVERY)
        errors.append(steps_of_a_rotation(group, check, start, spoil)[:2])
    return errors


def transient_faults(group, count):
    """The rank, the parameter and the step of the error of each fault, or None."""
    check, errors = SpotCheck(group, gradients_of, every=EVERY), []
    for faulty, name, bit, start, at in drawn_faults(count):

        def spoil(step, gradients, arguments=(group.rank == faulty, at, name, bit)):
            if arguments[0] and step == arguments[1]:
                flip(gradients, *arguments[2:])

        errors.append(steps_of_a_rotation(group, check, start, spoil))
    return errors


def clean_checks(group, count):
    """The number of checks that raised no error."""
    check = SpotCheck(group, gradients_of, every=1)
    return sum(
        check.compare(step, leaf_of(group, step), gradients_of(leaf_of(group, step)))
        for step in range(count)
    )


def outcomes(group, count):
    """The results of all kinds of gradients."""
    return [run(group, count) for run in (persistent_faults, transient_faults, clean_checks)]


def test_persistent_faults_are_found_within_a_rotation_and_attributed():
    count = tries(500)
    expected = [(faulty, name) for faulty, name, *_ in drawn_faults(count)]
    assert run_ranks(RANKS, partial(persistent_faults, count=count)) == [expected] * RANKS


def test_transient_faults_are_found_if_their_leaf_is_checked():
    count = tries(500)
    expected = [
        (faulty, name, at) if at % EVERY == 0 and at // EVERY % RANKS == faulty else None
        for faulty, name, _, _, at in drawn_faults(count)
    ]
    assert run_ranks(RANKS, partial(transient_faults, count=count)) == [expected] * RANKS
    assert any(expected)


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("gloo", marks=[pytest.mark.torch, needs("torch")]),
        pytest.param("mpi", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_are_processes_find_the_same_faults(engine, count, monkeypatch):
    if engine == "mpi":
        mpi_jobs.put_in_path(monkeypatch)
    expected = run_ranks(RANKS, partial(outcomes, count=count))
    assert run_ranks(RANKS, partial(outcomes, count=count), engine) == expected


def test_the_share_of_leaves_that_are_checked_is_the_stated_probability():
    def count(group):
        check = SpotCheck(group, gradients_of, every=EVERY)
        faults = 0
        for at in range(ROTATION):
            for faulty in range(RANKS):
                gradients = gradients_of(leaf_of(group, at))
                if group.rank == faulty:
                    flip(gradients, "w", 7)
                faults += raised_by(check.compare, at, leaf_of(group, at), gradients) is not None
        return faults

    assert run_ranks(RANKS, count) == [ROTATION * RANKS // (EVERY * RANKS)] * RANKS


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_clean_checks_raise_no_alarm(ranks):
    checks = tries(10_000) // 3
    assert run_ranks(ranks, partial(clean_checks, count=checks)) == [checks] * ranks


def test_every_rank_is_recomputed_by_every_other_rank():
    def train(group):
        recomputed = []

        def recompute(leaf):
            recomputed.append(leaf % 4)
            return gradients_of(leaf)

        check = SpotCheck(group, recompute, every=1)
        for step in range(12):
            check.compare(step, leaf_of(group, step), gradients_of(leaf_of(group, step)))
        return sorted(recomputed)

    assert run_ranks(4, train) == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]


def test_a_fault_of_the_recomputation_names_the_rank_that_recomputed():
    def train(group):
        def recompute(leaf):
            gradients = gradients_of(leaf)
            if group.rank == 1:
                flip(gradients, "b", 3)
            return gradients

        check = SpotCheck(group, recompute, every=EVERY)
        return raised_by(check.compare, 0, leaf_of(group, 0), gradients_of(leaf_of(group, 0)))

    for rank, name, text in run_ranks(RANKS, train):
        assert (rank, name) == (1, "b")
        assert text.startswith("SpotCheck at step 0: rank 1 computes wrong values: ")
        assert "leaf 0 of rank 0, and 1 of 2 gradients differ, first 'b' (" in text
        assert "; rank 1: float64 (2,) " in text


def test_with_two_ranks_the_error_has_no_rank():
    def train(group):
        gradients = gradients_of(group.rank)
        if group.rank == 0:
            flip(gradients, "w", 0)
        return raised_by(SpotCheck(group, gradients_of).compare, 0, group.rank, gradients)

    for rank, name, text in run_ranks(2, train):
        assert (rank, name) == (None, "w")
        assert "ranks 0, 1 differ, and a third one that could decide is missing" in text


def test_a_recomputation_that_is_not_deterministic_accuses_no_rank():
    def train(group):
        check = SpotCheck(group, lambda leaf: {"w": LEAVES[group.rank]["w"]})
        return raised_by(check.compare, 0, group.rank, LEAVES[group.rank])

    for rank, name, text in run_ranks(RANKS, train):
        assert (rank, name) == (None, "w") and "is `recompute` deterministic?" in text


CHANGES = {
    "no gradient": lambda gradients: gradients.pop("w"),
    "float32 (6,)": lambda gradients: gradients.update(w=gradients["w"].astype(np.float32)),
    "float64 (2, 3)": lambda gradients: gradients.update(w=gradients["w"].reshape(2, 3)),
}


@pytest.mark.parametrize("text", CHANGES)
def test_missing_gradients_dtypes_and_shapes_are_differences(text):
    def train(group):
        gradients = gradients_of(group.rank)
        CHANGES[text](gradients)
        return raised_by(SpotCheck(group, gradients_of).compare, 0, group.rank, gradients)

    for rank, name, message in run_ranks(RANKS, train):
        assert (rank, name) == (0, "w") and f"rank 0: {text}" in message


def test_none_is_equal_to_a_missing_gradient_and_nan_to_itself():
    def train(group):
        check = SpotCheck(group, lambda leaf: {"w": np.full(3, np.nan)})
        return check.compare(0, group.rank, {"w": np.full(3, np.nan), "unused": None})

    assert run_ranks(2, train) == [True, True]


@pytest.mark.parametrize("difference", ["step", "every"])
def test_ranks_at_different_steps_raise_on_every_rank(difference):
    def train(group):
        is_odd = group.rank == 1
        every = 5 if difference == "every" and is_odd else 10
        step = 20 if difference == "step" and is_odd else 10
        check = SpotCheck(group, gradients_of, every=every)
        error = raised_by(check.compare, step, group.rank, gradients_of(group.rank))
        group.barrier()  # the group can still be used
        return error

    text = {
        "step": "ranks 0, 2: step 10, every=10; rank 1: step 20, every=10",
        "every": "ranks 0, 2: step 10, every=10; rank 1: step 10, every=5",
    }[difference]
    expected = 1, None, f"SpotCheck: ranks are at different steps ({text})"
    assert run_ranks(RANKS, train) == [expected] * RANKS


def fail(_):
    raise KeyError("of the user")


FAILURES = {
    "recompute": (1, fail, KeyError, "KeyError: 'of the user'"),
    "result": (1, lambda leaf: 3, TypeError, "the result of recompute must be a mapping of str"),
    "gradients": (0, gradients_of, TypeError, "gradients must be a mapping of parameter names"),
    "leaf": (2, gradients_of, ValueError, "leaf must be 0 or more, got -1"),
}


@pytest.mark.parametrize("failing", FAILURES)
def test_a_failure_of_one_rank_is_raised_by_all(failing):
    """The rank that fails raises its own error, and the group can still be used."""
    faulty, recompute, kind, text = FAILURES[failing]

    def train(group):
        fails = group.rank == faulty
        check = SpotCheck(group, recompute if fails else gradients_of)
        with pytest.raises(kind if fails else CollectiveError) as raised:
            check.compare(
                0,
                -1 if fails and failing == "leaf" else group.rank,
                7 if fails and failing == "gradients" else gradients_of(group.rank),
            )
        again = SpotCheck(group, gradients_of).compare(0, group.rank, gradients_of(group.rank))
        return getattr(raised.value, "rank", None), str(raised.value), again

    for rank, result in enumerate(run_ranks(RANKS, train)):
        assert result[0] == (None if rank == faulty else faulty)
        assert text.split(": ")[-1] in result[1] and result[2]


def test_other_steps_and_single_ranks_do_not_communicate():
    def train(group):
        if group.rank == 0:
            return SpotCheck(group, fail).compare(3, 0, {})  # the other rank is not called
        return False

    assert run_ranks(2, train) == [False, False]
    assert run_ranks(1, lambda group: SpotCheck(group, fail).compare(0, 0, {})) == [False]


def test_choose_leaf_takes_another_leaf_in_each_rotation():
    check = run_ranks(2, lambda group: SpotCheck(group, gradients_of, every=3))[0]
    chosen = [check.choose_leaf(step, [5, 6, 7]) for step in range(0, 24, 3)]
    assert chosen == [5, 5, 6, 6, 7, 7, 5, 5]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"recompute": 3}, TypeError, "recompute must be callable, got int"),
        ({"every": 0}, ValueError, "every must be 1 or more, got 0"),
        ({"group": 3}, TypeError, "group must have the methods of"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, text):
    def create(group):
        with pytest.raises(error, match=text):
            SpotCheck(**{"group": group, "recompute": gradients_of, **arguments})

    run_ranks(1, create)


@pytest.mark.torch
@needs("torch")
def test_gradients_of_torch_are_compared(torch):
    def train(group):
        def recompute(leaf):
            return {"w": torch.full((3, 2), float(leaf)).bfloat16().T}

        check, errors = SpotCheck(group, recompute, every=1), []
        for step in range(4):
            gradients = recompute(leaf_of(group, step))
            if step == 2 and group.rank == 2:
                gradients["w"][0, 0] += 1
            errors.append(raised_by(check.compare, step, leaf_of(group, step), gradients))
        return [error and error[:2] for error in errors]

    assert run_ranks(RANKS, train) == [[None, None, (2, "w"), None]] * RANKS
