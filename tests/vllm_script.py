"""Runs the vLLM engine where vLLM is, and writes down all it did; test_vllm.py judges it where vLLM is not.

python tests/vllm_script.py FOLDER      FOLDER/model, FOLDER/run and FOLDER/plan.json -> FOLDER/result.json
"""

import copy
import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from splitgrpo.adapters import Adapter, read_version
from splitgrpo.engines.base import Sampling
from splitgrpo.engines.hf import HFEngine
from splitgrpo.engines.vllm import VLLMEngine
from splitgrpo.models import DTYPES, load_base

END = 29  # not one of the model's own


class Tokenizer:
    """Just enough of one."""

    eos_token_id = END

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(str(i) for i in ids)


def start(folder: Path, adapter: Adapter, max_tokens: int) -> VLLMEngine:
    base = load_base(str(folder / "model"), DTYPES[adapter.manifest.base_dtype])
    cpu = torch.device("cpu")
    return VLLMEngine(base, adapter, Tokenizer(), cpu, max_tokens=max_tokens, max_rows=64)


def error_of(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def damaged(adapter: Adapter) -> dict[str, Adapter]:
    """Adapters that must not be taken, by what is wrong with them."""
    key = sorted(adapter.tensors)[0]
    scaled, unknown = copy.copy(adapter.config), copy.copy(adapter.config)
    scaled.lora_alpha, unknown.init_lora_weights = 99, "pissa"  # the last, vLLM alone refuses
    tensors = adapter.tensors
    return {
        "missing": replace(adapter, tensors={k: v for k, v in tensors.items() if k != key}),
        "extra": replace(adapter, tensors=tensors | {"a.lora_A.weight": tensors[key]}),
        "shape": replace(adapter, tensors=tensors | {key: tensors[key][:, :-1].contiguous()}),
        "scaling": replace(adapter, config=scaled),
        "kind": replace(adapter, config=unknown),
    }


class Trial:
    """One engine and what is asked of it."""

    def __init__(self, folder: Path) -> None:
        plan = json.loads((folder / "plan.json").read_text())
        self.prompts = [np.array(p, dtype=np.int32) for p in plan["prompts"]]
        self.long = np.array(plan["long"], dtype=np.int32)
        self.samplings = [Sampling(*s) for s in plan["samplings"]]
        self.adapters = [read_version(folder / "run", v, 1) for v in range(plan["versions"])]
        self.base = load_base(str(folder / "model"), torch.float32)
        self.too_long = error_of(lambda: start(folder, self.adapters[0], 1000))
        self.engine = start(folder, self.adapters[0], 96)

    def draw(self, prompts, num: int, sampling: Sampling, seed: int, on_token=lambda: None) -> list:
        groups = self.engine.generate(prompts, num, sampling, seed=seed, on_token=on_token)
        return [
            [{"ids": c.token_ids.tolist(), "logprobs": c.logprobs.tolist(), "finished": c.finished}
             for c in group] for group in groups
        ]  # fmt: skip

    def version(self, number: int) -> dict:
        """All samplings with one version, its reference, and how many tokens of a shared prompt were not computed."""
        if number:
            self.engine.install(self.adapters[number])
        drawn = [self.draw(self.prompts, 3, s, seed=number) for s in self.samplings]
        plain = self.samplings[0]
        groups = self.engine.generate(self.prompts, 3, plain, seed=number, on_token=lambda: None)
        refs = [self.engine.ref_logprobs(p, g, plain) for p, g in zip(self.prompts, groups)]  # noqa: B905
        again = self.draw(self.prompts, 3, plain, seed=number)
        options = {"max_tokens": 2, "temperature": 0.0, "logprobs": 0}
        outs = self.engine._run([(self.long, options)] * 3, self.engine._lora, lambda: None)
        return {
            "drawn": drawn,
            "refs": [[r.tolist() for r in group] for group in refs],
            "again": again,
            "cached": [out.num_cached_tokens for out in outs],
            "loras": sorted(self.engine._llm.list_loras()),
        }

    def give_up(self) -> dict:
        """A call that ends at the fourth step, and one after it."""
        calls = []

        def on_token() -> None:
            calls.append(1)
            if len(calls) == 4:
                raise KeyboardInterrupt

        try:
            self.draw(self.prompts, 3, self.samplings[0], 0, on_token)
        except KeyboardInterrupt:
            left = self.engine._llm.get_num_unfinished_requests()
        calls.clear()
        return {"left": left, "after": self.draw(self.prompts, 3, self.samplings[0], 2)}

    def run(self) -> dict:
        result = {"too_long": self.too_long, "end_ids": self.engine.end_ids}
        result["hf"] = error_of(lambda: HFEngine(self.base, Tokenizer()))
        result["versions"] = [self.version(v) for v in range(len(self.adapters))]
        result["gave_up"] = self.give_up()
        bad = damaged(self.adapters[0])
        result["refused"] = {
            k: error_of(lambda a=a: self.engine.install(a)) for k, a in bad.items()
        }
        result["loras_after"] = sorted(self.engine._llm.list_loras())
        result["after_refusals"] = self.draw(self.prompts, 3, self.samplings[0], 2)
        result["other_seed"] = self.draw(self.prompts, 3, self.samplings[0], 3)
        greedy = Sampling(0.0, 0, 1.0, 15)
        result["together"] = self.draw(self.prompts, 1, greedy, 0)
        result["alone"] = [self.draw([p], 1, greedy, 0)[0] for p in self.prompts]
        result["ends"] = self.draw(self.prompts[:1], 64, Sampling(1.5, 0, 1.0, 20), 0)
        calls = []
        counted = self.draw(self.prompts, 3, self.samplings[0], 0, lambda: calls.append(1))
        longest = max(len(c["ids"]) for group in counted for c in group)
        result["steps"] = [len(calls), longest]
        ones = self.draw(self.prompts[:1], 2000, Sampling(1.3, 5, 1.0, 1), 9)[0]
        result["frequencies"] = Counter(c["ids"][0] for c in ones)
        result["probabilities"] = {c["ids"][0]: c["logprobs"][0] for c in ones}
        heads = Path(self.base.name_or_path).parent / "heads"
        result["heads"] = error_of(lambda: start(heads, read_version(heads / "run", 0, 1), 32))
        return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    (Path(sys.argv[1]) / "result.json").write_text(json.dumps(Trial(Path(sys.argv[1])).run()))
    sys.stderr.flush()
    os._exit(0)  # as the workers do
