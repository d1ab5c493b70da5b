"""`check`: arguments and report of a check that a model's blocks can be recomputed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._common.backend import backend_named
from .._common.report import Shown, Table
from .._common.text import count_text, shorten
from ._backend import ActivationBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROWS = 40
_CELL = 600  # characters of a name or text in reports
_COLUMNS = ["block", "where", "what", "in detail"]


class Finding(NamedTuple):
    """Reason why recomputing a block would not reproduce its first run.

    Attributes
    ----------
    block : str
        The block.
    where : str
        The module inside the block, and the operator or tensor.
    kind : str
        ``"random"`` (random numbers from outside of torch), ``"in place"`` (an input or a saved
        tensor was modified), ``"saved"`` (number, shape or dtype of saved tensors differs),
        ``"routing"`` (indices differ: other experts were chosen), ``"values"`` (bits differ),
        ``"error"`` (the block raised an error), ``"gradients"`` (of the whole model differ).
    text : str
        The difference, and a remedy.

    Examples
    --------
    >>> from mlstate.activation.records import Finding
    >>> Finding("layers.3", "router: aten.topk", "routing", "2 of 64 indices differ").kind
    'routing'
    """

    block: str
    where: str
    kind: str
    text: str


class RecomputeReport(Shown):
    """Result of `check`; true if there are no findings.

    Parameters
    ----------
    findings : sequence of Finding
        The findings, by block.
    checked : sequence of str
        The blocks that were recomputed.

    Attributes
    ----------
    findings : list of Finding
        The findings by block; findings about the whole model are last.
    checked : list of str
        The blocks that were recomputed.

    Examples
    --------
    >>> from mlstate.activation.records import RecomputeReport
    >>> report = RecomputeReport([], ["layers.0", "layers.1"])
    >>> bool(report)
    True
    >>> print(report)
    2 blocks were run again: all gave the same bits
    """

    def __init__(self, findings: Sequence[Finding], checked: Sequence[str]) -> None:
        self.findings: list[Finding] = list(findings)
        self.checked: list[str] = list(checked)

    def __bool__(self) -> bool:
        return not self.findings

    def _title(self) -> str:
        count = len(self.checked)
        blocks = "1 block was" if count == 1 else f"{count:,} blocks were"
        finding_count = len(self.findings)
        if not finding_count:
            return f"{blocks} run again: all gave the same bits"
        return f"{blocks} run again: {count_text(finding_count, 'finding')}"

    def _table(self) -> Table:
        return Table(self._title(), _COLUMNS, self.findings)

    def __str__(self) -> str:
        """Return the title and the first findings as lines."""
        lines = [
            f"- {block}{', ' if where else ''}{where} ({kind}): {text}"
            for block, where, kind, text in (
                (shorten(cell, _CELL) for cell in finding) for finding in self.findings[:_ROWS]
            )
        ]
        hidden = len(self.findings) - _ROWS
        more = [f"… {hidden:,} more"] if hidden > 0 else []
        return "\n".join([self._title(), *lines, *more])


def check(
    module: object, plan: object, sample: object, *, blocks: object = None
) -> RecomputeReport:
    """Check before a long run that a model's blocks can be recomputed.

    Parameters
    ----------
    module : torch.nn.Module or sequence of blocks
        The model, in the mode used for training.
    plan : Plan or None
        Checks the blocks that the plan recomputes, and compares the gradients of a run by the
        plan with those from a plain run. None: the plan that recomputes every block. Gradients
        are then compared only if the blocks themselves have no findings.
    sample : torch.Tensor, tuple or dict
        Arguments of the model, see `Chain.from_torch`.
    blocks : str or sequence of callables, optional
        The modules of the blocks, see `Plan.apply`.

    Returns
    -------
    RecomputeReport
        True if every block reproduced the same bits. Otherwise it lists blocks, modules,
        operators and tensors.

    Raises
    ------
    TypeError
        If `plan` is not a plan, `module` not a module or a sequence of blocks, or `sample` contains
        no tensor.
    ValueError
        See `Chain.from_torch` and `Plan.apply`.
    ImportError
        If torch is not installed.

    Notes
    -----
    Each block runs twice, a block with a finding four times, and the model three more times. Random
    generators, buffers and gradients are restored. A rare difference may not occur in this check,
    so a report without findings is not a proof.

    Examples
    --------
    >>> import torch
    >>> from mlstate.activation import Chain, check, plan
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    >>> chain = Chain([1, 1], [2, 2], [64, 64, 64], [64, 128])
    >>> print(check(model, None, torch.ones(4, 4)))
    2 blocks were run again: all gave the same bits
    """
    return backend_named("torch", ActivationBackend).check_recompute(
        module, plan, sample, blocks=blocks
    )
