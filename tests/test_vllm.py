"""The vLLM engine, run by vllm_script.py in the environment that has vLLM, against a plain recomputation in this one."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import PeftModel
from test_end_to_end import ENV, Pair
from test_engine import PROMPTS, SETTINGS
from transformers import AutoConfig, AutoModelForCausalLM

from splitgrpo import demo
from splitgrpo.adapters import Publisher, adapter_parameters, base_digest, read_version
from splitgrpo.config import SamplerSettings, SettingsError
from splitgrpo.engines import vllm
from splitgrpo.ledger import audit
from splitgrpo.models import add_lora, attach_adapter, load_base, lora_config
from splitgrpo.monitor import MetricsReader
from splitgrpo.policy import PolicyModule
from splitgrpo.warmstart import save_model

ROOT = Path(__file__).resolve().parent.parent
PYTHON = Path(os.environ.get("SPLITGRPO_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
ENDS = [1, 17, 23, 29]  # the last is the tokenizer's
LONG = [3 + i % 40 for i in range(70)]  # two blocks of 32 and a bit

needs_vllm = pytest.mark.skipif(
    not PYTHON.exists(),
    reason=f"{PYTHON} is not there: bash run.sh vllm-env makes it, SPLITGRPO_VLLM_PYTHON names another",
)


def small_model(kind: str, vocab_size: int = 50, **fields):
    """Heads of 32, the smallest that vLLM takes; logits far from uniform."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.15}  # fmt: skip
    ids = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, vocab_size=vocab_size, **(sizes | ids | fields))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def publish(folder: Path, model, num_versions: int) -> None:
    """FOLDER/model, and FOLDER/run with so many versions of an adapter to it."""
    model.save_pretrained(folder / "model")
    base = load_base(str(folder / "model"), torch.float32)
    digest = base_digest(base)
    peft = add_lora(base, rank=4, alpha=8, seed=0)
    (folder / "run" / "adapters").mkdir(parents=True)
    publisher = Publisher(folder / "run", "run", 1, "tiny", digest, "float32", lora_config(peft), 9)
    generator = torch.Generator().manual_seed(1)
    shapes = {k: p.shape for k, p in adapter_parameters(peft).items()}
    for version in range(num_versions):
        tensors = {k: torch.randn(s, generator=generator) * 0.2 for k, s in shapes.items()}
        publisher.publish(version, tensors)


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """A run folder of three versions, and what the engine did with them."""
    folder = tmp_path_factory.mktemp("vllm")
    model = small_model("llama", tie_word_embeddings=False)
    # The model's own defaults, of which only the end ids may be read.
    model.generation_config.update(eos_token_id=ENDS[:3], do_sample=True, top_k=1, temperature=0.3,
                                   repetition_penalty=5.0)  # fmt: skip
    publish(folder, model, 3)
    publish(folder / "heads", small_model("llama", num_attention_heads=4), 1)
    plan = {"prompts": [p.tolist() for p in PROMPTS], "long": LONG, "versions": 3,
            "samplings": [[*s, 12] for s in SETTINGS]}  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "tmp").mkdir()
    done = subprocess.run(
        [str(PYTHON), str(ROOT / "tests" / "vllm_script.py"), str(folder)],
        env=ENV | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"),
                   "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, json.loads((folder / "result.json").read_text())


def policy(folder: Path, version: int | None) -> torch.nn.Module:
    """The base model as the learner has it, with a version's adapter; None without."""
    base = load_base(str(folder / "model"), torch.float32)
    adapter = read_version(folder / "run", version or 0, 1)
    peft = attach_adapter(base, adapter)
    return peft if version is not None else peft.unload()


@torch.no_grad()
def learners(model: PeftModel, drawn: list, sampling: tuple[float, int, float]) -> list[np.ndarray]:
    """The learner's log-probs of each completion, in the order of the groups."""
    module, out = PolicyModule(model, *sampling), []
    for prompt, group in zip(PROMPTS, drawn, strict=True):
        for c in group:
            ids = torch.tensor([[*prompt.tolist(), *c["ids"]]])
            mask = torch.arange(ids.shape[1])[None] >= len(prompt)
            out.append(module(ids, torch.ones_like(ids), mask)[0, len(prompt) :].numpy())
    return out


def flat(drawn: list, name: str) -> list:
    return [c[name] for group in drawn for c in group]


@needs_vllm
@pytest.mark.parametrize("version", [0, 1, 2])
def test_log_probs_are_the_learners_whatever_the_sampling_and_the_version(trial, version):
    folder, result = trial
    model, other = policy(folder, version), policy(folder, (version + 1) % 3)
    for sampling, drawn in zip(SETTINGS, result["versions"][version]["drawn"], strict=True):
        got = np.concatenate(flat(drawn, "logprobs"))
        np.testing.assert_allclose(got, np.concatenate(learners(model, drawn, sampling)), atol=1e-4)
        # With another version's they differ: this test would see an adapter that was not exchanged.
        assert abs(got - np.concatenate(learners(other, drawn, sampling))).mean() > 0.05


@needs_vllm
def test_reference_log_probs_are_the_base_models_and_the_adapter_is_on_again_afterwards(trial):
    folder, result = trial
    base = policy(folder, None)
    for version in result["versions"]:
        drawn = version["drawn"][0]
        got = np.concatenate([r for group in version["refs"] for r in group])
        np.testing.assert_allclose(
            got, np.concatenate(learners(base, drawn, SETTINGS[0])), atol=1e-4
        )
        assert version["again"] == drawn


@needs_vllm
def test_a_groups_prompt_is_computed_once_and_never_taken_from_another_version(trial):
    _, result = trial
    assert [v["cached"] for v in result["versions"]] == [[0, 64, 64]] * 3


@needs_vllm
def test_only_the_version_in_use_is_held_and_no_file_of_it_is_left(trial):
    folder, result = trial
    assert [v["loras"] for v in result["versions"]] == [[1], [2], [3]]
    assert list((folder / "tmp").glob("splitgrpo-lora-*")) == []


@needs_vllm
def test_an_adapter_that_does_not_fit_is_refused_and_the_one_in_use_stays(trial):
    _, result = trial
    refused = result["refused"]
    assert all(text.startswith("AdapterError: adapter v000000.L1: ") for text in refused.values())
    assert "1 LoRA keys missing" in refused["missing"]
    assert "1 that this model has not" in refused["extra"]
    assert ", expected (4, 64)" in refused["shape"]
    assert "lora_alpha is 99" in refused["scaling"]
    assert "pissa" in refused["kind"]
    assert result["loras_after"] == [3]
    assert result["after_refusals"] == result["versions"][2]["drawn"][0]


@needs_vllm
def test_giving_up_in_the_middle_leaves_nothing_behind(trial):
    _, result = trial
    assert result["gave_up"]["left"] == 0
    assert result["gave_up"]["after"] == result["versions"][2]["drawn"][0]
    assert result["steps"][0] == result["steps"][1]  # on_token: once a decoding step


@needs_vllm
def test_the_same_seed_draws_the_same_tokens_and_another_one_others(trial):
    _, result = trial
    same = flat(result["after_refusals"], "ids")
    other = flat(result["other_seed"], "ids")
    assert sum(a != b for a, b in zip(same, other, strict=True)) >= 8
    for group in result["versions"][0]["drawn"][0]:
        assert len({tuple(c["ids"]) for c in group}) == 3  # nor do the rows of a group share one


@needs_vllm
def test_greedy_text_does_not_depend_on_the_other_rows(trial):
    _, result = trial
    assert flat(result["together"], "ids") == flat(result["alone"], "ids")


@needs_vllm
def test_every_end_id_ends_a_completion_and_is_kept(trial):
    _, result = trial
    (group,) = result["ends"]
    assert result["end_ids"] == ENDS
    assert {c["ids"][-1] for c in group if c["finished"]} == set(ENDS)
    assert any(not c["finished"] for c in group)
    for c in group:
        assert not set(c["ids"][:-1]) & set(ENDS)
        assert c["finished"] == (c["ids"][-1] in ENDS)
        assert c["finished"] or len(c["ids"]) == 20
        assert len(c["logprobs"]) == len(c["ids"])


@needs_vllm
def test_tokens_are_drawn_as_often_as_their_log_prob_says(trial):
    _, result = trial
    p = {token: math.exp(x) for token, x in result["probabilities"].items()}
    assert sum(p.values()) == pytest.approx(1.0, abs=1e-4)
    for token, count in result["frequencies"].items():
        spread = math.sqrt(p[token] * (1 - p[token]) / 2000)
        assert abs(count / 2000 - p[token]) < 4.5 * spread


@needs_vllm
def test_a_base_that_vllm_cannot_serve_is_a_settings_error_with_its_reason(trial):
    _, result = trial
    text = result["too_long"]
    assert text.startswith("SettingsError: --engine vllm: --max_prompt_tokens and")
    text = result["heads"]
    assert text.startswith("SettingsError: --engine vllm: vLLM cannot serve --model_path ")
    assert "head_dim=16" in text
    assert "--engine hf" in text
    # Nor does transformers' older release read the cache of --engine hf, which would go unnoticed.
    assert result["hf"].startswith(
        "SettingsError: --engine hf: LlamaForCausalLM of this transformers release"
    )


@needs_vllm
def test_a_real_learner_trains_on_what_a_sampler_with_vllm_draws(tmp_path):
    tokenizer = demo.build_tokenizer()
    model = small_model("qwen2", len(tokenizer), initializer_range=0.05, pad_token_id=tokenizer.pad_token_id,
                        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)  # fmt: skip
    save_model(model, tokenizer, tmp_path / "model")
    pair = Pair(tmp_path / "model", tmp_path / "runs" / "run")
    try:
        flags = ["--max_steps", "3", "--group_size", "4"]
        learner = pair.learner(*flags, "--learning_rate", "1e-2")
        script = ["sampling_worker.py", "--engine", "vllm", "--lora_path", str(pair.run_dir)]
        sampler = pair.start("sampler", [str(PYTHON), *script, *pair.flags, *flags])
        assert learner.wait(120) == 0, pair.text("learner")[-3000:] + pair.text("sampler")[-3000:]
        assert sampler.wait(20) == 0, pair.text("sampler")[-3000:]
    finally:
        pair.close()
    rows = MetricsReader(pair.run_dir / "metrics.jsonl").new_rows()
    assert [r["step"] for r in rows] == [1, 2, 3]
    assert audit(pair.run_dir)["steps"] == 3
    assert max(r["mismatch_mean"] for r in rows) < 0.05  # bfloat16 on both sides
    assert rows[-1]["kl"] > 0
    assert "Traceback" not in pair.text("sampler")


def test_without_vllm_the_sampler_ends_with_2_and_says_how_to_get_it(tmp_path):
    save_model(small_model("qwen2", 60), demo.build_tokenizer(), tmp_path / "model")
    command = [
        sys.executable,
        "sampling_worker.py",
        "--engine",
        "vllm",
        "--data",
        "arithmetic",
        "--model_path",
    ]
    done = subprocess.run(
        [*command, str(tmp_path / "model")],
        cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "the package vllm is not installed" in done.stderr
    assert "requirements-vllm.txt" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"plain": True}, "--plain is for --engine hf"),
        ({"temperature": 0.7}, "--kl_coef 0.04 and --temperature 0.7 .* at temperature 1 without"),
        ({"top_p": 0.9}, "--top_p 0.9: vLLM gives log-probs"),
        ({"top_k": 20}, "--top_k 20 --top_p 1: vLLM gives log-probs"),
        (
            {"kl_coef": 0.0, "temperature": 0.005},
            "--temperature 0.005: --engine vllm takes none below 0.01",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_it_starts(monkeypatch, flags, match):
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: object())
    vllm.check_vllm(SamplerSettings(engine="vllm"))
    vllm.check_vllm(SamplerSettings(engine="vllm", kl_coef=0.0, temperature=0.7, top_p=0.9))
    with pytest.raises(SettingsError, match=match):
        vllm.check_vllm(SamplerSettings(engine="vllm", **flags))


def test_more_tokens_than_the_model_has_positions_are_refused_with_the_flags_to_change():
    config = SimpleNamespace(max_position_embeddings=128)
    vllm.check_length(config, 127)
    with pytest.raises(SettingsError, match="--max_new_tokens allow 128 tokens, but this model has 128"):  # fmt: skip
        vllm.check_length(config, 128)
    vllm.check_length(SimpleNamespace(), 1 << 20)
