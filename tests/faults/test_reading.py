"""Calls fail while a checkpoint is loaded: the load returns complete arrays or raises."""

import fault_harness
import pytest
from fault_harness import ERRORS
from test_faults import complain

USUAL = ["open", "pread"]  # in the ordinary test run
READING = ["open", "open_folder", "close_read", "read", "pread", "stat", "list"]


@pytest.mark.parametrize("call", fault_harness.amount(USUAL, READING, READING))
def test_each_call_fails_once(bench, call):
    complaints = []
    (counts, *_) = bench.counts(None)
    for n in fault_harness.spread(counts[call], bench.most(1, 2)):
        for how in ERRORS[call][: fault_harness.amount(1, 2)]:
            complaints += bench.try_loading(f"{call}:{n}:{how}")
    complain(complaints)


def test_loading_makes_no_changing_call(bench):
    assert all(counts["change"] == 0 for counts in bench.counts(None))


@pytest.mark.turns(1)
@pytest.mark.parametrize("fault", ["mmap:1:ENOMEM", "mmap:1+:ENOMEM", "mmap:2+:EACCES"])
def test_mapping_fails(bench, fault):
    complain(bench.try_loading(fault, mmap=True))


def test_failed_header_reads_of_mapped_files_raise(bench):
    complaints = []
    for call in ("open", "pread"):
        for n in fault_harness.spread(bench.counts(None)[0][call], bench.most(1, 2)):
            complaints += bench.try_loading(f"{call}:{n}:EIO", mmap=True)
    complain(complaints)
