"""On a card: every fast path gives what the plain one gives there too, by the checks of test_fast.py; and benchmarks/gpu.sh.

SPLITGRPO_TEST_DEVICE names the device (default cuda:0, and skipped where there is none); gpu.sh --cpu says cpu.
"""

import argparse
import json
import os
import subprocess
import sys
import types
from itertools import chain
from pathlib import Path

import pytest
import test_fast
import torch
from test_engine import PROMPTS, SETTINGS, generate
from test_fast import ROWS, SHAPE, assert_same_groups, both_engines
from transformers import Qwen2Config, Qwen2ForCausalLM

from splitgrpo import launch, packed, vocab
from splitgrpo.engines import cache
from splitgrpo.engines.base import Sampling
from splitgrpo.engines.fast import FastEngine
from splitgrpo.engines.hf import HFEngine

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import gpu  # noqa: E402

DEVICE = torch.device(os.environ.get("SPLITGRPO_TEST_DEVICE", "cuda:0"))
card = pytest.mark.skipif(
    DEVICE.type == "cuda" and not torch.cuda.is_available(), reason=f"no {DEVICE} here"
)
# Heads as Qwen2.5's: of 128, six query heads to a key head.
HEADS_OF_128 = "heads of 128"
WIDE = SHAPE | {"hidden_size": 768, "num_attention_heads": 6, "num_key_value_heads": 1,
                "initializer_range": 0.04}  # fmt: skip
KINDS = ("qwen2", "qwen3", HEADS_OF_128)
# Nats; the largest difference that rounding makes of one token, of two ways to compute it.
NEAR = {torch.float32: 2e-4, torch.bfloat16: 0.15}
GRADIENT_NEAR = {torch.float32: 2e-4, torch.bfloat16: 0.2}  # of the gradient's norm, each layer
MISMATCH_NEAR = 0.02  # nats, mean over tokens, bfloat16


@pytest.fixture(autouse=True)
def _as_on_a_card(monkeypatch):
    """Torch's own attention, whatever the device; float32 products not rounded to TF32."""
    monkeypatch.setattr(packed, "MAX_SCORES", 0)
    monkeypatch.setitem(
        test_fast.KINDS, HEADS_OF_128, lambda: Qwen2ForCausalLM(Qwen2Config(**WIDE))
    )
    assert torch.get_float32_matmul_precision() == "highest"


@card
@pytest.mark.parametrize("kind", KINDS)
def test_in_float32_the_fast_engine_draws_the_plain_one_s_tokens_on_the_card(kind):
    plain, fast = both_engines(kind=kind, device=DEVICE)
    for temperature, top_k, top_p in SETTINGS:
        sampling = Sampling(temperature, top_k, top_p, max_new_tokens=15)
        one, other = (generate(e, PROMPTS, 4, sampling, seed=5) for e in (plain, fast))
        assert_same_groups(one, other, atol=NEAR[torch.float32])
        refs = [e.ref_logprobs(PROMPTS[0], one[0], sampling) for e in (plain, fast)]
        for a, b in zip(*refs, strict=True):
            assert abs(a - b).max() < NEAR[torch.float32]


@card
@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_the_fast_engine_follows_the_plain_one_up_to_rounding_on_the_card(kind):
    """A token whose point lies at a border is another one, and all after it: what is before is compared."""
    plain, fast = both_engines(kind=kind, device=DEVICE, dtype=torch.bfloat16)
    sampling = Sampling(1.0, 0, 1.0, max_new_tokens=15)
    one, other = (generate(e, PROMPTS, 8, sampling, seed=5) for e in (plain, fast))
    tokens = common = 0
    for a, b in zip(chain(*one), chain(*other), strict=True):
        n = min(len(a.token_ids), len(b.token_ids))
        differ = (a.token_ids[:n] != b.token_ids[:n]).nonzero()[0]
        same = int(differ[0]) if len(differ) else n
        tokens, common = tokens + n, common + same
        assert abs(a.logprobs[:same] - b.logprobs[:same]).max(initial=0) < NEAR[torch.bfloat16]
    assert common > 0.6 * tokens


@card
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_give_log_probs_and_gradient_of_padded_ones_on_the_card(kind, rows, dtype):
    (plain, plain_grad), (fast, fast_grad) = test_fast.padded_and_packed(
        rows, kind=kind, dtype=dtype, device=DEVICE
    )
    assert fast.device.type == DEVICE.type
    assert fast.dtype == torch.float32
    torch.testing.assert_close(fast, plain, atol=NEAR[dtype], rtol=0)
    for name, grad in plain_grad.items():
        gap = (fast_grad[name].float() - grad.float()).norm() / grad.float().norm()
        assert gap < GRADIENT_NEAR[dtype], f"{name}: {gap}"


@card
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [1, 3000, 1 << 22])
def test_log_probs_by_parts_of_the_vocabulary_on_the_card(held, dtype, monkeypatch):
    monkeypatch.setitem(vocab.MAX_LOGITS, DEVICE.type, held)
    test_fast.check_log_probs_by_parts(dtype, DEVICE)


@card
@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_sampler_and_learner_agree_on_the_card(kind):
    gaps = {e: test_fast.mismatch_in_bfloat16(e, kind=kind, device=DEVICE) for e in (FastEngine, HFEngine)}  # fmt: skip
    assert gaps[FastEngine] < MISMATCH_NEAR, gaps


def test_bfloat16_caches_as_a_card_has_them_round_no_score(monkeypatch):
    """On the CPU, whose own cache is float32: the products that only cards have are made of float32 ones."""
    real, seen = torch.bmm, []

    def bmm(a, b, out_dtype=None):
        assert a.dtype == b.dtype
        if out_dtype is None:
            return real(a, b)
        seen.append(a.dtype)
        return real(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "bmm", bmm)
    gaps = []
    for held in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(cache, "held_dtype", lambda keys, held=held: held)
        gaps.append(test_fast.mismatch_in_bfloat16(FastEngine, kind=HEADS_OF_128))
    assert set(seen) == {torch.bfloat16}
    assert gaps[1] < 2 * gaps[0], gaps


def test_the_script_for_a_card_walks_its_whole_road_on_the_cpu(tmp_path):
    out = tmp_path / "figures.json"
    command = ["bash", ROOT / "benchmarks/gpu.sh", "--cpu", "--steps", "2", "--out", out]
    env = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["failed"] == []
    assert "passed" in found["tests"]
    assert found["probe"]["square"] > 0
    run = found["workers"]
    assert run["steps"] == 2
    assert run["parameters"] > 100_000  # each once: the output layer is the embedding
    for name in ("sampler", "learner"):
        assert run[f"{name}_tokens_per_s"] > 0
        assert run["memory"][name]["host_mib"] > 50
        assert f"{name}: " in done.stdout
    assert "nothing failed" in done.stdout


def test_the_script_for_a_card_ends_with_2_where_there_is_none_and_says_so():
    env = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", ROOT / "benchmarks/gpu.sh"],
        capture_output=True, text=True, timeout=100, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 2
    assert "nothing was run" in done.stderr
    assert done.stdout == ""


def run_that(**change):
    """What benchmarks/gpu.py reads of a run of two steps, sound but for `change`."""
    step = {"completion_tokens": 100, "train_s": 2.0, "step_s": 4.0, "loss": 0.1, "mismatch_mean": 0.01}  # fmt: skip
    rows = [step | {"step": i, "train_s": 20.0 / i**2, "skipped_steps": 0} for i in (1, 2)]
    rows[-1] |= change
    return rows


BOOKS = {0: types.SimpleNamespace(returncode=0, stdout="", stderr=""),
         1: types.SimpleNamespace(returncode=1, stdout="3 groups too many", stderr="")}  # fmt: skip
UNSOUND = {
    "a loss": (run_that(loss=float("nan")), [5.0, 6.0], 0, "losses"),
    "a skipped step": (run_that(skipped_steps=1), [5.0, 6.0], 0, "1 steps without a finite loss"),
    "a gap": (run_that(mismatch_mean=0.3), [5.0, 6.0], 0, "differ by"),
    "no gap measured": (run_that(mismatch_mean=float("nan")), [5.0, 6.0], 0, "differ by"),
    "a step missing": (run_that()[:1], [5.0, 6.0], 0, "1 of 2 steps"),
    "a round missing": (run_that(), [5.0], 0, "1 rounds"),
    "books": (run_that(), [5.0, 6.0], 1, "3 groups too many"),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "rates", "books", "said"), UNSOUND.values(), ids=UNSOUND)
def test_a_run_that_ended_well_but_is_not_sound_is_a_failure(rows, rates, books, said):
    gpu.check_run(run_that(), [5.0, 6.0], 2, BOOKS[0])
    with pytest.raises(gpu.Failed, match=said):
        gpu.check_run(rows, rates, 2, BOOKS[books])


def test_rates_leave_out_the_first_step_and_shares_are_of_the_probe_s_rates():
    found = gpu.summary(run_that(), [1.0, 30.0, 50.0])
    assert found["sampler_tokens_per_s"] == 40
    assert found["learner_tokens_per_s"] == 20
    assert found["loop_tokens_per_s"] == 25
    memory = {name: {"host_mib": 512.0} for name in ("sampler", "learner")}
    run = found | {"parameters": 1_000_000_000, "memory": memory}
    probed = {"card": "X", "square": 0.16, "skinny": 0.4}
    text = "\n".join(gpu.lines_of({"probe": probed, "workers": run}))
    assert "sampler: 40 tokens/s, 20.0% of the skinny rate" in text
    assert "learner: 20 tokens/s, 50.0% of the square rate" in text
    assert "0.50 GiB" in text


def test_a_part_that_fails_or_raises_is_reported_and_the_others_run(monkeypatch, capsys, tmp_path):
    def fails(*args):
        raise gpu.Failed("no such luck")

    monkeypatch.setattr(gpu, "run_tests", fails)
    monkeypatch.setattr(gpu, "run_probe", lambda *args: 1 / 0)
    monkeypatch.setattr(gpu, "run_workers", lambda *args: {"steps": 2})
    args = argparse.Namespace(only=list(gpu.PARTS), steps=2)
    found, failed = gpu.run_all(args, gpu.CPU, tmp_path)
    assert found == {"workers": {"steps": 2}}
    assert failed == ["tests", "probe"]
    said = capsys.readouterr().err
    assert "FAILED tests (0 s) no such luck" in said
    assert "FAILED probe (0 s) ZeroDivisionError" in said
    monkeypatch.setattr(gpu, "BUDGET_S", 10.0)
    assert gpu.run_all(args, gpu.CPU, tmp_path) == ({}, list(gpu.PARTS))


def test_tests_that_were_skipped_are_no_passed_ones(monkeypatch):
    """As where torch sees no card in the tests' own process."""
    done = types.SimpleNamespace(returncode=0, stdout="3 passed, 42 skipped in 1.2s\n", stderr="")
    monkeypatch.setattr(gpu.subprocess, "run", lambda *args, **how: done)
    with pytest.raises(gpu.Failed, match="42 skipped"):
        gpu.run_tests(gpu.CARD, 100.0)


def test_a_run_past_its_limit_is_ended_and_is_a_failure(monkeypatch, tmp_path):
    def train(flags, *, run_dir, check_stop, commands):
        run_dir.mkdir()
        (run_dir / "learner.log").write_text("its last words\n")
        while True:
            check_stop()

    monkeypatch.setattr(launch, "train", train)
    monkeypatch.setattr(gpu.common, "measure", lambda *args, **how: {"parameters": 1})
    monkeypatch.setattr(gpu, "LAUNCH_END_S", 0.9)
    with pytest.raises(gpu.Failed, match=r"took longer than 1 s\n    learner.log: its last words"):
        gpu.run_workers(gpu.CPU, tmp_path, 2, 1.0)
