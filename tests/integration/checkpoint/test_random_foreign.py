"""Random files and folders: a load restores what torch restores, or names the missing part.

Each seed writes a checkpoint of random parts in a random layout and loads random targets from it.
torch loads the same into other targets.
"""

import copy
import random
import re
import warnings

import pytest
from test_foreign_files import is_same

torch = pytest.importorskip("torch", reason="it writes the files")
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_optimizer_state_dict,
)

import mlstate  # noqa: E402
from mlstate.errors import MLStateError  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
FORMS = ("pt", "legacy", "dcp", "titan", "accelerate", "ranks")
STATES = ("ema", "scheduler", "counter", "generator")


class Tied(torch.nn.Module):
    """A model whose head may share the weight of its embedding."""

    def __init__(self, is_tied):
        super().__init__()
        self.embed = torch.nn.Embedding(3, 2)
        self.block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        self.head = torch.nn.Linear(2, 3, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, rows):
        return self.head(self.block(self.embed(rows)))


class Run:
    """A model, its optimizer and other objects, after some steps."""

    def __init__(self, is_tied, seed, steps):
        torch.manual_seed(seed)
        self.model = Tied(is_tied)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 + seed)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2 + seed)
        self.ema = Tied(is_tied)
        self.counter = {"rows": [seed, (steps, None)], "sum": torch.ones(2) * seed}
        self.generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.arange(3)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    def state(self, name):
        value = getattr(self, name)
        if name == "generator":
            return value.get_state()
        return value if name == "counter" else value.state_dict()

    def snapshot(self):
        """All values, copied."""
        names = ("model", "optimizer", *STATES)
        return copy.deepcopy({name: self.state(name) for name in names})


class Case:
    """The parts that a file holds, and those that are asked for."""

    def __init__(self, seed, folder):
        self.random = draw = random.Random(seed)
        self.folder = folder
        self.form = draw.choice(FORMS)
        self.is_tied = draw.random() < 0.4
        self.saved = Run(self.is_tied, seed=0, steps=draw.choice((1, 2)))
        state = dict(self.saved.state("model"))
        self.problem = self.damage(state) if draw.random() < 0.4 else None
        parts = {"model": state, "optimizer": self.saved.state("optimizer")}
        parts |= {name: self.saved.state(name) for name in STATES}
        self.parts = {name: value for name, value in parts.items() if draw.random() < 0.7}
        self.numbers = {"epoch": 3, "lr": 0.5, "note": "n", "flag": True}

    def damage(self, state):
        """Remove, add or untie a tensor of the model; return the name that an error has."""
        kind = self.random.choice(("missing", "unexpected", "untied"))
        if kind == "missing":
            name = self.random.choice(["block.0.weight", "block.1.bias"])
            del state[name]
        elif kind == "unexpected":
            name = "block.2.weight"
            state[name] = torch.ones(2)
        else:
            name = "head.weight"
            state[name] = state[name] + self.random.choice((0, 1))
        is_error = kind != "untied" or (
            self.is_tied and not torch.equal(state[name], state["embed.weight"])
        )
        return (kind, name) if is_error else None

    # ---- writing ----

    def shuffled(self, tree):
        items = list(tree.items())
        self.random.shuffle(items)
        return dict(items)

    def write(self):
        """Write the parts; return the path."""
        return getattr(self, f"write_{self.form}")(dict(self.parts))

    def tree(self, parts):
        """Return the parts by the names of various programs, in any order, with numbers."""
        names = {
            "model": self.random.choice(("model", "state_dict", "model_state_dict")),
            "optimizer": self.random.choice(("optimizer", "optimizer_state_dict", "optim")),
        }
        numbers = {name: v for name, v in self.numbers.items() if self.random.random() < 0.5}
        named = {names.get(name, name): value for name, value in parts.items()}
        if parts.keys() == {"model"} and self.random.random() < 0.5:
            named = parts["model"]
        return self.shuffled({**named, **numbers})

    def write_pt(self, parts, **options):
        path = self.folder / f"a{self.random.choice(('', '.pt', '.bin', '.pth.tar', '.ckpt'))}"
        torch.save(self.tree(parts), path, **options)
        return path

    def write_legacy(self, parts):
        return self.write_pt(parts, _use_new_zipfile_serialization=False)

    def write_dcp(self, parts):
        tree = self.tree(parts)
        tree = {"app": tree} if {"model", "optimizer"} <= tree.keys() else tree
        dcp.save(tree or {"epoch": 3}, checkpoint_id=self.folder / "c")
        return self.folder / "c"

    def write_titan(self, parts):
        """Write the model's names at the top, and a flattened optimizer."""
        if "optimizer" in parts:
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            run = self.saved.model, self.saved.optimizer
            parts["optimizer"] = get_optimizer_state_dict(*run, options=options)
        elif "model" in parts:
            self.parts = {"model": parts["model"]}
            parts = dict(self.parts)
        self.parts.pop("generator", None)  # a tensor at the top is one of the model
        parts.pop("generator", None)
        model = parts.pop("model", {})
        tree = self.shuffled({**model, **parts, "train_state": {"step": 3}})
        dcp.save(tree, checkpoint_id=self.folder / "c")
        return self.folder / "c"

    def write_accelerate(self, parts):
        folder = self.folder / "c"
        folder.mkdir()
        files = {"scheduler": "scheduler.bin", "optimizer": "optimizer.bin"}
        self.parts = {n: v for n, v in parts.items() if n in (*files, "model")}
        for name, file in files.items():
            if name in parts:
                torch.save(parts[name], folder / file)
        if "model" in parts and self.random.random() < 0.5:
            state = {name: value.clone() for name, value in parts["model"].items()}
            mlstate.save_file(state, folder / "model.safetensors")
        elif "model" in parts:
            torch.save(parts["model"], folder / "pytorch_model.bin")
        return folder

    def write_ranks(self, parts):
        """The files of verl: all ranks hold the same."""
        folder = self.folder / "c"
        folder.mkdir()
        files = {"model": parts.pop("model", None), "optim": parts.pop("optimizer", None)}
        files["extra_state"] = parts
        world = self.random.choice((1, 2))
        for file, value in files.items():
            for rank in range(world if value else 0):
                torch.save(value, folder / f"{file}_world_size_{world}_rank_{rank}.pt")
        return folder

    # ---- loading ----

    def load(self, path):
        """Load random targets, and compare them with those that torch loads; return the outcome."""
        draw = self.random
        run, expected = (Run(self.is_tied, seed=1, steps=1) for _ in range(2))
        names = [name for name in ("model", "optimizer", *STATES) if draw.random() < 0.5]
        names = names or ["model"]
        strict = draw.random() < 0.7
        into = {name: getattr(run, name) for name in names if name in ("model", "optimizer")}
        states = {name: getattr(run, name) for name in names if name in STATES}
        into |= {"states": states} if states else {}
        before = run.snapshot()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                mlstate.load(path, into=into, strict=strict)
            except MLStateError as error:
                self.check_error(str(error), names)
                assert is_same(run.snapshot(), before), "changed by a load that failed"
                return "refused"
        text = "\n".join(str(warning.message) for warning in caught)
        text = re.sub(r"\(named states: .*?\)", "", text)  # those that the file holds
        unnamed = [name for name in names if name not in text]
        absent = [name for name in unnamed if name not in self.parts]
        assert absent == [], f"not restored, and not named: {absent}"
        warned = [name for name in names if name not in unnamed]
        assert not self.has_run() or not self.parts.keys() & {*warned}, text
        if "model" in names and self.problem:
            assert not strict and self.problem[0] != "untied", f"no error: {self.problem}"
        for name in unnamed:
            self.restore(expected, name)
        assert is_same(run.snapshot(), expected.snapshot()), names
        return "warned" if warned else "restored"

    def has_run(self):
        """Whether the file tells its states from a model: it has a model or an optimizer."""
        return bool(self.parts.keys() & {"model", "optimizer"})

    def restore(self, run, name):
        """Restore a part as torch does."""
        value, target = copy.deepcopy(self.parts[name]), getattr(run, name)
        if name == "generator":
            target.set_state(value)
        elif name == "counter":
            target.update(value)
        elif name == "model":
            target.load_state_dict(value, strict=False)
        else:
            target.load_state_dict(value)

    def check_error(self, text, names):
        """An error is right, and names the absent or wrong part."""
        reasons = [name for name in names if name not in self.parts]
        if "model" in names and self.problem:
            reasons.append(self.problem[1])
        if self.form == "titan" and "model" not in names:
            reasons.append("pass the module")  # the optimizer's states have its names
        if self.form == "titan" and self.problem and self.problem[0] == "missing":
            reasons.append("no model")  # the optimizer has states of the missing tensor
        if self.form == "accelerate" and "model" not in self.parts:
            reasons.append("optimizer.bin")  # pass this file instead
        assert not self.has_run() or any(reason in text for reason in reasons), text


def check_seeds(tmp_path, seeds):
    """Check the seeds; return how many had each outcome."""
    outcomes = {}
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        case = Case(seed, folder)
        try:
            outcome = case.load(case.write())
        except BaseException as error:
            error.add_note(f"seed {seed}: {case.form} of {list(case.parts)}, {case.problem}")
            raise
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


def test_missing_parts_are_named(tmp_path):
    outcomes = check_seeds(tmp_path, range(60))
    assert min(outcomes.get(name, 0) for name in ("refused", "warned", "restored")) >= 5, outcomes


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("start", range(60, 2060, 250))
def test_missing_parts_are_named_in_2000_cases(tmp_path, start):
    check_seeds(tmp_path, range(start, start + 250))
