"""Starting is quick: nothing slow is imported by those who do without it, or before what can be said at once."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from splitgrpo import models, sampler, zero
from splitgrpo.config import SamplerSettings, SettingsError
from splitgrpo.pointer import POINTER
from splitgrpo.reload import Failures
from splitgrpo.reward_child import Target
from splitgrpo.reward_process import RewardProcess

ROOT = Path(__file__).resolve().parent.parent
ENV = os.environ | {"OMP_NUM_THREADS": "1"}
LOG = logging.getLogger("test")


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *args]
    return subprocess.run(
        command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("worker", ["training_worker.py", "sampling_worker.py"])
def test_a_wrong_flag_is_refused_before_torch_is_imported(worker):
    done = run("-X", "importtime", worker, "--group_size", "1")
    assert done.returncode == 2
    assert f"{worker}: error: --group_size 1: a group needs at least 2 completions" in done.stderr
    assert "splitgrpo.cli\n" in done.stderr
    assert "| torch\n" not in done.stderr
    assert "Traceback" not in done.stderr


def test_the_launcher_starts_its_workers_without_torch():
    code = (
        "import splitgrpo.launch, sys; print({'torch', 'peft', 'transformers'} & set(sys.modules))"
    )
    assert run("-c", code).stdout == "set()\n"


def test_the_garbage_collector_rests_while_libraries_load_and_no_longer():
    code = """
import gc, logging
from splitgrpo.process import begin_process, run_main
begin_process()
print(gc.isenabled())
run_main(lambda stop: print(gc.isenabled(), gc.get_freeze_count() > 0), logging.getLogger("x"))
"""
    assert run("-c", code).stdout == "False\nTrue True\n"


def test_the_reward_process_imports_the_function_before_it_is_first_called(tmp_path):
    (tmp_path / "mine.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w').close()\n"
        "def reward(response, answer):\n    return {'reward': 1.0}\n"
    )
    path = [os.fsencode(entry) for entry in (tmp_path, *sys.path)]
    process = RewardProcess(Target(path, "mine", "", "reward"), lambda: None)
    try:
        deadline = time.monotonic() + 20
        while not (tmp_path / "imported").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.call("a", "b", 5.0) == {"reward": 1.0}
    finally:
        process.close()


@pytest.mark.parametrize("fails", [False, True])
def test_deepspeed_starts_without_the_compiler_that_its_muon_would_load(monkeypatch, fails):
    import deepspeed
    from torch._dynamo.backends.registry import get_default_backend

    seen = []

    def initialize(**kwargs):
        seen.append(get_default_backend())
        if fails:
            raise ValueError("no such key")
        return SimpleNamespace(train=lambda: None), None

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    settings = SimpleNamespace(config={})
    if fails:
        with pytest.raises(SettingsError, match="no such key"):
            zero.start_engine(torch.nn.Linear(1, 1), settings)
    else:
        zero.start_engine(torch.nn.Linear(1, 1), settings)
    assert (seen, get_default_backend()) == (["eager"], "inductor")


# ---- the base model while the learner starts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("published", "is_there", "loads"),
    [
        ("float32", False, ["float32"]),  # loaded while the learner starts
        ("bfloat16", False, ["float32", "bfloat16"]),  # guessed wrong
        ("bfloat16", True, ["bfloat16"]),  # nothing to guess
    ],
)
def test_a_sampler_loads_its_base_model_while_it_waits(
    tmp_path, monkeypatch, published, is_there, loads
):
    done = []
    adapter = SimpleNamespace(
        manifest=SimpleNamespace(base_dtype=published), pointer=SimpleNamespace(run_id="run")
    )

    def load(path, dtype, device):
        done.append(str(dtype).removeprefix("torch."))
        return dtype

    def first(self):
        (tmp_path / POINTER).touch()
        return adapter if done or is_there else None

    used = []
    monkeypatch.setattr(models, "likely_dtype", lambda path, device: torch.float32)
    monkeypatch.setattr(models, "load_base", load)
    monkeypatch.setattr(sampler.Sampler, "_first_adapter", first)
    monkeypatch.setattr(sampler, "build_engine", lambda settings, base, *rest: used.append(base))
    monkeypatch.setattr(sampler, "read_key", lambda path: b"")
    monkeypatch.setattr(sampler, "GroupClient", lambda *args, **options: SimpleNamespace())
    if is_there:
        (tmp_path / POINTER).touch()
    made = sampler.Sampler.__new__(sampler.Sampler)
    made.settings, made.run_dir, made.log = SamplerSettings(wait_timeout_s=5.0), tmp_path, LOG
    made.stop, made.failures = SimpleNamespace(raise_if_set=lambda: None), Failures(3, LOG)
    made.device, made.tokenizer = torch.device("cpu"), None
    made.join()
    assert done == loads
    assert used == [models.DTYPES[published]]


@pytest.mark.parametrize(
    ("stated", "fast", "likely"),
    [
        (torch.bfloat16, True, torch.bfloat16),
        (torch.float16, True, torch.bfloat16),  # the learner refuses float16
        (torch.float32, True, torch.float32),
        (torch.bfloat16, False, torch.float32),
    ],
)
def test_the_type_of_the_base_is_guessed_as_the_recipes_choose_it(
    monkeypatch, stated, fast, likely
):
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(dtype=stated))
    monkeypatch.setattr(models, "load_config", lambda path: config)
    monkeypatch.setattr(models, "bfloat16_is_fast", lambda device: fast)
    assert models.likely_dtype("m", "cpu") == likely


def test_a_sampler_that_has_not_joined_yet_has_nobody_to_say_goodbye_to():
    sampler.Sampler.__new__(sampler.Sampler).close()
