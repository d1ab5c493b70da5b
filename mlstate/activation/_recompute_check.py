"""Whether blocks can be run again; public through `mlstate.activation`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.backend import backend_named
from .._common.set_module import set_module
from .._common.text import table_html

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROWS = 40
_HEADERS = ["block", "where", "what", "in detail"]


@set_module("mlstate.activation")
class Finding(NamedTuple):
    """Why recomputing a block would not give what its first run gave.

    Attributes
    ----------
    block : str
        The block.
    where : str
        The module inside it, and the operator or tensor.
    kind : str
        ``"random"`` (numbers drawn outside of torch), ``"in place"`` (an input or a saved
        tensor was written to), ``"saved"`` (another number of saved tensors, or another shape
        or dtype), ``"routing"`` (indices differ: other experts were chosen), ``"values"``
        (other bits), ``"error"`` (it does not run), ``"gradients"`` (of the whole model).
    text : str
        What differs, and what to do.

    Examples
    --------
    >>> from mlstate.activation import Finding
    >>> Finding("layers.3", "router: aten.topk", "routing", "2 of 64 indices differ").kind
    'routing'
    """

    block: str
    where: str
    kind: str
    text: str


@set_module("mlstate.activation")
class RecomputeReport:
    """What `check` found; true if that is nothing.

    Parameters
    ----------
    findings : sequence of Finding
        By block.
    checked : sequence of str
        The blocks that were run again.

    Attributes
    ----------
    findings : list of Finding
        By block, those of the whole model last.
    checked : list of str
        The blocks that were run again.

    Examples
    --------
    >>> from mlstate.activation import RecomputeReport
    >>> report = RecomputeReport([], ["layers.0", "layers.1"])
    >>> bool(report)
    True
    >>> print(report)
    2 blocks were run again: all gave the same bits
    """

    def __init__(self, findings: Sequence[Finding], checked: Sequence[str]) -> None:
        self.findings = list(findings)
        self.checked = list(checked)

    def __bool__(self) -> bool:
        return not self.findings

    def _title(self) -> str:
        count = len(self.checked)
        blocks = "1 block was" if count == 1 else f"{count:,} blocks were"
        found = len(self.findings)
        if not found:
            return f"{blocks} run again: all gave the same bits"
        return f"{blocks} run again: {found:,} finding{'' if found == 1 else 's'}"

    def _rows(self) -> list[list[str]]:
        return [[f.block, f.where, f.kind, f.text] for f in self.findings]

    def __str__(self) -> str:
        lines = [
            f"- {f.block}{', ' if f.where else ''}{f.where} ({f.kind}): {f.text}"
            for f in self.findings[:_ROWS]
        ]
        hidden = len(self.findings) - _ROWS
        more = [f"… {hidden:,} more"] if hidden > 0 else []
        return "\n".join([self._title(), *lines, *more])

    def __repr__(self) -> str:
        return f"<RecomputeReport: {self._title()}>"

    def _repr_html_(self) -> str:
        return table_html(self._title(), _HEADERS, self._rows())


@set_module("mlstate.activation")
def check(module: Any, plan: Any, sample: Any, *, blocks: Any = None) -> RecomputeReport:
    """Find what keeps a model's blocks from being recomputed, before a long run.

    Parameters
    ----------
    module : torch.nn.Module or sequence of blocks
        The model, in the mode in which it is trained.
    plan : Plan or None
        The blocks that it recomputes are run again, and its gradients are compared with those
        of a plain run. None: all blocks, without gradients of the whole.
    sample : torch.Tensor, tuple or dict
        What the model is called with, as for `Chain.from_torch`.
    blocks : str or sequence of callables, optional
        Which of its modules are the blocks, as for `Plan.apply`.

    Returns
    -------
    RecomputeReport
        True if every block gave the same bits again; else it names blocks, modules, operators
        and tensors.

    Raises
    ------
    ValueError
        As `Chain.from_torch` and `Plan.apply` raise it.
    ImportError
        torch is not installed.

    Notes
    -----
    Each block runs twice, a block with a finding four times; with a plan the model runs three
    times more. Generators, buffers and gradients are as before afterwards. What differs only
    now and then may not differ here: a good report is no proof.

    Examples
    --------
    >>> import torch
    >>> from mlstate.activation import Chain, check, plan
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    >>> chain = Chain([1, 1], [2, 2], [64, 64, 64], [64, 128])
    >>> print(check(model, None, torch.ones(4, 4)))
    2 blocks were run again: all gave the same bits
    """
    return backend_named("torch").check_recompute(module, plan, sample, blocks=blocks)
