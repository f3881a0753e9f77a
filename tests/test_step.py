"""The optimizer step through DeepSpeed: the gradient does not depend on how rollouts are split."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from splitgrpo.zero import free_port
from utils import LOSSES

SCRIPT = Path(__file__).with_name("step_script.py")
OPTIONS = {"clip_eps": 0.2, "clip_eps_high": 0.2, "kl_coef": 0.04}


def make_job(folder, name="a", *, micro=16, accumulation=1, stage=2, **job):
    """One job of step_script.py with its DeepSpeed settings."""
    zero = {"stage": stage, "overlap_comm": False}
    if job.pop("offload", False):
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": job.pop("clipping", 1.0),
        "bf16": {"enabled": job.pop("bf16", False)},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-6, "weight_decay": 0.0, "eps": job.pop("eps", 1e-8)},
        },
    }
    path = folder / f"{name}.ds.json"
    path.write_text(json.dumps(config))
    return {"ds_config": str(path), "out": str(folder / name), "loss": "grpo", "steps": 2, "lr": 1e-2, "micro": micro,
            "loss_options": OPTIONS, "nan_steps": []} | job  # fmt: skip


def run_jobs(jobs, *, ranks=1):
    """Start `ranks` real processes that run the jobs one after the other; {name: (rank 0's tensors, metrics)}."""
    path = Path(jobs[0]["out"]).with_suffix(".jobs.json")
    path.write_text(json.dumps(jobs))
    port = str(free_port())
    # An environment without a compiler: nothing may be compiled, whatever the machine has.
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++", "OMP_NUM_THREADS": "1"}
    outputs = [path.with_suffix(f".rank{r}.txt") for r in range(ranks)]
    processes = []
    for r, output in enumerate(outputs):
        own = {
            "RANK": str(r),
            "LOCAL_RANK": str(r),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
        }
        with output.open("wb") as file:  # no pipe: one that nobody reads would stop a rank
            command = [sys.executable, str(SCRIPT), str(path)]
            env |= own | {"MASTER_PORT": port}
            processes.append(subprocess.Popen(command, env=env, stdout=file, stderr=file))
    try:
        codes = [p.wait(timeout=280) for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert not any(codes), "\n".join(o.read_text()[-3000:] for o in outputs)
    return {
        Path(job["out"]).name: (
            load_file(job["out"]),
            json.loads(Path(job["out"] + ".json").read_text()),
        )
        for job in jobs
    }


def run_step(folder, name="a", *, ranks=1, **job):
    """One job by itself."""
    return run_jobs([make_job(folder, name, **job)], ranks=ranks)[name]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All 16 rows in one micro-batch on one rank."""
    return run_step(tmp_path_factory.mktemp("whole"))


def assert_same(one, other, name=""):
    """Weights and the first gradient to a relative 1e-5 of each tensor's norm, Adam moments to 1e-4, and all metrics.

    A later gradient, and so a moment, is taken at weights that differ by rounding already.
    """
    for key, value in one[0].items():
        gap, bound = (value - other[0][key]).norm(), 1e-4 if "|exp_avg" in key[-12:] else 1e-5
        assert gap <= bound * value.norm() + 1e-12, f"{name} {key}: {gap} of {value.norm()}"
    for a, b in zip(one[1], other[1], strict=True):
        assert a.keys() == b.keys()
        for metric in a:
            assert b[metric] == pytest.approx(a[metric], rel=2e-5, abs=2e-6), f"{name} {metric}"


# Fifteen rows, so that two ranks never have equally many. Adam divides by |gradient| + eps: a small eps would blow up the
# rounding of gradients that are nearly 0.
SHAPE = {"num_groups": 3, "group_size": 5, "steps": 3, "clipping": 1e9, "lr": 1e-2, "eps": 1e-3}
# gspo with bounds of 0.2: with its own, all of these old rollouts are clipped in the third step.
DEFAULTS = {name: {} for name in LOSSES} | {"grpo": OPTIONS, "gspo": OPTIONS}


def splits(loss, ranks):
    """Every micro-batch size, accumulation and ZeRO stage for grpo, a third of them for each other loss."""
    found = {}
    for i, (micro, accumulation, stage) in enumerate(
        itertools.product((1, 2, 5, 15), (1, 4), (0, 2, 3))
    ):
        if loss == "grpo" or (i + ranks) % 3 == list(LOSSES).index(loss) % 3:
            name = f"{loss}-ranks{ranks}-micro{micro}-acc{accumulation}-zero{stage}"
            found[name] = {"micro": micro, "accumulation": accumulation, "stage": stage}
    found[f"{loss}-ranks{ranks}-plain"] = {"micro": 4, "plain": True}
    for split in ("reversed", "padded"):
        found[f"{loss}-ranks{ranks}-{split}"] = {"micro": 5, "split": split}
    if ranks > 1:
        found[f"{loss}-lopsided"] = {"micro": 4, "split": "lopsided"}
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradient_and_weights_do_not_depend_on_how_a_step_is_split(tmp_path, ranks):
    """Micro-batches, accumulation, ranks, ZeRO stage, row order, padding, and a rank that has nothing, for each loss.

    What they are compared with went through transformers' own forward pass; all but ZeRO-3 took the packed one.
    """
    jobs, expected = [], {}
    for loss, options in DEFAULTS.items():
        shape = SHAPE | {"loss": loss, "loss_options": options}
        expected[loss] = make_job(tmp_path, f"{loss}-whole", micro=15, plain=True, **shape)
        jobs += [make_job(tmp_path, n, **shape, **how) for n, how in splits(loss, ranks).items()]
    whole = run_jobs(list(expected.values()))
    for name, other in run_jobs(jobs, ranks=ranks).items():
        loss = name.partition("-")[0]
        assert_same(whole[f"{loss}-whole"], other, name)
        assert all(r["grad_norm"] > 0 for r in other[1])


def test_every_lora_matrix_moves_and_adam_state_is_float32_under_bf16(tmp_path):
    tensors, _ = run_step(tmp_path, bf16=True, steps=2)
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    b = {k: v for k, v in tensors.items() if k.endswith("lora_B.weight")}
    assert len(b) == 14
    assert all(v.norm() > 0 for v in b.values())
    assert all(tensors[f"{k}|exp_avg"].norm() > 0 for k in b)


def test_a_small_step_moves_float32_masters_that_bf16_would_round_away(tmp_path):
    start, _ = run_step(tmp_path, "start", bf16=True, steps=1, lr=0.0)
    moved, _ = run_step(tmp_path, "moved", bf16=True, steps=2, lr=1e-6)
    a = [k for k in start if k.endswith("lora_A.weight")]
    changes = [(moved[k] - start[k]).abs().max().item() for k in a]
    assert all(0 < c < 1e-5 for c in changes), changes


def test_a_learning_rate_of_zero_leaves_a_loaded_adapter_alone(tmp_path):
    jobs = [make_job(tmp_path, f"{n}", lr=0.0, trained=True, steps=n) for n in (1, 3)]
    one, three = run_jobs(jobs).values()
    loaded = [k for k in one[0] if k.endswith("lora_B.weight")]
    assert len(loaded) == 14
    assert all(0.05 < one[0][k].std() < 0.2 for k in loaded)
    assert all(torch.equal(one[0][k], three[0][k]) for k in one[0] if k.endswith(".weight"))
    assert three[1][0]["loss"] == three[1][2]["loss"]


@pytest.mark.parametrize("bf16", [True, False])
def test_a_non_finite_gradient_is_skipped_and_said_and_leaves_the_weights_finite(tmp_path, bf16):
    tensors, results = run_step(tmp_path, bf16=bf16, steps=3, nan_steps=[1])
    assert [r["applied"] for r in results] == [1.0, 0.0, 1.0]
    assert math.isnan(results[1]["loss"])
    assert all(t.isfinite().all() for t in tensors.values())


def test_the_logged_gradient_norm_is_that_before_clipping(tmp_path, whole):
    _, results = run_step(tmp_path, clipping=1e-3)
    assert results[0]["grad_norm"] == pytest.approx(whole[1][0]["grad_norm"], rel=1e-5)
    assert results[0]["grad_norm"] > 1e-3


def test_corrected_masked_and_entropy_steps_do_not_depend_on_the_split_either(tmp_path):
    """Stale rollouts: earlier LoRA weights are put back for a forward pass, under ZeRO-3 too, and taken out again."""
    more = {
        "staleness": 1,
        "mask_truncated": True,
        "entropy_coef": 0.01,
        "loss": "dapo",
        "loss_options": {},
    }
    ways = {
        level: SHAPE | more | {"correction": ("truncate", level, 2.0)}
        for level in ("token", "sequence")
    }
    whole = run_jobs(
        [make_job(tmp_path, f"{n}-whole", micro=15, plain=True, **w) for n, w in ways.items()]
    )
    jobs = [
        make_job(tmp_path, f"{n}-{stage}", micro=2, stage=stage, **w)
        for n, w in ways.items()
        for stage in (0, 2, 3)
    ]
    for name, other in run_jobs(jobs, ranks=2).items():
        assert_same(whole[name.partition("-")[0] + "-whole"], other, name)
        assert all(r["mismatch_weight"] > 0 for r in other[1])


def test_measuring_the_mismatch_of_stale_rollouts_leaves_the_weights_bit_for_bit(tmp_path):
    jobs = [
        make_job(tmp_path, f"{age}-{bf16}", staleness=age, bf16=bf16, steps=3)
        for age in (0, 1)
        for bf16 in (False, True)
    ]
    found = run_jobs(jobs)
    for bf16 in (False, True):
        fresh, stale = found[f"0-{bf16}"], found[f"1-{bf16}"]
        assert all(torch.equal(fresh[0][k], stale[0][k]) for k in fresh[0])
        # The first step is on the sampler's weights in both; later ones measure the version before.
        assert stale[1][0] == fresh[1][0]
        assert stale[1][1]["mismatch_mean"] != fresh[1][1]["mismatch_mean"]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_not_finite_on_one_rank_is_skipped_on_all_whatever_the_zero_stage(tmp_path, value):
    bad = {"steps": 3, "nan_steps": [1], "nan_rank": 1, "nan_value": value, "micro": 4}
    jobs = [make_job(tmp_path, f"zero{stage}", stage=stage, **bad) for stage in (0, 1, 2, 3)]
    for name, (tensors, results) in run_jobs(jobs, ranks=2).items():
        assert [r["applied"] for r in results] == [1.0, 0.0, 1.0], name
        assert all(t.isfinite().all() for t in tensors.values()), name
        assert not math.isfinite(results[1]["grad_norm"]), name


def test_a_step_of_a_single_completion_on_two_ranks_equals_that_on_one(tmp_path):
    job = {"num_groups": 1, "group_size": 1, "loss": "reinforce", "loss_options": {}}
    one = run_step(tmp_path, "one", **job)
    assert_same(one, run_step(tmp_path, "two", ranks=2, **job))


def test_completions_cut_by_the_limit_carry_no_gradient_and_count_in_no_denominator(tmp_path):
    """All sixteen are cut in the empty job: it still takes a step, with loss 0 and no gradient."""
    masked, kept = run_step(tmp_path, "masked", mask_truncated=True), run_step(tmp_path, "kept")
    assert masked[1][0]["loss"] != kept[1][0]["loss"]
    empty = run_step(tmp_path, "empty", ranks=2, mask_truncated=True, all_cut=True)
    assert [r["loss"] for r in empty[1]] == [0.0, 0.0]
    assert [r["grad_norm"] for r in empty[1]] == [0.0, 0.0]
