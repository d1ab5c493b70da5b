"""What went wrong in other stores of prompts, each as a test; the project is named in each."""

import os
import signal
import subprocess
import sys
import time

import child
import numpy as np
import pytest
from toy_caches import (
    FULL,
    HYBRID,
    TOKENS,
    check_every_match,
    empty_state,
    is_zero,
    prefill,
    prefilled,
    spec_of,
    store_at,
)

HEAD = (
    "import os, sys; from pathlib import Path; import numpy as np\n"
    "from toy_caches import *\n"
    "folder = Path(sys.argv[1])\n"
)


def start(folder, program, **variables):
    """Start a program in another process."""
    command = [sys.executable, "-c", HEAD + program, str(folder)]
    environment = os.environ | child.PATHS | variables
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def run(folder, program, *, kill_after=None):
    """Run a program; return its exit status and output."""
    process = start(folder, program)
    if kill_after is not None:
        process.stdout.readline()  # it is ready
        time.sleep(kill_after)
        process.kill()
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def test_lmcache_answers_after_a_restart_are_not_corrupt(tmp_path):
    prompts = [np.random.default_rng(seed).integers(0, 9, 90) for seed in range(38)]
    with store_at(tmp_path) as store:
        for tokens in prompts:
            store.put(tokens, prefilled(FULL, tokens))
    with store_at(tmp_path) as store:
        assert check_every_match(store, prompts, FULL) == [90] * 38


def test_lmcache_a_request_never_gets_the_content_of_another_one(tmp_path):
    rng = np.random.default_rng(1)
    with store_at(tmp_path) as store:
        store.put(TOKENS, prefilled(HYBRID, TOKENS))
        for place in rng.integers(0, 100, 40):
            other = TOKENS.copy()
            other[place] = (other[place] + 1) % 1000
            with store.match(other, full=True) as match:
                assert match.length == 0  # the only snapshot is behind the difference
    with store_at(tmp_path / "full") as store:
        store.put(TOKENS, prefilled(FULL, TOKENS))
        for place in rng.integers(0, 100, 40):
            other = TOKENS.copy()
            other[place] = (other[place] + 1) % 1000
            (length,) = check_every_match(store, [other], FULL)
            assert length == place - place % 16


def test_lmcache_a_failed_put_is_not_visible_and_leaves_the_others(tmp_path):
    """The disk is full in the middle of a put, by a limit for the size of files."""
    program = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "store = store_at(folder)\n"
        "store.put(TOKENS[:40], prefilled(FULL, TOKENS[:40]))\n"
        "most = store.stats()['disk_bytes'] + 3000\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))\n"
        "try:\n"
        "    store.put(TOKENS[::-1], prefilled(FULL, TOKENS[::-1]))\n"
        "except OSError as error:\n"
        "    print('refused', type(error).__name__)\n"
        "with store.match(TOKENS[::-1]) as match:\n"
        "    print(match.length)\n"
        "print(check_every_match(store, [TOKENS], FULL))\n"
    )
    status, output = run(tmp_path, program)
    assert status == 0 and output.split("\n")[:3] == ["refused StoreError", "0", "[40]"]
    with store_at(tmp_path) as store:
        assert check_every_match(store, [TOKENS, TOKENS[::-1]], FULL) == [40, 0]
        store.put(TOKENS[::-1], prefilled(FULL, TOKENS[::-1]))
        assert check_every_match(store, [TOKENS, TOKENS[::-1]], FULL) == [40, 100]


@pytest.mark.parametrize("spec", ["FULL", "HYBRID"])
def test_rapid_mlx_a_crash_does_not_poison_the_store(tmp_path, spec):
    program = (
        "store = store_at(folder)\n"
        "print('ready', flush=True)\n"
        "for seed in range(10_000):\n"
        "    tokens = np.random.default_rng(seed).integers(0, 9, 60)\n"
        f"    store.put(tokens, prefilled({spec}, tokens))\n"
    )
    prompts = [np.random.default_rng(seed).integers(0, 9, 60) for seed in range(200)]
    before = 0
    for number in range(6):
        status, _ = run(tmp_path, program, kill_after=0.05 + 0.03 * number)
        assert status == -signal.SIGKILL
        with store_at(tmp_path) as store:
            lengths = check_every_match(store, prompts, {"FULL": FULL, "HYBRID": HYBRID}[spec])
            assert store.verify() == []
            stored = sum(length == 60 for length in lengths)
            assert set(lengths) <= {0, 60} and stored >= before  # no earlier prompt is lost
            before = stored
    assert before


def test_omlx_keys_without_their_recurrent_state_do_not_match(tmp_path):
    with store_at(tmp_path) as store:
        store.put(TOKENS, prefilled(HYBRID, TOKENS), snapshot=False)
        with store.match(TOKENS) as match:
            assert (match.length, match.limit) == (0, "1.state")
            state = prefilled(HYBRID, TOKENS)
            assert store.restore(match, into=state) == 0 and is_zero(state)


def test_omlx_a_hybrid_reuses_the_tokens_that_two_prompts_share(tmp_path):
    """18,432 of 24,223 tokens were shared, and none was reused."""
    other = TOKENS.copy()
    other[76:] += 1
    with store_at(tmp_path, snapshots=16) as store:
        state = empty_state(HYBRID)
        for stop in store.stops(TOKENS):
            store.put(TOKENS[:stop], prefill(state, TOKENS[:stop]))
        assert check_every_match(store, [other], HYBRID) == [64]


def test_llama_cpp_a_hybrid_is_reused_after_a_restart(tmp_path):
    with store_at(tmp_path) as store:
        store.put(TOKENS, prefilled(HYBRID, TOKENS))
    with store_at(tmp_path) as store:
        assert check_every_match(store, [np.append(TOKENS, 5)], HYBRID) == [100]


def test_vllm_no_key_is_published_for_a_state_that_was_not_captured(tmp_path):
    with store_at(tmp_path) as store:
        state = prefilled(HYBRID, TOKENS[:48])
        store.put(TOKENS[:48], state)
        store.put(TOKENS[:96], prefill(state, TOKENS[:96]), snapshot=False)
        assert check_every_match(store, [TOKENS], HYBRID) == [48]


def test_lmcache_a_put_returns_the_number_of_tokens_stored(tmp_path):
    """One of 25 pages was stored, and the result was success."""
    state = prefilled(FULL, TOKENS)
    with store_at(tmp_path, max_bytes=state.nbytes // 6) as store:
        stored = store.put(TOKENS, state)
        assert stored < 100
        with store.match(TOKENS) as match:
            assert match.length == stored


def test_vmlx_a_put_does_not_copy_the_cache(tmp_path):
    program = (
        "import resource\n"
        "cache = np.ones((8, 1, 8, 4096, 128), np.float16)\n"  # 64 MiB
        "store = PromptStore(folder / 'store', model='m')\n"
        "store.put(np.arange(256), cache)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert store.put(np.arange(4096), cache) == 4096\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    status, output = run(tmp_path, program)
    assert status == 0 and int(output) < 16 << 10, output  # KiB


def test_mlx_engine_a_session_does_not_write_its_cache_again_each_turn(tmp_path):
    """40 GB were written in one session."""
    state = empty_state(spec_of("full", "full", head_dim=64))
    with store_at(tmp_path) as store:
        for stop in range(2, 101, 2):
            store.put(TOKENS[:stop], prefill(state, TOKENS[:stop]))
        written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    row = state.nbytes // 256
    turns = sum((stop % 16 or 16) for stop in range(2, 101, 2)) * row
    rewritten = sum(range(2, 101, 2)) * row
    assert written < turns + 60 * 2000 < rewritten / 2


def test_ollama_a_second_restore_gives_the_same_bits(tmp_path):
    with store_at(tmp_path) as store:
        store.put(TOKENS, prefilled(HYBRID, TOKENS))
        assert check_every_match(store, [TOKENS] * 3, HYBRID) == [100] * 3


def test_many_processes_put_and_restore_on_one_folder(tmp_path):
    program = (
        "seed = int(os.environ['SEED'])\n"
        "store = store_at(folder, lock_timeout=60)\n"
        "prompts = [np.random.default_rng(s).integers(0, 9, 60) for s in range(20)]\n"
        "for place in np.random.default_rng(seed).permutation(20):\n"
        "    store.put(prompts[place], prefilled(HYBRID, prompts[place]))\n"
        "    check_every_match(store, prompts, HYBRID)\n"
        "print(check_every_match(store, prompts, HYBRID))\n"
    )
    for process in [start(tmp_path, program, SEED=str(seed)) for seed in range(3)]:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and output == f"{[60] * 20}\n"
