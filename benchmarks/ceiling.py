"""What this machine can do at best: matrix products and memory copies, with one thread and with all.

The ceilings of the sampler and the learner are made of these: parameters x FLOP a token over the measured rate. Attention
and everything that is not a matrix product are left out, so no engine reaches 1.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]
import common  # noqa: E402

SKINNY_ROWS = 32  # rows of a decoding step: 8 prompts x 4 completions
PROBES = ("bfloat16 square", "bfloat16 skinny", "float32 square", "float32 skinny")
COPY = "copy"


def flop_rate(multiply: Callable[[int], None], flop: float, seconds: float) -> float:
    """FLOP/s of `multiply`, called with a running number until the time is up; the best third of its calls."""
    multiply(0)
    took, started, number = [], time.perf_counter(), 0
    while time.perf_counter() - started < seconds or len(took) < 3:
        before = time.perf_counter()
        multiply(number)
        took.append(time.perf_counter() - before)
        number += 1
    return flop / statistics.median(sorted(took)[: max(1, len(took) // 3)])


def probe(job: dict[str, Any]) -> dict[str, float]:
    """GFLOP/s of each of PROBES, GB/s moved by a copy (reading and writing counted)."""
    import torch

    torch.set_num_threads(job["threads"])
    size, seconds = job["size"], job["seconds"]
    found = {}
    for name in ("bfloat16", "float32"):
        dtype = getattr(torch, name)
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        out = torch.empty(size, size, dtype=dtype)
        # As in decoding, the weights of one product after another come from memory, not from a cache.
        weights = [torch.randn(size, size).to(dtype) for _ in range(job["num_weights"])]
        x = torch.randn(SKINNY_ROWS, size).to(dtype)
        with torch.inference_mode():
            found[f"{name} square"] = flop_rate(
                lambda _, a=a, b=b, out=out: torch.mm(a, b, out=out), 2.0 * size**3, seconds
            )
            found[f"{name} skinny"] = flop_rate(
                lambda i, x=x, w=weights: torch.nn.functional.linear(x, w[i % len(w)]),
                2.0 * SKINNY_ROWS * size**2, seconds,
            )  # fmt: skip
    source = torch.ones(job["copy_mib"] * 2**18)
    target = torch.empty_like(source)
    found[COPY] = flop_rate(lambda _: target.copy_(source), 2.0 * source.nbytes, seconds)
    return {name: rate / 1e9 for name, rate in found.items()}


@functools.cache
def rates(threads: int, quick: bool) -> dict[str, float]:
    """`probe` in a process of its own, once a run of the harness. Raises Missing."""
    small = {"size": 512, "num_weights": 4, "copy_mib": 32, "seconds": 0.1}
    full = {"size": 2048, "num_weights": 32, "copy_mib": 256, "seconds": 0.7}
    job = {"threads": threads} | (small if quick else full)
    return common.measure(sys.executable, "ceiling.py", job, limit_s=120)


@functools.cache
def num_parameters(model: str) -> int:
    """Parameters of a model folder, each counted once; an output layer tied to the embedding is one product."""
    from safetensors import safe_open

    total = 0
    for path in Path(model).glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                size = 1
                for n in file.get_slice(key).get_shape():
                    size *= n
                total += size
    return total


def sampling_ceiling(model: str, dtype: str, threads: int, quick: bool) -> float:
    """Tokens/s if a token cost 2 FLOP a parameter at the best rate of this run's skinny products, of whatever dtype."""
    found = rates(threads, quick)
    return 1e9 * max(found[f"{d} skinny"] for d in {dtype, "float32"}) / (2 * num_parameters(model))


def learning_ceiling(
    model: str, dtype: str, threads: int, quick: bool, tokens_each: float = 1.0
) -> float:
    """Completion tokens/s if a token cost 2 FLOP a parameter forward and 2 backward (LoRA: no gradient of the weights).

    `tokens_each`: tokens to be computed for one completion token, with each prompt computed once a group.
    """
    found = rates(threads, quick)
    best = max(found[f"{d} square"] for d in {dtype, "float32"})
    return 1e9 * best / (4 * num_parameters(model) * tokens_each)


def rows(args: argparse.Namespace) -> list[common.Row]:
    """One row a rate and thread count; ours is this machine's."""
    out = []
    for threads in sorted({1, common.all_threads()}):
        try:
            found = rates(threads, args.quick)
        except common.Missing as error:
            out.append(common.row(f"ceiling, {threads} threads", "GFLOP/s", {}, note=str(error)))
            continue
        for name in (*PROBES, COPY):
            unit = "GB/s" if name == COPY else "GFLOP/s"
            what = f"{name} product" if name != COPY else "memory copy"
            note = f"{SKINNY_ROWS} rows, weights from memory" if "skinny" in name else ""
            out.append(
                common.row(
                    f"ceiling: {what}, {threads} threads",
                    unit,
                    {common.OURS: [found[name]]},
                    note=note,
                )
            )
    return out


if __name__ == "__main__":
    given = common.read_job()
    common.give(probe(given))
