"""How cost grows with completion length, group size, vocabulary and model size: the tables of docs/scaling.md.

    python benchmarks/growth.py [--only length,group,vocab,size] [--runs 3]

Seconds of one round of the sampler and of one step of the learner, each in a process of its own, all cores. The law
is y = a * x^b, least squares on logarithms. How a learner receives from many samplers is receive.py's.
"""

import argparse
import functools
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import common  # noqa: E402

TOPICS = ("length", "group", "vocab", "size")
PROMPT_TOKENS = 112
LENGTHS, GROUPS, VOCABS = (64, 128, 256, 512), (2, 4, 8, 16), (8_192, 32_768, 131_072)
# Layers, hidden, feed-forward; the shape of SmolLM2-135M in the middle, the head left small.
SIZES = ((8, 256, 768), (16, 448, 1216), (30, 576, 1536), (24, 896, 2432))


def random_model(folder: Path, vocab: int, layers: int, hidden: int, inner: int) -> str:
    """A model folder with random bfloat16 weights and the demo's tokenizer; heads of 64, a third for keys and values."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from splitgrpo.demo import build_tokenizer

    out = folder / f"random-{vocab}-{layers}-{hidden}"
    if not out.exists():
        heads = hidden // 64
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads // 3 if heads % 3 == 0 else heads,
            tie_word_embeddings=True, max_position_embeddings=2048,
        )  # fmt: skip
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
        build_tokenizer().save_pretrained(out)
    return str(out)


def both(
    model: str, prompts: list[list[int]], group: int, tokens: int, vocab: int, runs: int
) -> tuple[float, float, float]:
    """Median seconds of a round, of a step, and the step's MiB above the weights."""
    job: dict[str, Any] = {
        "model": model, "dtype": "bfloat16", "threads": common.all_threads(), "group_size": group, "new_tokens": tokens,
        "prompts": prompts, "warm": prompts, "repeat": 1, "vocab_size": vocab, "micro_batch": 8, "side": common.OURS,
        "lora_rank": 16, "lora_alpha": 32,
    }  # fmt: skip
    rounds = [common.measure(sys.executable, "sampler.py", job) for _ in range(runs)]
    steps = [common.measure(sys.executable, "learner.py", job) for _ in range(runs)]
    return (median(r["seconds"] for r in rounds), median(s["seconds"] for s in steps),
            median(s["above_mib"] for s in steps))  # fmt: skip


def law(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """a and b of y = a * x^b."""
    lx, ly = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mx, my = sum(lx) / len(lx), sum(ly) / len(ly)
    b = sum((x - mx) * (y - my) for x, y in zip(lx, ly, strict=True)) / sum(
        (x - mx) ** 2 for x in lx
    )
    return math.exp(my - b * mx), b


def table(title: str, unit: str, xs: Sequence[float], found: Sequence[tuple[float, ...]]) -> str:
    """A Markdown table of one topic, its laws in the last line."""
    head = f"| {unit} | sampler s | learner s | learner MiB above the weights |"
    lines = [f"**{title}**", "", head, "|---|---|---|---|"]
    for x, (sampler_s, learner_s, mib) in zip(xs, found, strict=True):
        lines.append(f"| {x:,.0f} | {sampler_s:.2f} | {learner_s:.2f} | {mib:,.0f} |")
    laws = [law(xs, [f[i] for f in found]) for i in range(3)]
    lines.append("| law | " + " | ".join(f"{a:.2g} x^{b:.2f}" for a, b in laws) + " |")
    return "\n".join(lines)


def num_parameters(layers: int, hidden: int, inner: int) -> int:
    """Of the layers: what every token goes through."""
    heads = hidden // 64
    keys = heads // 3 if heads % 3 == 0 else heads
    return layers * hidden * (2 * hidden + 2 * keys * 64 + 3 * inner)


def run(topic: str, model: str, runs: int, folder: Path) -> str:
    """Measure one topic."""
    prompts = [list(range(3, 3 + PROMPT_TOKENS)) for _ in range(4)]
    for i, prompt in enumerate(prompts):
        prompt[0] = 3 + i  # four different ones
    if topic == "length":
        found = [both(model, prompts, 4, n, 49_152, runs) for n in LENGTHS]
        return table("Completion length: SmolLM2-135M, 4 prompts x 4", "new tokens", LENGTHS, found)
    if topic == "group":
        found = [both(model, prompts[:2], g, 128, 49_152, runs) for g in GROUPS]
        title = "Group size: SmolLM2-135M, 2 prompts, 128 tokens"
        return table(title, "completions of a prompt", GROUPS, found)
    small = [[t % 30 for t in p] for p in prompts]
    if topic == "vocab":
        models = [random_model(folder, v, 4, 384, 1024) for v in VOCABS]
        found = [both(m, small, 4, 128, v, runs) for m, v in zip(models, VOCABS, strict=True)]
        title = "Vocabulary: 4 layers of 384, 4 prompts x 4 x 128"
        return table(title, "tokens of the vocabulary", VOCABS, found)
    models = [random_model(folder, 1024, *size) for size in SIZES]
    found = [both(m, small, 4, 128, 1024, runs) for m in models]
    sizes = [num_parameters(*size) for size in SIZES]
    title = "Model size: vocabulary 1,024, 4 prompts x 4 x 128"
    return table(title, "parameters of the layers", sizes, found)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", type=functools.partial(common.names_of, TOPICS), default=TOPICS)
    parser.add_argument("--runs", type=common.at_least_one, default=3)
    parser.add_argument("--model", default=str(HERE.parent / "models/smollm2"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for topic in args.only:
            sys.stdout.write(run(topic, args.model, args.runs, Path(folder)) + "\n\n")
            sys.stdout.flush()


if __name__ == "__main__":
    common.run_main(main)
