"""Every class that is shown as a table: its text and its page are short, and escaped."""

import numpy as np
import pytest
from html_page import Page

from mlstate.activation import ActivationManager, Chain, IntervalStrategy, Plan, pareto
from mlstate.activation.records import Finding, RecomputeReport
from mlstate.checkpoint import VerifyReport
from mlstate.checkpoint.records import Problem
from mlstate.coreml.records import StateMove, TransitionPlan
from mlstate.fsdp.records import BackwardReport, Bucket, GradientReport, Mismatch
from mlstate.kv import CacheEntry, CacheSpec
from mlstate.state import CompatibilityResult, diff

COUNT = 500
HOSTILE = "<script>alert('x')</script>\n\x1b[31m$x_$^" + "n" * 5000
NAMES = [f"{HOSTILE}{i}" for i in range(COUNT)]


def chain():
    costs = ([1] * COUNT, range(COUNT), [10] * (COUNT + 1), [40] * COUNT)
    return Chain(*costs, names=NAMES, note=HOSTILE[:50])


def saving_plan():
    steps = [("save", i) for i in range(COUNT)]
    return Plan(chain(), steps + [("backward", i) for i in reversed(range(COUNT))])


def deciding_manager():
    manager = ActivationManager(IntervalStrategy(2))
    for i, name in enumerate(NAMES):
        manager.decide(name, np.zeros(256, np.float32), i)
    return manager


def backward_report():
    buckets = [Bucket((name, name), 8, i, i, i, i + 0.5, (0.0,)) for i, name in enumerate(NAMES)]
    return BackwardReport([(HOSTILE, 0.0)], COUNT, buckets)


def compatibility():
    result = CompatibilityResult()
    for name in NAMES:
        result.add_warning(name)
    return result


def verify_report():
    problems = [Problem("altered", HOSTILE, name, 0, 0, 5, 9, HOSTILE) for name in NAMES]
    return VerifyReport("/ckpt", problems, leftover=NAMES, strange=NAMES)


def cache_spec():
    return CacheSpec(CacheEntry(name, "opaque", (i + 1,), "uint8") for i, name in enumerate(NAMES))


SHOWN = {
    "chain": chain,
    "plan": saving_plan,
    "curve": lambda: pareto(Chain([1] * 9, range(9), range(10, 20), range(40, 49))),
    "manager": deciding_manager,
    "findings": lambda: RecomputeReport([Finding(n, n, "values", n) for n in NAMES], NAMES),
    "backward": backward_report,
    "gradients": lambda: GradientReport([Mismatch(n, 0, 0, 1.0, 2.0) for n in NAMES], 500, 1e-5),
    "diff": lambda: diff({n: np.ones(2) for n in NAMES}, {n: np.zeros(2) for n in NAMES}),
    "compatibility": compatibility,
    "verify": verify_report,
    "transition": lambda: TransitionPlan(
        5, [StateMove(n, "none", (1, 2), None, 0, 2048, HOSTILE) for n in NAMES], 0, 0
    ),
    "cache spec": cache_spec,
}


@pytest.mark.parametrize("make", SHOWN.values(), ids=SHOWN)
def test_a_page_is_short_and_shows_hostile_names_as_they_are(make):
    html = make()._repr_html_()
    page = Page(html)
    assert "script" not in page.tags and page.attributes <= {"class", "open", "style"}
    assert len(html) < 250_000 and html.count("<tr>") <= 2 * 102 and "\x1b" not in html
    assert ("<script>" in page.text) == (make is not SHOWN["curve"])


@pytest.mark.parametrize(
    "name", ["chain", "plan", "manager", "findings", "backward", "gradients", "diff"]
)
def test_a_text_has_the_first_rows_and_counts_the_others(name):
    report = SHOWN[name]()
    *lines, last = (report.report() if name == "plan" else str(report)).split("\n")
    assert last.startswith("… ") and last.endswith(" more")
    assert 20 < len(lines) < 70 and max(map(len, lines)) < 2000
    assert not any("\x1b" in line for line in lines)
    assert len(repr(report)) < 5000 and "\x1b" not in repr(report)
