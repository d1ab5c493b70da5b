"""The commands for stores of prompts: output and exit status."""

import hashlib

import numpy as np
import pytest
from toy_caches import FULL, HYBRID, TOKENS, flip, prefill, prefilled, store_at


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with store_at(tmp_path) as store:
        state = prefilled(HYBRID, TOKENS[:40])
        state.arrays["1.state"][...] = np.random.default_rng(0).random((1, 3, 5))
        store.put(TOKENS[:40], state)
        store.put(TOKENS, prefill(state, TOKENS))
        other = TOKENS[::-1][:32]
        store.put(other, prefilled(HYBRID, other))
        store.pin(other)
    return tmp_path


def test_prompts_are_listed_with_their_models(run, folder):
    status, lines, _ = run("prompts", "ls", "store")
    assert status == 0 and lines[0].startswith("store: 3 prompts, ")
    assert lines[1].split() == ["prompt", "model", "tokens", "ends", "with", "bytes", "pinned"]
    rows = {int(line.split()[2]): line.split() for line in lines[2:]}
    assert {tokens: (row[1], row[3], row[-1]) for tokens, row in rows.items()} == {
        40: ("toy", "snapshot", "no"),
        100: ("toy", "snapshot", "no"),
        32: ("toy", "snapshot", "yes"),
    }


def test_a_prompt_is_shown_with_tokens_and_entries(run, run_json, refused, folder):
    _, data = run_json("prompts", "ls", "store")
    prompt = next(each for each in data["prompts"] if each["tokens"] == 100)
    status, facts = run_json("prompts", "show", "store", prompt["prompt"][:10])
    assert status == 0 and facts["token_ids"] == TOKENS.tolist()
    assert [entry["name"] for entry in facts["entries"]][:2] == ["0.keys", "0.values"]
    status, lines, _ = run("prompts", "show", "store", prompt["prompt"][:10])
    assert status == 0 and "100 tokens" in lines[0] and "recurrent" in lines[6]
    refused("prompts", "show", "store", "xyz")
    assert "3 prompts begin with ''" in refused("prompts", "show", "store", "")


def test_digests_of_images_are_listed_and_shown(run, run_json, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with store_at(tmp_path) as store:
        for extra in (None, {40: "a", 60: 5}):
            store.put(TOKENS, prefilled(FULL, TOKENS, extra), extra=extra)
    _, data = run_json("prompts", "ls", "store")
    (prompt,) = (each for each in data["prompts"] if each["extra"])
    digest = hashlib.sha256(b"sa").hexdigest()
    assert prompt["extra"] == {"40": f"sha256:{digest}", "60": prompt["extra"]["60"]}
    _, lines, _ = run("prompts", "ls", "store")
    assert lines[1].split()[-1] == "extra"
    assert sorted(line.split()[-1] for line in lines[2:]) == ["0", "2"]
    _, lines, _ = run("prompts", "show", "store", prompt["prompt"])
    assert f"extra of token 40: sha256:{digest}" in lines


def test_commands_for_checkpoints_name_the_command_for_a_store(refused, folder):
    with store_at(folder / "empty"):
        pass
    for command in ("verify", "inspect"):
        for path in ("store", "empty/store"):
            assert "it is a store of prompts" in refused(command, path)


def test_damage_is_found_and_removed(run, run_json, folder):
    assert run("prompts", "verify", "store")[:2] == (0, ["store: good"])
    flip(folder, np.random.default_rng(0).random((1, 3, 5)).astype(np.float32).tobytes())
    status, data = run_json("prompts", "verify", "store")
    assert status == 1 and len(data["damage"]) == 1
    assert data["damage"][0]["file"].startswith("segment")
    status, lines, _ = run("prompts", "verify", "store")
    assert status == 1 and lines[0] == "store: damaged"
    assert lines[-1].startswith("to recover: mlstate prompts repair ")
    assert run("prompts", "repair", "store")[1][0] == "store: 1 problem repaired"
    assert run("prompts", "verify", "store")[0] == 0
    assert run("prompts", "ls", "store")[1][0].startswith("store: 2 prompts, ")


def test_a_prompt_that_lost_its_first_block_matches_when_it_is_put_again(
    run, run_json, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    before = prefilled(FULL, TOKENS)
    with store_at(tmp_path) as store:
        store.put(TOKENS, before)
    flip(tmp_path, np.ascontiguousarray(before.ordered("0.keys")[0, 0, 5]).tobytes())
    assert run("prompts", "repair", "store")[1][0] == "store: 1 problem repaired"
    _, data = run_json("prompts", "ls", "store")
    assert [(each["tokens"], each["whole"]) for each in data["prompts"]] == [(84, False)]
    assert "its first tokens are lost" in run("prompts", "ls", "store")[1][2]
    with store_at(tmp_path) as store:
        with store.match(TOKENS) as match:
            assert match.length == 0
        assert store.put(TOKENS, before) == 100
    _, data = run_json("prompts", "ls", "store")
    assert [(each["tokens"], each["whole"]) for each in data["prompts"]] == [(100, True)]


def test_prompts_are_listed_by_their_last_use_in_any_process(run_json, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = [TOKENS[:32], TOKENS[40:88], TOKENS[20:84]]
    with store_at(tmp_path) as store:
        for tokens in prompts:
            store.put(tokens, prefilled(FULL, tokens))
    with store_at(tmp_path) as store, store.match(prompts[0], full=True) as match:
        assert match.length == 32
    _, data = run_json("prompts", "ls", "store")
    assert [each["tokens"] for each in data["prompts"]] == [32, 64, 48]


def test_prune_keeps_pins(run, run_json, folder):
    assert "the rest is pinned" in run("prompts", "prune", "store", "--max-bytes", "1KB")[1][0]
    for each in (TOKENS[:40], TOKENS):
        with store_at(folder) as store:
            store.put(each, prefilled(HYBRID, each))
    status, data = run_json("prompts", "prune", "store", "--max-bytes", "1KB")
    assert status == 0 and data["freed_bytes"] > 0
    assert run("prompts", "ls", "store")[1][0].startswith("store: 1 prompt, ")
    status, lines, _ = run("prompts", "prune", "store")
    assert status == 0 and "freed" in lines[0]


@pytest.mark.parametrize("action", ["ls", "show", "verify", "repair", "prune"])
def test_a_folder_without_a_store_is_refused(refused, tmp_path, monkeypatch, action):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    more = ["x"] if action == "show" else []
    for path in ("missing", "other", "s3://bucket/store"):
        assert path.partition("/")[0] in refused("prompts", action, path, *more)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_a_store_of_full_attention_is_listed(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with store_at(tmp_path) as store:
        store.put(TOKENS[:32], prefilled(FULL, TOKENS[:32]))
        assert "toy" in store._repr_html_()
    _, lines, _ = run("prompts", "ls", "store")
    assert lines[2].split()[1:4] == ["toy", "32", "block"]


@pytest.mark.parametrize("seconds", ["nan", "-1"])
@pytest.mark.parametrize("action", ["repair", "prune"])
def test_a_wait_for_other_writers_without_end_is_refused(
    refused, tmp_path, monkeypatch, action, seconds
):
    monkeypatch.chdir(tmp_path)
    store_at(tmp_path).close()
    error = refused("prompts", action, "store", "--lock-timeout", seconds)
    assert "--lock-timeout must be 0 or more seconds" in error
