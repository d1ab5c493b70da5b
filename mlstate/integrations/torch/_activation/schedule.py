"""A plan's steps in torch's backward pass: recomputation, saved tensors, refused in-place writes.

The forward pass runs every block once and builds one graph. For a ``forward`` step, the graph
contains slots instead of saved tensors. Before the backward pass reaches a block, the steps
scheduled before it run and fill that block's slots. So the backward pass is the same as without
a plan: the same nodes in the same order, with the same hooks of parameters.

Nested `torch.utils.checkpoint` runs persistent schedules alike. It cannot run schedules that are
not trees (``schedules="any"``, offloading at chosen steps), nor regions whose blocks the model
calls. It misses writes in place in inner regions, and nests calls of Python as deep as the plan.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ....errors import MLStateError
from .offload import Host, Offloaded
from .recompute_end import RecomputeEnd, StopRecompute
from .rng_and_buffers import Buffers, ObjectTensors, Surroundings, refusal
from .tensors import Geometry, geometry_of, storage_id, tensors_in, version_of, view_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

# Kinds of steps: run a block without or with keeping its saved tensors, run it backward, free its
# input, move its saved tensors to the host, and bring them back. Activation number `k` is the
# input of block `k`; the last one is the output of the last block.
_KINDS = ("forward", "save", "backward", "drop", "offload", "load")


class Program:
    """A schedule, with data derived for every step."""

    def __init__(self, steps: Sequence[tuple[str, int]]) -> None:
        """Compute from a plan's steps the activations that each step keeps and frees.

        `steps`: (kind, number of a block) in order. Raises ValueError for a kind that torch cannot
        run.
        """
        self.steps = [(str(kind), int(index)) for kind, index in steps]
        unknown = next((kind for kind, _ in self.steps if kind not in _KINDS), None)
        if unknown is not None:
            raise ValueError(
                f"{unknown!r} is not a kind of step that torch can run, expected one of {_KINDS}"
            )
        n = self.blocks = 1 + max(i for kind, i in self.steps if kind == "backward")
        self.runs = [0] * n  # number of steps that run each block
        self.first = [-1] * n  # first step that runs each block
        self.backward_at = [-1] * n  # backward step of each block
        self.offloads = [False] * n  # whether a block's saved tensors are offloaded
        self.drops_input = [False] * n  # whether a saved block's input is dropped
        self._read_steps()
        self.keeps = [False] * len(self.steps)  # whether a later step uses the step's output
        self.free_after: list[list[int]] = [[] for _ in self.steps]  # activations to free, by step
        self.keeps_input = self._find_last_uses()  # whether a later step uses the chain's input
        self.acts_before = self._find_active_steps()  # by block: work precedes its backward run
        self.runs_blocks_once = not any(self.uses_slots(i) or self.runs[i] > 1 for i in range(n))

    def _read_steps(self) -> None:
        """Fill the tables by block: runs, first run, backward step, offload, dropped input."""
        saved: set[int] = set()
        for at, (kind, i) in enumerate(self.steps):
            if kind in ("forward", "save"):
                self.runs[i] += 1
                if self.first[i] < 0:
                    self.first[i] = at
                if kind == "save":
                    saved.add(i)
            elif kind == "backward":
                self.backward_at[i] = at
                saved.discard(i)
            elif kind == "offload":
                self.offloads[i] = True
            elif kind == "drop" and i in saved:
                self.drops_input[i] = True

    def _find_last_uses(self) -> bool:
        """Find the last use of each activation, from the last step back.

        Fills `keeps` and `free_after`. Return whether the chain's input is used again.
        """
        is_needed = [False] * (self.blocks + 1)
        loads = [False] * self.blocks  # whether the block's next load restores its output
        for at in range(len(self.steps) - 1, -1, -1):
            kind, i = self.steps[at]
            uses: list[int] = []
            if kind in ("forward", "save"):
                self.keeps[at] = is_needed[i + 1]
                is_needed[i + 1] = False
                if at != self.first[i]:  # a first run uses the model's arguments
                    uses = [i]
            elif kind == "load":
                self.keeps[at] = loads[i] = is_needed[i + 1]
                is_needed[i + 1] = False
            elif kind == "offload" and loads[i]:
                self.keeps[at] = True
                uses = [i + 1]
            elif kind == "backward" and self.drops_input[i]:
                uses = [i]
            for k in uses:
                if not is_needed[k]:
                    self.free_after[at].append(k)
                    is_needed[k] = True
        return is_needed[0]

    def _find_active_steps(self) -> list[bool]:
        """Return by block whether any work precedes its backward run: steps or memory to free.

        Other blocks need no hook on their gradient.
        """
        acts = [True] * self.blocks
        for i in range(self.blocks - 1):
            before, at = self.backward_at[i + 1], self.backward_at[i]
            acts[i] = at > before + 1 or bool(self.free_after[before]) or self.uses_slots(i + 1)
        return acts

    def of_first_blocks(self, count: int) -> Program:
        """Return the program of the first `count` blocks alone."""
        return Program([(kind, i) for kind, i in self.steps if i < count])

    def uses_slots(self, i: int) -> bool:
        """Return whether slots of this module hold block `i`'s saved tensors, not the graph.

        This is so if they are recomputed or offloaded, or the block's input is dropped.
        """
        first = self.steps[self.first[i]][0]
        return first == "forward" or self.offloads[i] or self.drops_input[i]


class Block:
    """One block of a chain: its name for messages, its call and its module."""

    def __init__(self, name: str, call: Callable[..., Any], module: object) -> None:
        self.name = name
        self.call = call
        self.module = module
        self.buffers = Buffers(module)
        # whether its runs change tensors inside objects among its arguments; None: not known yet
        self.changes_objects: bool | None = None


class _SavedSlot:
    """Placeholder of a saved tensor in the graph."""

    __slots__ = ("__weakref__", "block", "meta", "run", "value")

    def __init__(self, run: Run, block: int, meta: tuple[Any, ...]) -> None:
        """Create an empty slot of block number `block`; `meta`: dtype, shape and device."""
        self.run = run
        self.block = block
        self.meta = meta
        self.value: Any = None  # _SavedTensor, _InputAlias, Offloaded, or None


class _InputAlias(NamedTuple):
    """A saved tensor that is a view of the block's input."""

    leaf: int  # number of the tensor in the activation that is the input
    geometry: Geometry


class _Call:
    """Data to run a block again as in its first run."""

    def __init__(self) -> None:
        """Create the record of a block's call, still empty."""
        self.slots: list[weakref.ref[_SavedSlot]] = []
        self.spec: Any = None
        # leaves of its arguments: the number of a tensor in the activation before the block,
        # another tensor, or None for an object
        self.leaves: list[int | _SavedTensor | None] = []
        self.objects: ObjectTensors | None = None  # as before the first run
        self.flags: list[bool] = []  # whether each leaf requires a gradient
        self.surroundings: Surroundings | None = None
        self.outputs_meta: list[tuple[Any, ...]] = []  # dtype, shape and device of its outputs
        self.host: Host | None = None  # while its saved tensors are offloaded
        self.is_complete = False  # the first run has ended


def _meta_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.device


def _meta_text(meta: tuple[Any, ...]) -> str:
    dtype, shape, device = meta
    return f"{str(dtype).removeprefix('torch.')} {shape} on {device}"


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the leaves of arguments and their tree spec.

    The spec is None if all are tensors by position.
    """
    import torch
    from torch.utils import _pytree

    if not kwargs and all(isinstance(arg, torch.Tensor) for arg in args):
        return list(args), None
    return _pytree.tree_flatten((args, kwargs))


def _unflatten(leaves: list[Any], spec: Any) -> tuple[Any, Any]:
    """Return positional and keyword arguments from leaves and a spec of `flatten`."""
    from torch.utils import _pytree

    if spec is None:
        return tuple(leaves), {}
    args, kwargs = _pytree.tree_unflatten(leaves, spec)
    return args, kwargs


class Run:
    """One forward pass through the chain and its backward pass."""

    def __init__(
        self,
        program: Program,
        blocks: Sequence[Block],
        folder: str | None = None,
        observe: Callable[[str, int], None] | None = None,
    ) -> None:
        """Start a forward pass of the blocks; no block has run.

        `folder`: of offloaded tensors; None: memory. `observe`: called with each step before it
        runs.
        """
        self.next = 0  # next block of the forward pass
        self._program = program
        self._blocks = blocks
        self._folder = folder
        self._observe = observe
        # by block; None: not called yet, or freed
        self._calls: list[_Call | None] = [None] * program.blocks
        # tensors of each activation that a later step uses; None: not kept
        self._activations: list[list[_SavedTensor] | None] = [None] * (program.blocks + 1)
        self._last_outputs: list[tuple[weakref.ref[Any], int]] = []  # last outputs, with versions
        self._position = 0  # next step of the program
        self._backward_block = program.blocks  # the block that runs backward; at first none
        self._free_later: list[int] = []  # activations that a running backward pass may still use
        self._backward_began = False
        self._is_freed = False  # the backward pass has ended, and all is freed

    # The forward pass

    @property
    def has_begun_backward(self) -> bool:
        """Whether a backward pass has used steps of the schedule."""
        return self._backward_began

    def can_continue(self, leaves: list[Any]) -> bool:
        """Return whether the arguments contain the previous block's output, still in memory.

        The pass cannot continue after a backward pass has begun.
        """
        if self._backward_began:
            return False
        outputs = [
            tensor for tensor in (ref() for ref, _ in self._last_outputs) if tensor is not None
        ]
        return any(leaf is tensor for leaf in leaves for tensor in outputs)

    def run_next(self, args: Any, kwargs: Any, leaves: list[Any], spec: Any) -> Any:
        """Run the next block for the first time, and the plan's steps around it; return its output.

        `leaves`, `spec`: its arguments, flattened. Raises MLStateError if the block changes an
        argument in place that a recomputation needs.
        """
        i, program = self.next, self._program
        block = self._blocks[i]
        self._take_steps_until(program.first[i])
        call = self._calls[i] = _Call()
        again = program.runs[i] > 1
        links = self._link_arguments(i, leaves) if again or program.drops_input[i] or not i else []
        if again:
            self._record_call(call, block, leaves, spec, links)
        versions = [version_of(leaf) for leaf in self._tensors(leaves)] if again else []
        out = self._run_first(i, call, leaves, args, kwargs)
        if call.surroundings is not None:
            call.surroundings.drop_unused()
            if call.objects is not None:
                block.changes_objects = call.objects.keep_changed() or bool(block.changes_objects)
            self._refuse_changes(block, leaves, versions)
        self._keep_output(i, out, call)
        call.is_complete = True
        self._position += 1
        self.next += 1
        end = program.first[self.next] if self.next < program.blocks else program.backward_at[-1]
        while self._position < end and program.steps[self._position][0] not in ("forward", "save"):
            self._take_step()
        return out

    def _tensors(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors among arguments, in order."""
        import torch

        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _link_arguments(self, i: int, leaves: Sequence[Any]) -> list[int | None]:
        """Return for each argument of block `i` its number in the activation before it, or None.

        `leaves`: the arguments, flattened. For the first block, all tensors are the activation,
        which this also keeps if a later step uses it. Raises MLStateError if a recomputed
        activation was changed in place since the block before returned it.
        """
        import torch

        if i:
            outputs = {}
            for k, (ref, version) in enumerate(self._last_outputs):
                tensor = ref()
                if tensor is not None:
                    self._refuse_between(i, tensor, version)
                    outputs[id(tensor)] = k
            return [outputs.get(id(leaf)) for leaf in leaves]
        tensors = self._tensors(leaves)
        if self._program.keeps_input:
            self._activations[0] = [_SavedTensor(tensor) for tensor in tensors]
        count = iter(range(len(tensors)))
        return [next(count) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]

    def _refuse_between(self, i: int, tensor: torch.Tensor, version: int) -> None:
        """Raise MLStateError if an activation was changed in place before it entered block `i`.

        `version`: of the tensor when the block before returned it. Only a recomputed activation
        matters.
        """
        if version_of(tensor) != version and self._program.runs[i - 1] > 1:
            name, before = self._blocks[i].name, self._blocks[i - 1].name
            raise refusal(
                name,
                f"what {before} returned was changed in place before it entered {name}; the plan "
                "recomputes it without that change: use an operation that is not in place, "
                "inside a block",
            )

    def _record_call(
        self, call: _Call, block: Block, leaves: list[Any], spec: Any, links: list[int | None]
    ) -> None:
        """Record the arguments and surroundings of a block's first run, to run it again.

        `leaves`: arguments, flattened by `spec`. `links`: the number of each in the activation, or
        None. Objects are copied, because the run may change them.
        """
        import torch

        call.spec = spec
        objects = {}
        for k, (leaf, link) in enumerate(zip(leaves, links, strict=True)):
            is_tensor = isinstance(leaf, torch.Tensor)
            call.flags.append(is_tensor and leaf.requires_grad)
            if link is not None:
                call.leaves.append(link)
            else:
                call.leaves.append(_SavedTensor(leaf) if is_tensor else None)
                if not is_tensor:
                    objects[k] = leaf
        if objects:
            call.objects = ObjectTensors(objects, copy=block.changes_objects is not False)
        call.surroundings = Surroundings(block.module, block.buffers, leaves)

    def _run_first(self, i: int, call: _Call, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        """Run block `i` for the first time and return its output.

        If the block `uses_slots`, its saved tensors become slots: with their values for a ``save``
        step, empty for a ``forward`` step. Otherwise the graph keeps them. `call`: its record,
        which gets the slots. `leaves`: the arguments `args` and `kwargs`, flattened.
        """
        import torch

        kind = self._program.steps[self._position][0]
        if self._observe is not None:
            self._observe(kind, i)
        if not self._program.uses_slots(i):
            return self._blocks[i].call(*args, **kwargs)
        input_numbers = {}
        if self._program.drops_input[i]:
            input_numbers = _map_storages(zip(leaves, self._link_arguments(i, leaves), strict=True))

        def pack(tensor: torch.Tensor) -> _SavedSlot:
            slot = _SavedSlot(self, i, _meta_of(tensor))
            call.slots.append(weakref.ref(slot))
            if kind == "save":
                slot.value = _keep_tensor(tensor, input_numbers)
            return slot

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return self._blocks[i].call(*args, **kwargs)

    def _refuse_changes(self, block: Block, leaves: list[Any], versions: list[int]) -> None:
        """Raise MLStateError if a block changed its arguments in place; recomputation needs them.

        `leaves`: the arguments, flattened. `versions`: of the tensors among them before it ran.
        """
        changed = [
            k
            for k, (tensor, version) in enumerate(zip(self._tensors(leaves), versions, strict=True))
            if version_of(tensor) != version
        ]
        if changed:
            raise refusal(
                block.name,
                f"{block.name} changes its input in place (tensor {changed[0]} of its "
                "arguments), and the plan runs it again on that input: use operations that "
                "are not in place, or make it one block with what stands before it",
            )

    def _keep_output(self, i: int, out: object, call: _Call) -> None:
        """Keep the output `out` of block `i` if the plan needs it, and hook its gradient.

        `call`: its record, which gets the form of the output if the block runs again.
        The hook runs the steps before the block's backward pass. Also frees the activations that
        the plan uses here last. Raises TypeError if the output has no tensor.
        """
        tensors = tensors_in(out)
        if not tensors:
            raise TypeError(f"{self._blocks[i].name} returned no tensor: {type(out).__name__}")
        self._last_outputs = [(weakref.ref(tensor), version_of(tensor)) for tensor in tensors]
        if self._program.runs[i] > 1:
            call.outputs_meta = [_meta_of(tensor) for tensor in tensors]
        watched = self._program.acts_before[i] or self._observe is not None
        for tensor in tensors:
            if watched and tensor.grad_fn is not None:
                watch: Any = tensor.register_hook
                watch(partial(self._on_gradient, i))
        if self._program.keeps[self._position]:
            self._activations[i + 1] = [_SavedTensor(tensor) for tensor in tensors]
        for k in self._program.free_after[self._position]:
            self._activations[k] = None

    # Steps

    def _take_steps_until(self, position: int) -> None:
        while self._position < position:
            self._take_step()

    def _take_step(self) -> None:
        """Carry out the next step of the plan, and free the activations that it used last.

        The input of a backward step is freed later, because torch runs that pass after this call.
        """
        at = self._position
        kind, i = self._program.steps[at]
        if self._observe is not None:
            self._observe(kind, i)
        if kind in ("forward", "save"):
            self._run_again(i, kind == "save", self._program.keeps[at])
        elif kind == "drop":
            self._activations[i] = None
        elif kind == "offload":
            self._offload(i, self._program.keeps[at])
        elif kind == "load":
            self._load(i, self._program.keeps[at])
        if kind == "backward":
            self._free_later += self._program.free_after[at]
        else:
            for k in self._program.free_after[at]:
                self._activations[k] = None
        self._position = at + 1

    def _run_again(self, i: int, save: bool, keep: bool) -> None:
        """Recompute block `i`; store its output if `keep`, and its saved tensors if `save`.

        Does nothing if neither is to be stored. Raises MLStateError if they differ in form from the
        first run's.
        """
        import torch

        call, block = self._call_of(i), self._blocks[i]
        if not call.slots and not keep:
            return
        surroundings = call.surroundings
        if surroundings is None:
            raise _freed_error(block.name)
        leaves = self._arguments(i, call)
        input_numbers = {}
        if save and self._program.drops_input[i]:
            links = (leaf if isinstance(leaf, int) else None for leaf in call.leaves)
            input_numbers = _map_storages(zip(leaves, links, strict=True))
        end = RecomputeEnd()
        packer = _Packer(
            block.name, call.slots if save else None, None if keep else end, input_numbers
        )
        hooks = torch.autograd.graph.saved_tensors_hooks(packer, partial(_refuse_inner, block.name))
        args, kwargs = _unflatten(leaves, call.spec)
        del leaves
        out, is_complete = None, True
        try:
            with surroundings.restored(block.name, block.module), torch.enable_grad(), hooks, end:
                out = block.call(*args, **kwargs)
        except StopRecompute:
            is_complete = False
        finally:
            del args, kwargs
        packer.finish()
        if not is_complete:
            return
        tensors = tensors_in(out)
        metadata = [_meta_of(tensor) for tensor in tensors]
        if metadata != call.outputs_meta:
            equal = [a == b for a, b in zip(metadata, call.outputs_meta, strict=False)]
            k = equal.index(False) if False in equal else len(equal)
            raise _difference_error(block.name, f"output {k}", call.outputs_meta[k:], metadata[k:])
        if keep:
            self._activations[i + 1] = [_SavedTensor(tensor) for tensor in tensors]

    def _call_of(self, i: int) -> _Call:
        """Return the record of block `i`'s call; raise MLStateError if it was freed."""
        call = self._calls[i] if self._calls else None
        if call is None:
            raise _freed_error(self._blocks[i].name)
        return call

    def _activation(self, k: int) -> list[_SavedTensor]:
        """Return the kept tensors of activation `k`, the input of block `k`.

        Raises MLStateError if they were freed.
        """
        leaves = self._activations[k] if self._activations else None
        if leaves is None:
            raise _freed_error(self._blocks[min(k, len(self._blocks) - 1)].name)
        return leaves

    def _arguments(self, i: int, call: _Call) -> list[Any]:
        """Return the arguments to run block `i` again: activations, tensors, copied objects."""
        objects = {} if call.objects is None else call.objects.copy(self._blocks[i].name)
        arguments = []
        for k, (leaf, flag) in enumerate(zip(call.leaves, call.flags, strict=True)):
            value = objects.get(k)
            if isinstance(leaf, int):
                leaf = self._activation(i)[leaf]
            if leaf is not None:
                value = leaf.tensor(self._blocks[i].name).requires_grad_(flag)
            arguments.append(value)
        return arguments

    def _offload(self, i: int, output: bool) -> None:
        """Move the saved tensors of block `i` out of the device's memory; `output`: its output too.

        Parameters, the block's input and sparse tensors stay on the device.
        """
        call = self._call_of(i)
        host = call.host = Host(self._folder)
        persistent = _persistent_storages(self._blocks[i].module)
        inputs = {storage_id(leaf.value) for leaf in self._activations[i] or ()}
        for ref in call.slots:
            slot = ref()
            if slot is None or slot.value is None or isinstance(slot.value, _InputAlias):
                continue
            key = storage_id(slot.value.value)
            if key is None or key in persistent or key in inputs:
                continue
            if not slot.value.value.untyped_storage().nbytes():
                continue  # 0 bytes: FSDP frees its parameters after a forward pass
            slot.value = host.put(slot.value.tensor(self._blocks[i].name))
        if output:
            host.outputs = [host.put(leaf.value) for leaf in self._activation(i + 1)]

    def _load(self, i: int, output: bool) -> None:
        """Bring the saved tensors of block `i` that `_offload` moved back to the device.

        `output`: the block's output too. Raises MLStateError if they were freed.
        """
        call = self._call_of(i)
        host = call.host
        if host is None:
            raise _freed_error(self._blocks[i].name)
        for ref in call.slots:
            slot = ref()
            if slot is not None and isinstance(slot.value, Offloaded):
                slot.value = _SavedTensor(host.get(slot.value))
        if output:
            self._activations[i + 1] = [
                _SavedTensor(host.get(offloaded)) for offloaded in host.outputs
            ]
        call.host = None

    # The backward pass

    def _on_gradient(self, i: int, _: torch.Tensor) -> None:
        """Prepare block `i`'s backward pass; torch calls this when its output's gradient exists.

        Raises MLStateError for ``create_graph=True``.
        """
        import torch

        if torch.is_grad_enabled():
            raise _double_backward_error(self._blocks[i].name)
        self.prepare(i)

    def prepare(self, i: int) -> None:
        """Run the plan's steps up to the backward pass of block `i`, which torch is about to run.

        Does nothing if they have run. First frees the saved memory of later blocks that are done,
        and skips the steps of later blocks that the pass does not visit. The first call lets torch
        free everything at the end of the backward pass.
        """
        import torch

        if self._is_freed or i >= self._program.blocks:
            return
        at = self._program.backward_at[i]
        if self._position > at:
            return
        if not self._backward_began:
            self._backward_began = True
            torch.autograd.Variable._execution_engine.queue_callback(self._free_all)
        self._free_finished(i)
        self._skip_later_blocks(i)
        while self._position <= self._program.backward_at[i]:
            self._take_step()

    def _skip_later_blocks(self, i: int) -> None:
        """Remove the steps of blocks after `i` that the backward pass does not visit.

        The loss does not depend on the output of these blocks, or they did not run. The position is
        counted anew in the shorter program.
        """
        program, start = self._program, self._position
        # the first step after the backward run of the block after this one
        own_begin = program.backward_at[i + 1] + 1 if i + 1 < program.blocks else 0
        # steps that may be left of a block that was visited: a kept block that is not watched has
        # run backward without its step
        passed = ("drop",) if self._observe is not None else ("drop", "backward")
        if any(k > i and kind not in passed for kind, k in program.steps[start:own_begin]):
            self._program = program.of_first_blocks(i + 1)
            self._position = sum(k <= i for _, k in program.steps[:start])
            self._activations[i + 1 :] = [None] * (len(self._activations) - i - 1)

    def _free_finished(self, i: int) -> None:
        """Free saved memory of blocks after `i`, whose backward passes are complete.

        The block after `i` stays: its backward pass may still run.
        """
        for k in self._free_later:
            self._activations[k] = None
        self._free_later = []
        while self._backward_block > i + 1:
            self._backward_block -= 1
            _empty_slots(self._calls[self._backward_block])
            self._calls[self._backward_block] = None

    def _free_all(self) -> None:
        """Free everything at the end of the backward pass; a second one raises MLStateError."""
        self._is_freed = True
        for call in self._calls:
            _empty_slots(call)
        self._calls = []
        self._activations = []

    def tensor_of(self, slot: _SavedSlot) -> torch.Tensor:
        """Return the saved tensor of a slot to torch's backward pass, recomputed if necessary.

        Raises MLStateError outside of a backward pass, for ``create_graph=True``, and if it was
        freed.
        """
        import torch

        name = self._blocks[slot.block].name
        if torch._C._current_graph_task_id() < 0:
            raise MLStateError(f"{name}: its saved tensors exist only during a backward pass")
        if torch.is_grad_enabled():
            raise _double_backward_error(name)
        if not self._is_freed and not self._is_ready(slot):
            call = self._calls[slot.block]
            if call is not None and not call.is_complete:
                raise _inner_gradient_error(name)
            self.prepare(slot.block)
        value = slot.value
        if isinstance(value, _InputAlias):
            leaf = self._activation(slot.block)[value.leaf]
            return view_of(leaf.tensor(name).untyped_storage(), value.geometry)
        if not isinstance(value, _SavedTensor):
            raise _freed_error(name)
        return value.tensor(name)

    def _is_ready(self, slot: _SavedSlot) -> bool:
        """Return whether a saved tensor is in memory."""
        if isinstance(slot.value, _InputAlias):
            return self._activations[slot.block] is not None
        return isinstance(slot.value, _SavedTensor)


class _SavedTensor:
    """A tensor that is needed again unchanged, detached."""

    __slots__ = ("value", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.value = tensor.detach()
        self.version = version_of(tensor)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the kept tensor, detached.

        Raises MLStateError, with the block `name`, if it was changed in place since it was kept.
        """
        if version_of(self.value) != self.version:
            form = _meta_text(_meta_of(self.value))
            raise refusal(
                name,
                f"{name}: a tensor that its recomputation or its backward pass needs, {form}, was "
                "changed in place meanwhile: use an operation that is not in place",
            )
        return self.value.detach()


def _map_storages(linked: Iterable[tuple[Any, int | None]]) -> dict[int, int]:
    """Return the numbers of an activation's tensors by their storages.

    `linked`: tensors, and their numbers or None.
    """
    ids = {storage_id(leaf): k for leaf, k in linked if k is not None}
    return {key: k for key, k in ids.items() if key is not None}


def _keep_tensor(tensor: torch.Tensor, input_numbers: dict[int, int]) -> _SavedTensor | _InputAlias:
    """Keep a saved tensor, or its position in an input that is dropped and recomputed.

    `input_numbers`: numbers of the input's tensors by storage; empty if the input stays.
    """
    key = storage_id(tensor) if input_numbers else None
    if key not in input_numbers:
        return _SavedTensor(tensor)
    return _InputAlias(input_numbers[key], geometry_of(tensor))


class _Packer:
    """Stores recomputed tensors in the slots of the first run, in order, or discards them."""

    def __init__(
        self,
        name: str,
        slots: list[weakref.ref[_SavedSlot]] | None,
        end: RecomputeEnd | None,
        input_numbers: dict[int, int],
    ) -> None:
        """Prepare for a recomputation of the block `name`.

        `slots`: of the first run's saved tensors, to fill; None: discard the tensors. `end`: ends
        the run; None: its output is needed. `input_numbers`: as for `_keep_tensor`.
        """
        self._name = name
        self._slots = slots
        self._end = end
        self._input_numbers = input_numbers
        self._count = 0

    def __call__(self, tensor: torch.Tensor) -> None:
        """Put the next saved tensor into its slot; torch calls this.

        Raises MLStateError if its form differs from the first run's. After the last slot, the run
        ends unless its output is needed.
        """
        k = self._count
        self._count += 1
        if self._slots is None or k >= len(self._slots):
            return  # finish() reports the surplus
        slot = self._slots[k]()
        if slot is not None:
            meta = _meta_of(tensor)
            if meta != slot.meta:
                raise _difference_error(self._name, f"saved tensor {k}", [slot.meta], [meta])
            slot.value = _keep_tensor(tensor, self._input_numbers)
        if k + 1 == len(self._slots) and self._end is not None:
            self._end.request()

    def finish(self) -> None:
        """Raise MLStateError if a recomputation saved another number of tensors than the first run.

        Call it after the recomputation.
        """
        if self._slots is not None and self._count != len(self._slots):
            raise refusal(
                self._name,
                f"{self._name} saved {len(self._slots)} tensors for backward when it ran first, "
                f"and {self._count} when it was recomputed; mlstate.activation.check finds where "
                "the two runs differ",
                str(len(self._slots)),
                str(self._count),
            )


def _unpack(slot: _SavedSlot) -> torch.Tensor:  # torch calls it with what `pack` returned
    return slot.run.tensor_of(slot)


def _refuse_inner(name: str, _: Any) -> Any:
    raise _inner_gradient_error(name)


def _empty_slots(call: _Call | None) -> None:
    """Free the saved tensors of a call's slots; None: do nothing."""
    for ref in call.slots if call is not None else ():
        slot = ref()
        if slot is not None:
            slot.value = None


def _persistent_storages(module: Any) -> set[int]:
    """Return the storages, by identity, of parameters and buffers, which a plan does not offload.

    DTensors and sparse tensors among them are left out.
    """
    if not hasattr(module, "parameters"):
        return set()
    tensors = [*module.parameters(), *module.buffers()]
    keys = {storage_id(t) for t in tensors if not hasattr(t, "placements")}
    return {key for key in keys if key is not None}


def _difference_error(name: str, label: str, first: list[Any], now: list[Any]) -> MLStateError:
    """Return the error for a recomputation that makes another tensor than the first run.

    `label`: of the tensor. `first`, `now`: (dtype, shape, device) of this tensor and those after
    it, in each run; empty if a run has none.
    """
    texts = [_meta_text(metas[0]) if metas else "none" for metas in (first, now)]
    return refusal(
        name,
        f"{name}, {label}: {texts[0]} when the block ran first, {texts[1]} when it was recomputed; "
        "mlstate.activation.check finds where the two runs differ",
        *texts,
    )


def _freed_error(name: str) -> MLStateError:
    """Return the error of block `name` if its saved tensors were used in a backward pass before."""
    return refusal(
        name,
        f"{name}: what it had saved was used and freed. A second backward pass through "
        "a planned model needs a second forward pass; add losses and call backward once",
    )


def _double_backward_error(name: str) -> MLStateError:
    """Return the error of block `name` for ``create_graph=True``."""
    return refusal(
        name,
        f"{name}: create_graph=True does not work through a planned model: recomputed tensors "
        "have no history; remove() the plan for a second derivative",
    )


def _inner_gradient_error(name: str) -> MLStateError:
    """Return the error of block `name` if it needs saved tensors during its own forward run."""
    return refusal(
        name,
        f"{name} takes gradients inside its own forward, or keeps a tensor of a recomputation "
        "for the loss; such a block cannot be recomputed: let the plan keep it",
    )
