"""The optimizer step through DeepSpeed: the gradient does not depend on how rollouts are split."""

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
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "weight_decay": 0.0}},
    }
    path = folder / f"{name}.ds.json"
    path.write_text(json.dumps(config))
    return {"ds_config": str(path), "out": str(folder / name), "loss": "grpo", "steps": 2, "lr": 1e-2, "micro": micro,
            "loss_options": OPTIONS, "nan_steps": []} | job  # fmt: skip


def run_jobs(jobs, *, ranks=1):
    """Start `ranks` real processes that run the jobs one after the other; {name: (rank 0's tensors, metrics)}."""
    port = str(free_port())
    # An environment without a compiler: nothing may be compiled, whatever the machine has.
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(jobs)],
            env=env | {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(ranks),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for r in range(ranks)
    ]  # fmt: skip
    try:
        outputs = [p.communicate(timeout=280)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert all(p.returncode == 0 for p in processes), "\n".join(outputs)[-3000:]
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


def assert_same(one, other):
    tensors, results = one
    for key, value in other[0].items():
        torch.testing.assert_close(value, tensors[key], rtol=2e-4, atol=2e-6, msg=key)
    for a, b in zip(results, other[1], strict=True):
        for name in a:
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("ranks", "micro", "accumulation"), [(1, 4, 4), (1, 2, 8), (2, 8, 1), (2, 2, 4)]
)
def test_the_gradient_does_not_depend_on_micro_batches_accumulation_or_ranks(
    whole, tmp_path, ranks, micro, accumulation
):
    other = run_step(tmp_path, ranks=ranks, micro=micro, accumulation=accumulation)
    assert_same(whole, other)
    assert all(r["grad_norm"] > 0 for r in other[1])


def test_zero_stage_3_and_optimizer_offload_give_the_same_weights(whole, tmp_path):
    assert_same(whole, run_step(tmp_path, "stage3", ranks=2, micro=4, accumulation=2, stage=3))
    assert_same(whole, run_step(tmp_path, "offload", micro=8, accumulation=2, offload=True))


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


def test_a_learning_rate_of_zero_leaves_the_weights_alone(tmp_path, whole):
    tensors, results = run_step(tmp_path, lr=0.0)
    assert all(not tensors[k].any() for k in tensors if k.endswith("lora_B.weight"))
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-6)


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
