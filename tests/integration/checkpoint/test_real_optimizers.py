"""Optimizers of other libraries, by schedulers of torch, resume as without the interruption.

Each is compared with an uninterrupted run, and with a round trip of torch. If a refusal names
`exclude=`, this applies it. requirements/optimizers.txt lists the libraries;
MLSTATE_REAL_OPTIMIZERS limits the cases to names that contain it.
"""

import importlib.util
import io
import os
import re
from functools import partial

import pytest

import mlstate
from mlstate.checkpoint._states.containers import equal_values

torch = pytest.importorskip("torch", reason="torch is the peer to agree with")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]

PARTS = 6
schedulers = torch.optim.lr_scheduler
SCHEDULERS = {
    "step": lambda o: schedulers.StepLR(o, 1, 0.5),
    "milestones": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "linear": lambda o: schedulers.LinearLR(o, 0.3, total_iters=3),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 6),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (step + 1)),
    "cycle": lambda o: schedulers.CyclicLR(o, 0.001, 0.01, 2, cycle_momentum=False),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.01, 8, cycle_momentum=False),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.StepLR(o, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.5), schedulers.StepLR(o, 1)], [2]
    ),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
}


def optimizers_of_torch():
    """Yield name, function to make it, and function for its groups, None: all parameters."""
    for name, cls in classes_in(torch.optim):
        if name not in ("Optimizer", "SparseAdam", "Muon"):
            yield name, cls, None


def low_rank(module):
    """Groups for optimizers that project the gradients of weights."""
    options = {"rank": 2, "update_proj_gap": 2, "scale": 1.0, "proj_type": "std"}
    weights, others = by_axes(module)
    return [{"params": others}, {"params": weights, **options, "proj": "random"}]


def by_axes(module):
    """Return the weights, and the other parameters."""
    parameters = [*module.parameters()]
    return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]


def muon(module):
    weights, others = by_axes(module)
    return [{"params": weights, "use_muon": True}, {"params": others, "use_muon": False}]


GROUPS = {
    **dict.fromkeys(("muon", "adamuon", "adago", "normuon", "distributedmuon", "muonclip"), muon),
    **dict.fromkeys(("adammini", "lomo", "adalomo"), lambda module: module),
    **dict.fromkeys(("spectralsphere",), lambda module: by_axes(module)[0]),
}
KEYWORDS = {"bsam": {"num_data": 8}, "ranger21": {"num_iterations": 8}}


def optimizers_of_pytorch_optimizer():
    import pytorch_optimizer

    for name in pytorch_optimizer.get_supported_optimizers():
        cls = pytorch_optimizer.load_optimizer(name)
        yield name, partial(cls, **KEYWORDS.get(name, {})), GROUPS.get(name)
    for name in ("Lookahead", "ScheduleFreeWrapper", "TRAC", "OrthoGrad"):
        wrapper = getattr(pytorch_optimizer, name)
        yield name, wrapping(wrapper), None


def wrapping(wrapper, **options):
    """Return a function that makes an optimizer around one of torch."""
    return lambda groups, lr: wrapper(torch.optim.AdamW(groups, lr=lr), **options)


def optimizers_of_schedulefree():
    import schedulefree

    for name in vars(schedulefree):
        if name.startswith("ScheduleFreeWrapper"):
            yield name, wrapping(getattr(schedulefree, name), momentum=0.9), None
        elif name.endswith(("ScheduleFree", "Closure", "Paper", "Reference")):
            yield name, getattr(schedulefree, name), None


def optimizers_of_torchao():
    import torchao.optim

    for name in ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8"):
        yield name, getattr(torchao.optim, name), None


def classes_in(module):
    """Yield name and class of the optimizers in a module."""
    for name, cls in vars(module).items():
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
            yield name, cls


def optimizers_of_bitsandbytes():
    import bitsandbytes.optim

    for name, cls in classes_in(bitsandbytes.optim):
        options = {"momentum": 0.9} if name.startswith(("SGD", "LARS")) else {}
        yield name, partial(cls, **options), None


def optimizers_of_heavyball():
    import heavyball

    heavyball.utils.compile_mode = None
    for name, cls in classes_in(heavyball):
        yield name, cls, None


def optimizers_of_galore_torch():
    import galore_torch

    yield "GaLoreAdamW", galore_torch.GaLoreAdamW, low_rank
    adafactor = partial(galore_torch.GaLoreAdafactor, relative_step=False)
    yield "GaLoreAdafactor", adafactor, low_rank


def optimizers_of_apollo_torch():
    import apollo_torch

    def groups(module):
        others, weights = low_rank(module)
        return [others, {**weights, "scale_type": "channel"}]

    yield "APOLLOAdamW", apollo_torch.APOLLOAdamW, groups


def optimizers_of_optimi():
    import optimi

    for name, cls in classes_in(optimi):
        yield name, cls, None


LIBRARIES = {
    name.removeprefix("optimizers_of_"): make
    for name, make in list(globals().items())
    if name.startswith("optimizers_of_")
}


def cases(part):
    """Yield title, both functions and scheduler of each case of this part."""
    number = 0
    for library, make in LIBRARIES.items():
        if importlib.util.find_spec(library) is None:
            continue
        for name, *case in make():
            scheduler = list(SCHEDULERS)[number % len(SCHEDULERS)]
            number += 1
            title = f"{library} {name}, {scheduler}"
            if number % PARTS == part and os.environ.get("MLSTATE_REAL_OPTIMIZERS", "") in title:
                yield title, *case, SCHEDULERS[scheduler]


class Run:
    """A module, an optimizer and a scheduler."""

    def __init__(self, make, groups, scheduler, seed):
        torch.manual_seed(seed)
        # 4,096 weights: optimizers of 8 bits keep codes of so many
        self.module = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)
        )
        values = self.module.parameters() if groups is None else groups(self.module)
        self.optimizer = make(values, lr=0.01)
        self.scheduler = scheduler(self.optimizer)

    def loss(self, step, create_graph=False):
        numbers = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, 64, generator=numbers)
        targets = torch.randn(8, 4, generator=numbers)
        self.optimizer.zero_grad()
        loss = (self.module(inputs) - targets).square().mean()
        loss.backward(create_graph=create_graph)
        return loss

    def train(self, steps, graph):
        mode = getattr(self.optimizer, "train", None)
        if mode is not None:
            mode()
        for step in steps:
            torch.manual_seed(100 + step)

            def closure(step=step):
                with torch.enable_grad():
                    return self.loss(step, graph)

            self.loss(step, graph)
            self.optimizer.step(closure)
            plateau = isinstance(self.scheduler, schedulers.ReduceLROnPlateau)
            self.scheduler.step(*[1.0] * plateau)
        return [p.detach().clone() for p in self.module.parameters()]


def trained(*case):
    """Return a run of two steps, and whether it needs second derivatives."""
    try:
        run = Run(*case, 0)
        run.train(range(2), False)
    except RuntimeError:
        run = Run(*case, 0)
        run.train(range(2), True)
        return run, True
    return run, False


def resumed_by_torch(source, target):
    """Load the state of a run into another one as torch does; return an exception, or None."""
    try:
        for name in ("module", "optimizer", "scheduler"):
            file = io.BytesIO()
            torch.save(getattr(source, name).state_dict(), file)
            file.seek(0)
            getattr(target, name).load_state_dict(torch.load(file, weights_only=False))
    except Exception as error:
        return error
    return None


def save(folder, run):
    """Save a run; return the patterns that refusals have named."""
    exclude = []
    while True:
        try:
            mlstate.save(
                folder,
                run.module,
                run.optimizer,
                states={"scheduler": run.scheduler},
                exclude=exclude,
            )
        except (TypeError, ValueError) as error:
            pattern = re.search(r"exclude=\['([^']+)'\]", str(error))
            if pattern is None or pattern[1] in exclude:
                raise
            exclude.append(pattern[1])
        else:
            return exclude


def outcome(folder, *case):
    """Return what a case shows, as a word and a detail."""
    try:
        source, graph = trained(*case)
        peer, resumed = (Run(*case, seed) for seed in (1, 2))
    except Exception as error:
        return "not made", f"{type(error).__name__}: {error}"
    exclude = save(folder, source)
    states = {"scheduler": resumed.scheduler}
    into = {"model": resumed.module, "optimizer": resumed.optimizer, "states": states}
    mlstate.load(folder, into=into)
    problem = resumed_by_torch(source, peer)
    states_equal = equal_values(source.optimizer.state_dict(), resumed.optimizer.state_dict())
    expected = source.train(range(2, 4), graph)
    try:
        weights = resumed.train(range(2, 4), graph)
    except KeyError:  # of a value that was left out, and that only the first step makes
        if not exclude:
            raise
        resumed = Run(*case, 2)
        resumed.train(range(1), graph)
        into = {"model": resumed.module, "optimizer": resumed.optimizer}
        mlstate.load(folder, into={**into, "states": {"scheduler": resumed.scheduler}})
        weights = resumed.train(range(2, 4), graph)
    if all(map(torch.equal, expected, weights)):
        return "equal", ""
    if exclude:
        return "excluded", ", ".join(exclude)
    peer_weights = expected if problem is not None else peer.train(range(2, 4), graph)
    if all(map(torch.equal, peer_weights, weights)):
        return "as torch", f"states equal: {states_equal}"
    far = [float((flat(expected) - flat(each)).abs().max()) for each in (weights, peer_weights)]
    return "differs", f"mlstate {far[0]:.1e}, torch {far[1]:.1e} {problem}, states {states_equal}"


def flat(tensors):
    return torch.cat([t.double().flatten() for t in tensors])


@pytest.mark.parametrize("part", range(PARTS))
def test_real_optimizers_resume_as_without_the_interruption(tmp_path, part):
    torch.set_num_threads(1)
    wrong = []
    for number, (title, *case) in enumerate(cases(part)):
        try:
            word, detail = outcome(tmp_path / str(number), *case)
        except Exception as error:
            word, detail = "refused", f"{type(error).__name__}: {error}"
        print(f"{word:9} {title:45} {' '.join(detail.split())[:300]}")
        if word in ("differs", "refused"):
            wrong.append(f"{title}: {word} {detail}")
    assert not wrong, "\n".join(wrong)
