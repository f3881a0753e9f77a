"""What gpu.py runs in processes of their own: the probe of the card, the making of the model, a worker that is watched.

One that dies, or that leaves the card in a bad state, takes nothing else with it.
"""

import json
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import ceiling  # noqa: E402
import common  # noqa: E402


def probe(job: dict[str, Any]) -> dict[str, Any]:
    """TFLOP/s of bfloat16 products, square and of as many rows as a decoding step has; and what computes them."""
    import torch

    device, size = torch.device(job["device"]), job["probe_size"]
    on_card = device.type == "cuda"
    wait = torch.cuda.synchronize if on_card else lambda: None

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    a, b, x = rand(size, size), rand(size, size), rand(job["rows"], size)
    weights = [rand(size, size) for _ in range(job["probe_num_weights"])]

    def square(_: int) -> None:
        torch.mm(a, b)
        wait()

    def skinny(_: int) -> None:
        for w in weights:  # several between two waits, as a decoding step has many
            torch.nn.functional.linear(x, w)
        wait()

    with torch.inference_mode():
        found = {
            "square": ceiling.flop_rate(square, 2.0 * size**3, job["probe_s"]),
            "skinny": ceiling.flop_rate(
                skinny, 2.0 * job["rows"] * size**2 * len(weights), job["probe_s"]
            ),
        }
    card = torch.cuda.get_device_properties(device) if on_card else None
    name = "CPU" if card is None else f"{card.name}, {card.total_memory / 2**30:.0f} GiB"
    return {k: v / 1e12 for k, v in found.items()} | {"card": f"{name}, torch {torch.__version__}"}


def make_model(job: dict[str, Any]) -> dict[str, Any]:
    """Write a model folder of random bfloat16 weights, made on the device.

    The tokenizer is the demo's: ids that it does not know, most of them, are drawn, sent and trained on like all others,
    and are no text.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from splitgrpo.demo import build_tokenizer
    from splitgrpo.warmstart import save_model

    tokenizer = build_tokenizer()
    config = Qwen2Config(
        **job["shape"], max_position_embeddings=32_768, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(job["device"]):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    save_model(model, tokenizer, Path(job["out"]))
    return {"parameters": ceiling.num_parameters(job["out"])}


def watch(out: str, script: str, *flags: str) -> None:
    """Run a worker's script as it is, in a process that writes its own peak of memory to a file, once a second.

    nvidia-smi shows no processes in most containers, and workers end without a word of it.
    """

    def look() -> None:
        while True:
            torch = sys.modules.get("torch")
            found = {"host_mib": common.status_mib("VmHWM")}
            # Half imported, it has neither.
            if getattr(getattr(torch, "cuda", None), "is_initialized", bool)():
                found["allocated_mib"] = torch.cuda.max_memory_allocated() / 2**20
                found["reserved_mib"] = torch.cuda.max_memory_reserved() / 2**20
            aside = Path(f"{out}.new")
            aside.write_text(json.dumps(found))
            aside.rename(out)
            time.sleep(1.0)

    threading.Thread(target=look, name="memory", daemon=True).start()
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(*sys.argv[2:])
    else:
        given = common.read_job()
        common.give({"probe": probe, "model": make_model}[given["part"]](given))
