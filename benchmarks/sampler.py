"""New tokens a second: our engines against transformers' generate and vLLM.

Ours hold a LoRA adapter of rank 16 on every linear layer with random non-zero values, and keep the log-prob of each token;
the peers have neither, but for "vllm, with LoRA". Nobody stops at an end token, so all draw the same number of tokens.
"""

import argparse
import functools
import itertools
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import ceiling  # noqa: E402
import common  # noqa: E402

LORA_RANK, LORA_ALPHA, B_STD = 16, 32, 0.02
VLLM_LORA_TOKENS = 16
# name, prompts, group size, new tokens, calls timed together, dtype; the demo's sizes are those of its recipe.
WORKLOADS = (
    ("SmolLM2-135M, 8 x 4 x 128", 8, 4, 128, 1, "bfloat16"),
    ("SmolLM2-135M, 4 x 8 x 256", 4, 8, 256, 1, "bfloat16"),
    ("demo model, 16 x 8 x 16", 16, 8, 16, 20, "float32"),
)
QUICK = ("demo model, 4 x 4 x 8", 4, 4, 8, 2, "float32")
DEMO = "demo"


def make_adapter(model_path: str, dtype: Any, folder: Path) -> Any:
    """A published adapter with random values in A and B, read back as a sampler reads it."""
    import torch

    from splitgrpo import models
    from splitgrpo.adapters import Publisher, adapter_parameters, base_digest
    from splitgrpo.reload import read_newest

    base = models.load_base(model_path, dtype)
    digest = base_digest(base)
    peft = models.add_lora(base, LORA_RANK, LORA_ALPHA, 0)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        key: torch.randn(p.shape, generator=generator) * B_STD
        if "lora_B" in key
        else p.data.float()
        for key, p in adapter_parameters(peft).items()
    }
    publisher = Publisher(
        run_dir=folder, run_id="benchmark", lineage=1, base_model=model_path, base_digest=digest,
        base_dtype=str(dtype).removeprefix("torch."), config=models.lora_config(peft), keep=1,
    )  # fmt: skip
    publisher.publish(0, tensors)
    return read_newest(folder)


@functools.cache
def adapter_folder(model_path: str, dtype: str, folder: Path) -> str:
    """`make_adapter`'s, as an ordinary PEFT folder that vLLM loads."""
    import torch

    adapter = make_adapter(model_path, getattr(torch, dtype), folder)
    return str(folder / "adapters" / adapter.pointer.folder)


def build_engine(model_path: str, dtype: Any, job: dict[str, Any]) -> Any:
    """The engine as the sampler makes it for a job's sizes, with an adapter, that knows no end token."""
    import torch

    from splitgrpo import models
    from splitgrpo.config import SamplerSettings
    from splitgrpo.sampler import build_engine as sampler_engine

    settings = SamplerSettings(
        model_path=model_path, group_size=job["group_size"], max_new_tokens=job["new_tokens"],
        batch_size=len(job["prompts"]) * job["group_size"],
        max_prompt_tokens=max(map(len, [*job["prompts"], *job["warm"]])), plain=job["side"] == "plain",
    )  # fmt: skip
    tokenizer = models.load_tokenizer(model_path)
    with tempfile.TemporaryDirectory() as folder:
        adapter = make_adapter(model_path, dtype, Path(folder))
    base = models.load_base(model_path, dtype)
    engine = sampler_engine(
        settings, base, adapter, tokenizer, torch.device("cpu"), logging.getLogger("sampler")
    )
    ignore_ends(engine)
    return engine


def ignore_ends(engine: Any) -> None:
    """Let no token end a completion: every engine is asked for the same number of tokens."""
    import torch

    engine.end_ids = []
    if hasattr(engine, "_ends"):
        engine._ends = torch.zeros(0, dtype=torch.int64)


def ours(job: dict[str, Any]) -> dict[str, Any]:
    """Warm up on other prompts, then time `repeat` whole calls; tokens/s over all of them."""
    import numpy as np
    import torch

    from splitgrpo import models
    from splitgrpo.engines.base import Sampling

    models.use_threads(job["threads"])
    rows = len(job["prompts"]) * job["group_size"]
    engine = build_engine(job["model"], getattr(torch, job["dtype"]), job)
    seeds = itertools.count()

    def run(prompts: list[list[int]], new_tokens: int) -> int:
        out = engine.generate(
            [np.array(p, dtype=np.int32) for p in prompts], job["group_size"],
            Sampling(1.0, 0, 1.0, new_tokens), seed=next(seeds), on_token=lambda: None,
        )  # fmt: skip
        return sum(len(c.token_ids) for group in out for c in group)

    run(job["warm"], min(16, job["new_tokens"]))
    counts: list[int] = []
    seconds = sum(
        common.timed(lambda: counts.append(run(job["prompts"], job["new_tokens"])), job["repeat"])
    )
    if sum(counts) != rows * job["new_tokens"] * job["repeat"]:
        raise SystemExit(f"{sum(counts)} tokens came: a completion ended early")
    return {"tokens_per_s": sum(counts) / seconds, "seconds": seconds}


def sides_of(job: dict[str, Any], adapter: str, *, quick: bool) -> dict[str, Any]:
    """By side, what measures it: ours, our plain engine, and the peers, with our allocator's settings and without.

    `adapter`: a PEFT folder for vLLM's side with LoRA; without one that side is left out.
    """

    def side(script: str, peer: str | None = None, tuned: bool = True, **more: Any) -> Any:
        def run() -> dict[str, Any]:
            python = sys.executable if peer in (None, "transformers") else common.python_of(peer)
            return common.measure(
                python, script, job | {"side": peer or "ours"} | more, tuned=tuned
            )

        return run

    generate = functools.partial(side, "peer_generate.py", "transformers")
    sides = {
        common.OURS: side("sampler.py"),
        "plain": side("sampler.py", side="plain"),
        "transformers": generate(tuned=False),
        "transformers" + common.TUNED: generate(),
    }
    if not quick:
        # Which of the two is faster depends on the CPU: 380 against 92 tokens/s on one, 660 against 840 on another.
        vllm = functools.partial(side, "peer_generate.py", "vllm", enforce_eager=True)
        sides |= {
            "vllm": vllm(tuned=False),
            "vllm, compiled": vllm(tuned=False, enforce_eager=False),
        }
        if adapter:
            # Each of its tokens costs as much as the last, and 128 of them minutes. Compiled it is no faster.
            same = {"lora_rank": LORA_RANK, "new_tokens": VLLM_LORA_TOKENS}
            sides["vllm, with LoRA"] = vllm(adapter=adapter, **same)
    return sides


def rows(args: argparse.Namespace) -> list[common.Row]:
    """One row a workload."""
    out = []
    for name, num_prompts, group_size, new_tokens, repeat, dtype in (
        (QUICK,) if args.quick else WORKLOADS
    ):
        title = f"sampler: {name}"
        try:
            is_demo = name.startswith(DEMO)
            model = common.demo_model(args.work) if is_demo else common.model_of(args)
            data = "arithmetic" if is_demo else common.data_of(args)
            prompts = common.prompt_ids(model, data, 2 * num_prompts)
            job = {
                "model": model, "dtype": dtype, "threads": common.all_threads(), "group_size": group_size,
                "new_tokens": new_tokens, "repeat": repeat, "prompts": prompts[:num_prompts],
                "warm": prompts[num_prompts:], "max_len": 128 if is_demo else 2048,
            }  # fmt: skip
            bare = args.quick or is_demo
            adapter = "" if bare else adapter_folder(model, dtype, args.work / "adapter")
            common.say(title)
            results, notes = common.interleave(sides_of(job, adapter, quick=args.quick), args.runs)
            skinny = num_prompts * group_size == ceiling.SKINNY_ROWS  # the rate was measured with
            limit = (
                ceiling.sampling_ceiling(model, dtype, job["threads"], args.quick)
                if skinny
                else None
            )
        except common.Missing as error:
            out.append(common.row(title, "tokens/s", {}, note=str(error)))
            continue
        words = [
            f"{dtype}, {job['threads']} threads",
            "ours with LoRA and log-probs, peers without but where it says so",
        ]
        out.append(
            common.row(
                title, "tokens/s", common.values_of(results, "tokens_per_s"), ceiling=limit,
                peak_rss_mib=common.rss_of(results),
                note="; ".join(filter(None, [*words, common.noise(results), *notes])),
            )
        )  # fmt: skip
    return out


if __name__ == "__main__":
    common.give(ours(common.read_job()))
