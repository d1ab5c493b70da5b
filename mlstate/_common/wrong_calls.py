"""Remedies for calls that Python refuses: keywords and attributes of other libraries, wrong counts.

The only home of such answers: `show_exports` passes every public function and class to `explained`.
"""

from __future__ import annotations

from functools import wraps
from inspect import Parameter, signature
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .text import names_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Thing = TypeVar("Thing")
_PACKAGE = "mlstate."
_EXPLAINED = "_explained"  # the attribute of a function, and of its wrapper, that is the wrapper

# A word of keywords that people pass; the keyword of the same meaning here, or the function that
# lacks one; and the remedy, if its name does not tell it. The first that the function has counts.
_KEYWORDS = (
    ("weights_only", "into", "nothing is unpickled, so leave it out"),
    ("location", "device", "device= is where the tensors go, and into= has tensors to fill"),
    ("ignore", "strict", "pass strict=False"),
    ("template", "into", "into= has the tensors to fill"),
    ("model", "into", "into= has what to fill: load(path, into={'model': model})"),
    ("optim", "into", "into= has what to fill: load(path, into={'optimizer': optimizer})"),
    ("state", "into", "into= has what to fill: load(path, into=state)"),
    ("target", "into", "into= has what to fill"),
    ("state_dict", "model", ""),
    ("tensors", "model", ""),
    ("async", "save", "save_async(path, model) returns while it writes"),
    ("force", "overwrite", ""),
    ("exist", "overwrite", ""),
    ("prefix", "rules", "rules has pairs of prefixes: rename(state, {'module.': ''})"),
    ("prefix", "rename", "pass rename={'module.': ''}"),
    ("keys", "names", ""),
    ("filter", "names", ""),
    ("exact", "rtol", "bits are compared, unless rtol= or atol= is a tolerance"),
    ("fix", "repair", ""),
    ("image", "extra", "pass extra={position: digest}"),
    ("top_k", "keep_best", ""),
    ("dir", "directory", ""),
    ("reduc", "op", ""),
    ("world_size", "process_group", "process_group= has the ranks"),
    ("model", "fsdp", "register_hooks(model, units) takes the model"),
    ("into", "load_file", "load(path, into=...) fills what you have"),
    ("window", "capacity", ""),
    ("length", "capacity", ""),
    ("length", "target_seq_length", ""),
    ("size", "target_seq_length", ""),
    ("scheduler", "states", "pass states={'scheduler': scheduler}"),
    ("epoch", "metadata", "pass metadata={'epoch': 3}"),
    ("loss", "metadata", "pass metadata={'loss': 0.25}"),
    ("metric", "metadata", "pass metadata={'loss': 0.25}"),
    ("monitor", "step", "use CheckpointManager(path, monitor='loss').restore('best')"),
    ("dtype", "cast", ""),
    ("tol", "rtol", "rtol= and atol= are the tolerances"),
    ("tol", "ulps", "ulps= is the tolerance, in units of the last place"),
    ("budget", "budget_bytes", ""),
    ("memory", "budget_bytes", ""),
    ("limit", "budget_bytes", ""),
    ("memory", "max_staging_bytes", ""),
    ("budget", "max_staging_bytes", ""),
    ("buffer", "max_staging_bytes", ""),
    ("size", "max_shard_bytes", ""),
    ("size", "max_bytes", ""),
    ("capacity", "max_bytes", ""),
    ("ids", "tokens", "tokens= has the ids of one prompt, such as input_ids[0]"),
    ("prompt", "tokens", "tokens= has the ids of one prompt, such as input_ids[0]"),
    ("past", "cache", ""),
    ("keep", "keep", ""),
    ("limit", "keep", ""),
    ("steps", "accumulation_steps", ""),
    ("backend", "engine", "engine= is 'threads', 'gloo' or 'mpi'"),
    ("ranks", "world_size", ""),
    ("shards", "world_size", ""),
    ("num", "world_size", ""),
    ("framework", "load_file", "load_file returns arrays: torch.from_numpy shares their memory"),
    ("device", "load_file", "load(path, device='cuda').model has tensors of torch there"),
)
# Classes whose objects come from another call.
_MAKERS = {
    "Chain": "Chain.from_torch(module, sample) measures a module",
    "LocalGroup": "LocalGroup.threads(2) makes a group of threads, and run() one of processes",
    "LoadedState": "mlstate.load(path) returns one",
    "SaveHandle": "mlstate.save_async(path, model) returns one",
}
# Attributes that people look for, by class, and what to do.
_MAPPING = "a state is a mapping of name to array"
_MODEL = ".model is a mapping of name to array"
_DEVICE = "mlstate.load(path, device='cuda').model has tensors of torch there"
_MATCH = "match() finds a stored prompt, and restore() fills a cache with it"
_RESTORE = "restore(step) reads a step, and restore_latest() the last good one"
_LOAD = "mlstate.load(path).model has the tensors"
_ADD = "add_gradients() adds a micro-batch"
_TAKE = "get_and_clear_gradients() returns the sums, for an optimizer of yours"
_PUBLISH = "publish(step, model) publishes the weights"
_POLL = "poll() fetches the newest weights into what `into` named"
_WAIT = "wait() waits, and raises what failed"
_ATTRIBUTES = {
    "StateDict": {
        "to": f"{_DEVICE}, and astype() changes dtypes",
        "cuda": _DEVICE,
        "half": "use astype('float16')",
        "float": "use astype('float32')",
        "numpy": f"{_MAPPING}s of NumPy",
        "state_dict": f"{_MAPPING} by itself",
        "load_state_dict": "mlstate.load_into(target, source) fills it",
        "parameters": f"{_MAPPING}: values() has the arrays",
        "save": "mlstate.save(path, state) saves it",
    },
    "LoadedState": dict.fromkeys(["keys", "items", "values", "get", "state_dict"], _MODEL)
    | {"to": _DEVICE, "load_state_dict": "mlstate.load(path, into=module) fills a module"},
    "CheckpointManager": {
        "load": _RESTORE,
        "load_latest": "restore_latest() reads the last one",
        "latest": "latest_step() is the number of the last one, and restore_latest() reads it",
        "all_steps": "steps() lists them",
        "wait_until_finished": "close() waits, as does wait() of what save_async returns",
        "wait": "close() waits, as does wait() of what save_async returns",
    },
    "SaveHandle": dict.fromkeys(["result", "join", "get", "exception"], _WAIT),
    "Checkpoint": dict.fromkeys(["keys", "items", "values", "model", "get_tensor"], _LOAD),
    "Publisher": dict.fromkeys(["save", "push", "put", "send"], _PUBLISH),
    "Follower": dict.fromkeys(["load", "get", "pull", "update", "fetch", "sync"], _POLL),
    "GradientAccumulator": dict.fromkeys(["add", "accumulate", "backward", "update"], _ADD)
    | dict.fromkeys(["step", "zero_grad", "grads", "gradients", "get_gradients"], _TAKE),
    "PromptStore": dict.fromkeys(["get", "lookup", "load", "find"], _MATCH)
    | dict.fromkeys(["add", "save", "store", "set"], "put() stores a prompt with its cache")
    | dict.fromkeys(["keys", "items", "list", "prompts"], "`mlstate prompts ls` lists them"),
}

# Names that people look for in the package, and what to do.
_LOAD_STATE = "mlstate.load(path, into=module) fills a module, and mlstate.load_into(target, state)"
_STATE_DICT = "mlstate.save(path, module) takes a module, and mlstate.StateDict arrays by name"
_RUNS = "mlstate.CheckpointManager(path).restore_latest() reads the last good step"
_NAMES = {
    "load_state_dict": f"{_LOAD_STATE} arrays",
    "state_dict": _STATE_DICT,
    "get_state_dict": _STATE_DICT,
    "set_state_dict": f"{_LOAD_STATE} arrays",
    "restore": _RUNS,
    "restore_latest": _RUNS,
    "latest_step": "mlstate.CheckpointManager(path).latest_step() reads it",
    "open": "mlstate.inspect(path) reads what a checkpoint has, and mlstate.load its tensors",
    "compare": "mlstate.diff(first, second) compares, and mlstate.digest(path) names the bits",
    "hash": "mlstate.digest(path) names the bits",
    "checksum": "mlstate.checkpoint.checksum writes checksums of any file",
    "repair": "mlstate.verify(path, repair=True) repairs",
    "expand_kv_state": "mlstate.transition_kv_state(state, length) makes it longer or shorter",
    "prune": "mlstate.checkpoint.prune(path, keep=3) deletes old steps",
    "delete": "mlstate.CheckpointManager(path).delete(step) deletes a step",
}


def missing_name(package: str, name: str, public: list[str]) -> AttributeError:
    """Return the AttributeError for a name that the module `package` lacks, with a remedy."""
    hint = ""
    if package == "mlstate" and name in _NAMES:
        hint = f"; {_NAMES[name]}"
    elif not name.startswith("_"):
        hint = names_hint(name, public, listed=False)
    return AttributeError(f"module {package!r} has no attribute {name!r}{hint}", name=name)


def explained(thing: Thing) -> Thing:
    """Let a wrong call of a public function, or of a method of a public class, tell the remedy.

    Return a function in a wrapper; change a class and its bases of this package in place. What is
    neither returns as it is. The wrapper costs about 0.1 us a call.
    """
    if isinstance(thing, FunctionType):
        known = vars(thing).get(_EXPLAINED)  # several modules may export the function
        return cast("Thing", known or _explained_function(thing))
    for base in thing.__mro__ if isinstance(thing, type) else ():
        if not base.__module__.startswith(_PACKAGE):
            continue
        for name, member in list(vars(base).items()):
            function = getattr(member, "__func__", member)  # of a class method or static method
            is_public = name == "__init__" or not name.startswith("_")
            is_own = isinstance(function, FunctionType) and function.__module__.startswith(_PACKAGE)
            if is_public and is_own:
                new = explained(function)
                setattr(base, name, new if function is member else type(member)(new))
        if base.__name__ in _ATTRIBUTES:
            base.__getattr__ = _answer_attribute  # type: ignore[attr-defined]
    return thing


def _explained_function(function: FunctionType) -> Callable[..., Any]:
    """Return `function`; a TypeError of a call that does not fit its signature tells the remedy."""

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        __tracebackhide__ = True  # pytest shows the caller
        try:
            return function(*args, **keywords)
        except TypeError as error:
            hint = _call_hint(call, args, keywords)
            if not hint:
                raise  # from the body
            raise TypeError(f"{error}{hint}") from None

    vars(call)[_EXPLAINED] = vars(function)[_EXPLAINED] = call
    return call


def _call_hint(
    function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> str:
    """Return the remedy for a call that does not fit the signature of `function`, else ""."""
    parameters = signature(function).parameters
    try:
        signature(function).bind(*args, **keywords)
        return ""
    except TypeError:
        unknown = next((name for name in keywords if name not in parameters), None)
    if unknown is not None and (hint := _keyword_hint(function, unknown, parameters)):
        return hint
    texts = [
        f"{name}=" if parameter.kind is Parameter.KEYWORD_ONLY else name
        for name, parameter in parameters.items()
        if unknown is not None
        or name in ("into", "step")
        or parameter.default is Parameter.empty
        or parameter.kind is not Parameter.KEYWORD_ONLY
    ]
    name = function.__qualname__.removesuffix(".__init__")
    if name in _MAKERS:
        return f"; {_MAKERS[name]}"
    texts = [text for text in texts if text not in ("self", "cls")]
    rest = [] if unknown is not None else ["..."]
    return f"; the call is {name}({', '.join(texts + rest)})"


def _keyword_hint(
    function: Callable[..., object], name: str, parameters: Mapping[str, Parameter]
) -> str:
    """Return the remedy for a keyword that `function` does not have, or ""."""
    for word, meant, remedy in _KEYWORDS:
        if word in name and (meant in parameters or meant == function.__name__):
            return f"; {remedy}" if remedy else f"; did you mean {meant!r}?"
    return names_hint(name, parameters, listed=False)


def _answer_attribute(thing: object, name: str) -> Any:
    """Raise AttributeError with the remedy for an attribute that `thing` lacks: a `__getattr__`."""
    tables = (_ATTRIBUTES.get(cls.__name__, {}) for cls in type(thing).__mro__)
    remedy = next((f"; {table[name]}" for table in tables if name in table), "")
    text = f"{type(thing).__name__!r} object has no attribute {name!r}{remedy}"
    raise AttributeError(text, name=name, obj=thing)
