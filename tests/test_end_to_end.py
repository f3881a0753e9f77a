"""Both workers as real processes on the embedded model: they learn, they end, and a dead one is noticed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from splitgrpo.adapters import adapter_parameters
from splitgrpo.arrivals import REASONS
from splitgrpo.config import SettingsError
from splitgrpo.evaluate import load_engine
from splitgrpo.ledger import audit
from splitgrpo.monitor import MetricsReader
from splitgrpo.pointer import read_pointer
from splitgrpo.zero import free_port

ROOT = Path(__file__).resolve().parent.parent
ENV = os.environ | {"HF_HUB_OFFLINE": "1", "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    ENV.pop(name, None)


def run_demo(runs_dir: Path, seed: int) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The README's command, but for the installation."""
    command = [sys.executable, "-m", "splitgrpo.recipes", "demo", "--seed", str(seed)]
    command += ["--runs_dir", str(runs_dir), "--name", f"demo{seed}"]
    done = subprocess.run(
        command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=280, check=False
    )
    return runs_dir / f"demo{seed}", done


def check_demo(run_dir: Path, done: subprocess.CompletedProcess[str]) -> None:
    """What is promised of the demo."""
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] >= 0.9
    assert summary["total_wall_s"] < 180
    assert summary["train_wall_s"] < summary["total_wall_s"]
    assert summary["steps"] == len(MetricsReader(run_dir / "metrics.jsonl").new_rows())
    totals = audit(run_dir)
    assert totals["trained"] == summary["steps"] * 16
    assert totals == {"steps": summary["steps"], "samplers": 1, "trained": totals["trained"], "lost": 0,
                      "restarts": 0, "undone": 0}  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """One whole demo; others reuse its model."""
    return run_demo(tmp_path_factory.mktemp("runs"), seed=0)


def test_the_demo_lifts_accuracy_from_at_most_half_to_nine_tenths(demo):
    run_dir, done = demo
    check_demo(run_dir, done)
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (run_dir.parent / "latest").resolve() == run_dir.resolve()
    assert (run_dir / "adapter" / "adapter_config.json").exists()
    assert "accuracy before training" in done.stderr
    assert "accuracy after training" in done.stderr


def test_the_learners_log_probs_are_the_samplers_at_the_same_version(demo):
    rows = MetricsReader(demo[0] / "metrics.jsonl").new_rows()
    first = rows[0]
    assert first["staleness_max"] == 0
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert first["ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert first["clip_frac"] == 0
    assert abs(first["loss"]) < 1e-3
    assert first["grad_norm"] > 0
    assert max(r["staleness_max"] for r in rows) <= 1
    never = [
        *(f"dropped_{reason}" for reason in REASONS),
        "lost_groups",
        "refused_messages",
        "skipped_steps",
    ]
    assert all(r[name] == 0 for r in rows for name in never)
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.5


def test_the_final_adapter_opens_with_peft_and_holds_the_learners_masters(demo):
    run_dir, _ = demo
    base = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    opened = PeftModel.from_pretrained(base, run_dir / "adapter")
    state = load_file(run_dir / "checkpoints" / "step_000060" / "state.safetensors")
    assert len(adapter_parameters(opened)) == 28
    for key, parameter in adapter_parameters(opened).items():
        assert torch.equal(parameter, state[f"lora|{key}"])
    pointer = read_pointer(run_dir)
    assert (pointer.version, pointer.done) == (60, True)


def test_evaluation_refuses_an_adapter_of_another_base(demo, tmp_path):
    model, adapter = demo[0] / "model", str(demo[0] / "adapter")
    other = shutil.copytree(model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = next(n for n in weights if n.endswith("q_proj.weight"))
    save_file(weights | {name: weights[name] + 1}, other / "model.safetensors", {"format": "pt"})
    load_engine(str(model), adapter, "auto", 1)
    with pytest.raises(SettingsError, match="was made for another base model"):
        load_engine(str(other), adapter, "auto", 1)


def test_a_checkpoint_holds_what_a_resume_needs(demo):
    folders = sorted((demo[0] / "checkpoints").iterdir())
    assert [f.name for f in folders] == ["step_000050", "step_000060"]
    index = json.loads((folders[-1] / "state.json").read_text())
    assert index["step"] == 60
    assert index["cursor"] == {"0": 60 * 16}
    assert index["settings"]["learning_rate"] == 1e-3
    tensors = load_file(folders[-1] / "state.safetensors")
    assert sum(k.endswith("|exp_avg_sq") for k in tensors) == 28
    assert "rng|rank0" in tensors


# ---- the two workers by themselves ---------------------------------------------------------------


class Pair:
    """Starts workers on one run folder and port, and ends what is left of them."""

    def __init__(self, model: Path, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.flags = ["--model_path", str(model), "--data", "arithmetic", "--port", str(free_port()),
                      "--max_new_tokens", "16", "--max_prompt_tokens", "48", "--num_threads", "1"]  # fmt: skip
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        self.run_dir.parent.mkdir(exist_ok=True)
        with self.log(name).open("wb") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=ENV, stdout=file, stderr=file, start_new_session=True
            )
        self.started.append(process)
        return process

    def log(self, name: str) -> Path:
        return self.run_dir.with_name(f"{name}.log")

    def text(self, name: str) -> str:
        return self.log(name).read_text()

    def learner(self, *flags: str, launcher: list[str] | None = None) -> subprocess.Popen[bytes]:
        script = ["training_worker.py", "--save_path", str(self.run_dir), *self.flags, *flags]
        return self.start("learner", [*(launcher or [sys.executable]), *script])

    def sampler(self, *flags: str) -> subprocess.Popen[bytes]:
        script = ["sampling_worker.py", "--lora_path", str(self.run_dir), *self.flags, *flags]
        return self.start("sampler", [sys.executable, *script])

    def wait_for_step(self, step: int, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if len(MetricsReader(self.run_dir / "metrics.jsonl").new_rows()) >= step:
                return
            time.sleep(0.1)
        pytest.fail(f"no step {step}: {self.text('learner')[-2000:]}")

    def close(self) -> None:
        for process in self.started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


@pytest.fixture
def pair(demo, tmp_path):
    made = Pair(demo[0] / "model", tmp_path / "runs" / "run")
    yield made
    made.close()


def test_the_documented_commands_work_sampler_first_and_two_ranks_with_bf16(pair):
    """deepspeed --num_gpus=2 training_worker.py and python sampling_worker.py, with ds_config.json as it is."""
    sampler = pair.sampler("--batch_size", "8", "--max_steps", "3")
    time.sleep(1)
    deepspeed = [sys.executable, str(Path(sys.executable).with_name("deepspeed")), "--num_gpus=2"]
    learner = pair.learner(
        "--group_size", "4", "--ds_config", "ds_config.json", "--max_steps", "3", launcher=deepspeed
    )
    assert learner.wait(150) == 0, pair.text("learner")[-3000:]
    assert sampler.wait(30) == 0, pair.text("sampler")[-3000:]
    rows = MetricsReader(pair.run_dir / "metrics.jsonl").new_rows()
    assert [r["step"] for r in rows] == [1, 2, 3]
    assert rows[0]["lr"] == 1e-6
    assert rows[0]["ratio_mean"] == pytest.approx(1.0, abs=0.02)
    assert (pair.run_dir / "done.json").exists()
    assert audit(pair.run_dir)["steps"] == 3
    manifest = json.loads((pair.run_dir / "adapter" / "manifest.json").read_text())
    assert manifest["base_dtype"] == "bfloat16"
    assert {
        t.dtype for t in load_file(pair.run_dir / "adapter" / "adapter_model.safetensors").values()
    } == {torch.float32}
    for text in (pair.text("learner"), pair.text("sampler")):
        assert "Traceback" not in text


def test_gspo_is_one_flag(pair):
    flags = ["--loss", "gspo", "--max_steps", "2"]
    learner, sampler = pair.learner(*flags), pair.sampler(*flags)
    assert learner.wait(90) == 0, pair.text("learner")[-3000:]
    assert sampler.wait(20) == 0
    rows = MetricsReader(pair.run_dir / "metrics.jsonl").new_rows()
    assert not any("kl" in r for r in rows)


def test_every_option_of_a_loss_works_in_a_real_run_and_a_mismatch_is_said_aloud(pair):
    flags = ["--loss", "dapo", "--max_steps", "3"]
    options = ["--mask_truncated", "--soft_overlong_tokens", "4", "--entropy_coef", "0.01", "--dual_clip", "3",
               "--advantage", "rloo", "--mismatch_correction", "truncate", "--mismatch_level", "sequence",
               "--mismatch_warn", "1e-12", "--learning_rate", "1e-3"]  # fmt: skip
    learner, sampler = pair.learner(*flags, *options), pair.sampler(*flags)
    assert learner.wait(90) == 0, pair.text("learner")[-3000:]
    assert sampler.wait(20) == 0
    rows = metrics(pair.run_dir)
    assert (
        max(r["staleness_max"] for r in rows) == 1
    )  # so that an older version's log-probs were taken
    assert all(r["mismatch_weight"] == pytest.approx(1.0, abs=0.2) for r in rows)
    assert "sampler and learner differ at the same weights" in pair.text("learner")


def test_a_killed_sampler_is_noticed_by_the_learner_which_saves_and_ends_with_75(pair):
    flags = ["--max_steps", "5000", "--wait_timeout_s", "12"]
    learner, sampler = pair.learner(*flags), pair.sampler(*flags)
    pair.wait_for_step(3)
    sampler.kill()
    assert learner.wait(45) == 75
    assert "no sampler gave a sign of life for 12 s" in pair.text("learner")
    saved = max((pair.run_dir / "checkpoints").iterdir())
    steps = len(MetricsReader(pair.run_dir / "metrics.jsonl").new_rows())
    assert saved.name == f"step_{steps:06d}"
    assert audit(pair.run_dir)["steps"] == steps


def test_a_killed_learner_is_noticed_by_the_sampler_which_ends_with_75(pair):
    flags = ["--max_steps", "5000", "--wait_timeout_s", "12"]
    learner, sampler = pair.learner(*flags), pair.sampler(*flags)
    pair.wait_for_step(3)
    learner.kill()
    assert sampler.wait(45) == 75
    assert "no sign of life from a learner" in pair.text("sampler")


def test_sigterm_ends_the_learner_in_ten_seconds_with_its_state_saved_and_the_port_free(pair):
    learner, _ = pair.learner("--max_steps", "5000"), pair.sampler("--max_steps", "5000")
    pair.wait_for_step(2)
    started = time.monotonic()
    learner.send_signal(signal.SIGTERM)
    assert learner.wait(12) == 143, pair.text("learner")[-2000:]
    assert time.monotonic() - started < 10
    assert "saved in" in pair.text("learner").splitlines()[-2]
    assert audit(pair.run_dir)["steps"] >= 2
    assert (
        not psutil.pid_exists(learner.pid)
        or psutil.Process(learner.pid).status() == psutil.STATUS_ZOMBIE
    )
    again = Pair(Path(pair.flags[1]), pair.run_dir.with_name("second"))
    again.flags = pair.flags
    try:
        other = again.learner("--max_steps", "1", "--wait_timeout_s", "1")
        assert other.wait(40) == 75, again.text("learner")  # it listened, and nobody came
    finally:
        again.close()


TIMES = {"time_s", "step_s", "wait_s", "train_s", "tokens_per_s"}


def metrics(run_dir: Path) -> list[dict]:
    """What a run measured, without its clocks."""
    rows = MetricsReader(run_dir / "metrics.jsonl").new_rows()
    return [{k: v for k, v in r.items() if k not in TIMES} for r in rows]


def final_adapter(run_dir: Path) -> bytes:
    return (run_dir / "adapter" / "adapter_model.safetensors").read_bytes()


def live_run(pair: Pair, ds_config: Path, *flags: str) -> Path:
    """Both workers, six on-policy steps with a journal."""
    given = ["--max_steps", "6", "--max_staleness", "0", "--learning_rate", "1e-3", *flags]
    learner = pair.learner("--journal", "--ds_config", str(ds_config), *given)
    sampler = pair.sampler(*given)
    assert learner.wait(90) == 0, pair.text("learner")[-3000:]
    assert sampler.wait(20) == 0
    return pair.run_dir


def replay(pair: Pair, name: str, *flags: str) -> tuple[int, Path, str]:
    """Train on the journal of the pair's run; exit code, run folder, log."""
    out = pair.run_dir.with_name(name)
    command = [
        sys.executable,
        "training_worker.py",
        "--replay",
        str(pair.run_dir),
        "--save_path",
        str(out),
        *flags,
    ]
    process = pair.start(name, command)
    return process.wait(90), out, pair.text(name)


def test_runs_repeat_and_a_journal_gives_the_same_weights_bit_for_bit_twice(pair, demo, tmp_path):
    ds = tmp_path / "ds.json"
    config = json.loads((demo[0] / "ds_config.json").read_text()) | {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
    }
    ds.write_text(json.dumps(config))
    first = live_run(pair, ds)
    other = Pair(Path(pair.flags[1]), pair.run_dir.with_name("other"))
    other.flags = pair.flags
    try:
        second = live_run(other, ds)
    finally:
        other.close()
    assert metrics(first) == metrics(second)
    assert final_adapter(first) == final_adapter(second)
    ds.unlink()  # the journal has a copy of its own
    for name in ("again", "oncemore"):
        code, out, text = replay(pair, name)
        assert code == 0, text[-3000:]
        assert metrics(out) == metrics(first)
        assert audit(out) == audit(first)
        assert final_adapter(out) == final_adapter(first)
    check_metrics_by_recomputation(pair, first)

    code, out, _ = replay(pair, "otherloss", "--loss", "dapo", "--max_steps", "2")
    assert code == 0
    assert len(metrics(out)) == 2
    assert final_adapter(out) != final_adapter(first)
    code, _, text = replay(pair, "hot", "--temperature", "0.5")
    assert code == 65
    assert "recorded at temperature 1.0, now --temperature 0.5" in text
    file = first / "journal" / "step_000003.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    code, _, text = replay(pair, "flipped")
    assert code == 65
    assert "step_000003.safetensors is damaged" in text
    (first / "journal" / "step_000000.safetensors").unlink()
    code, _, text = replay(pair, "cut")
    assert code == 2
    assert "does not begin with step_000000.safetensors" in text


def check_metrics_by_recomputation(pair: Pair, run_dir: Path) -> None:
    """The first step's metrics from its journal and the base model alone, by plain calls of transformers and torch."""
    arrays = load_file(run_dir / "journal" / "step_000000.safetensors")
    groups = sorted({k.partition("/")[0] for k in arrays})
    model = AutoModelForCausalLM.from_pretrained(pair.flags[1], dtype=torch.float32).eval()
    gaps, entropies, k1, k3, rewards, dead, lengths, cut = [], [], [], [], [], [], [], []
    for g in groups:
        part = {k.partition("/")[2]: v for k, v in arrays.items() if k.startswith(g)}
        sizes = part["lengths"].tolist()
        rewards.append(part["rewards"])
        dead.append(bool((part["rewards"] == part["rewards"][0]).all()))
        cut += (~part["finished"]).tolist()
        streams = [
            part[n].split(sizes)
            for n in ("token_ids", "completion_mask", "old_logprobs", "ref_logprobs")
        ]
        for ids, mask, old, ref in zip(*streams, strict=True):
            with torch.no_grad():  # the first adapter changes nothing: the policy is the base model
                dist = model(input_ids=ids[None].long()).logits[0, :-1].double().log_softmax(-1)
            lp = dist.gather(-1, ids[1:, None].long())[:, 0][mask[1:]]
            gaps.append(lp - old[mask])
            entropies.append(-(dist.exp() * dist).sum(-1)[mask[1:]])
            gap = ref[mask] - lp
            k1.append(-gap.mean())
            k3.append((gap.exp() - gap - 1).mean())
            lengths.append(int(mask.sum()))
    row, reward = metrics(run_dir)[0], torch.cat(rewards)
    assert row["reward"] == pytest.approx(reward.mean().item())
    assert row["reward_std"] == pytest.approx(reward.std(correction=0).item())
    assert row["zero_std_frac"] == sum(dead) / len(dead)
    assert row["truncated_frac"] == sum(cut) / len(cut)
    assert row["completion_tokens"] == sum(lengths)
    assert row["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-5)
    assert row["kl"] == pytest.approx(torch.stack(k3).mean().item(), abs=1e-6)
    assert row["kl_k1"] == pytest.approx(torch.stack(k1).mean().item(), abs=1e-6)
    gap = torch.cat(gaps)
    assert gap.abs().max() < 1e-4
    assert row["mismatch_mean"] == pytest.approx(gap.abs().mean().item(), abs=1e-6)
    assert row["mismatch_max"] == pytest.approx(gap.abs().max().item(), abs=2e-6)
    assert row["mismatch_k1"] == pytest.approx(-gap.mean().item(), abs=1e-6)
    assert row["mismatch_k3"] == pytest.approx(0.0, abs=1e-9)
    assert row["ratio_mean"] == pytest.approx(gap.exp().mean().item(), abs=1e-6)
    assert row["ratio_min"] == pytest.approx(gap.exp().min().item(), abs=2e-6)
    assert row["ratio_max"] == pytest.approx(gap.exp().max().item(), abs=2e-6)
    assert (row["clip_frac"], row["clip_frac_low"], row["clip_frac_high"]) == (0, 0, 0)
    assert row["lr"] == 1e-3
    assert row["grad_norm"] > 0
    glossary = (ROOT / "README.md").read_text().partition("## Metrics")[2].partition("## When")[0]
    for name in row:
        short = name.removeprefix("mismatch")
        assert name in glossary or short in glossary or name.startswith("reward/"), name


def test_settings_that_differ_are_refused_naming_both_values_and_the_sampler_ends_with_2(pair):
    learner = pair.learner("--temperature", "0.9", "--wait_timeout_s", "20")
    sampler = pair.sampler("--temperature", "0.7")
    assert sampler.wait(60) == 2
    assert "--temperature: learner 0.9, sampler 0.7" in pair.text("sampler")
    assert "--temperature: learner 0.9, sampler 0.7" in pair.text("learner")
    assert learner.poll() is None


def test_a_worker_alone_says_what_it_waits_for_and_gives_up_with_75(pair):
    learner = pair.learner("--wait_timeout_s", "13")
    sampler = pair.sampler(
        "--wait_timeout_s", "13", "--lora_path", str(pair.run_dir.with_name("elsewhere"))
    )
    assert learner.wait(60) == 75
    assert sampler.wait(60) == 75
    assert "waiting for rollouts (10 s): no sampler has connected yet" in pair.text("learner")
    assert "waiting for a learner to publish an adapter (10 s)" in pair.text("sampler")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_the_demo_holds_with_other_seeds(tmp_path, seed):
    check_demo(*run_demo(tmp_path, seed))
