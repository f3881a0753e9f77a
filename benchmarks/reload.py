"""How long a sampler takes to go on with new weights: from a learner's publish to the next token that they have drawn.

    python benchmarks/reload.py [--model M] [--runs 7]

The sampler is the real program, sampling_worker.py; this process is its learner: it publishes, grants credit for two
rounds of one group of one token, and looks at when the groups have come. The first round loads the new weights, the second
has them: the difference is what a reload takes. With --max_staleness 0 no round is in flight meanwhile.
"""

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import common  # noqa: E402

RANK, ALPHA, RUNS = 16, 32, 7
START_S, ANSWER_S = 120.0, 30.0  # for the sampler to be there; for one group
GIVEN = {"data": "arithmetic", "group_size": 2, "batch_size": 2, "max_new_tokens": 1, "max_prompt_tokens": 512,
         "max_staleness": 0, "kl_coef": 0.0, "max_steps": 1_000_000, "wait_timeout_s": 60.0}  # fmt: skip
log = logging.getLogger("reload")


class Rig:
    """A run folder with adapters of a model, a learner's port, and the program sampling_worker.py; a context."""

    def __init__(self, folder: Path, model: str, dtype: str) -> None:
        """Publish version 0 and listen; `start` starts the sampler."""
        from splitgrpo import models
        from splitgrpo.adapters import Publisher, adapter_parameters, base_digest
        from splitgrpo.admission import ServerPlan
        from splitgrpo.config import SamplerSettings, agreed_settings
        from splitgrpo.server import GroupServer
        from splitgrpo.transport import make_key
        from splitgrpo.zero import free_port

        self.folder, self.process = folder, None
        self.given = GIVEN | {"model_path": model, "port": free_port(), "lora_path": str(folder)}
        (folder / "adapters").mkdir(parents=True)
        base = models.load_base(model, models.DTYPES[dtype])
        digest = base_digest(base)
        with_lora = models.add_lora(base, RANK, ALPHA, seed=0)
        self.publisher = Publisher(
            folder, "run", 1, model, digest, dtype, models.lora_config(with_lora), keep=4
        )
        self.tensors = {k: p.detach().float() for k, p in adapter_parameters(with_lora).items()}
        first = self.publisher.write(0, self.tensors)
        plan = ServerPlan(run_id="run", lineage=1, settings=agreed_settings(SamplerSettings(**self.given)),
                          groups_per_step=2, max_staleness=0, max_steps=self.given["max_steps"], start_version=0, cursor={},
                          peer_timeout_s=60.0, check_group=lambda group: None, old_digests={0: first})  # fmt: skip
        key = make_key(folder / "run.key")
        self.server = GroupServer("127.0.0.1", self.given["port"], key, plan, log)
        self.publisher.point(0, first)

    def start(self) -> float:
        """Start the sampler; returns the seconds to its first group. Raises common.Missing when none comes."""
        command = [sys.executable, str(HERE.parent / "sampling_worker.py")]
        command += [f"--{name}={value}" for name, value in self.given.items()]
        started = time.monotonic()
        with (self.folder / "sampler.log").open("wb") as file:
            self.process = subprocess.Popen(command, cwd=HERE.parent, stdout=file, stderr=file)
        self.take(0, START_S)
        took_s = time.monotonic() - started
        self.take(0, ANSWER_S)
        return took_s

    def take(self, version: int, wait_s: float) -> None:
        """Wait for the group of a version. Raises common.Missing."""
        deadline = time.monotonic() + wait_s
        while self.server.take(1, version, 0.5) is None:
            ended = self.process is not None and self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                said = (self.folder / "sampler.log").read_text().splitlines()
                raise common.Missing(
                    f"no group of version {version}; the sampler's last line: {said[-1:]}"
                )

    def publish(self, version: int) -> tuple[float, float, float]:
        """Publish once: ms to the pointer, ms from there to a group of the new version, ms from that one to the next."""
        tensors = {k: t + 1e-6 * version for k, t in self.tensors.items()}
        before = time.monotonic()
        digest = self.publisher.write(version, tensors)
        self.server.expect(version, digest)
        self.publisher.point(version, digest)
        pointed = time.monotonic()
        self.server.set_version(version, digest)
        self.take(version, ANSWER_S)
        first = time.monotonic()
        self.take(version, ANSWER_S)
        return 1e3 * (pointed - before), 1e3 * (first - pointed), 1e3 * (time.monotonic() - first)

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.close(finished=True, reason="measured")
        if self.process is not None:
            try:
                self.process.wait(10.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def parts(rig: Rig, runs: int) -> str:
    """Words on what the sampler does between the pointer and the token, measured in this process."""
    import torch

    from splitgrpo import models
    from splitgrpo.config import default_threads
    from splitgrpo.engines.base import Sampling
    from splitgrpo.engines.fast import open_engine
    from splitgrpo.reload import read_newest

    models.use_threads(default_threads(0))
    rig.publisher.point(0, rig.publisher.write(0, rig.tensors))
    held = read_newest(rig.folder)
    assert held is not None
    rig.publisher.point(1_000_000, rig.publisher.write(1_000_000, rig.tensors))
    model = rig.given["model_path"]
    base = models.load_base(model, models.DTYPES[held.manifest.base_dtype])
    engine = open_engine(models.attach_adapter(base, held), models.load_tokenizer(model),
                         logging.getLogger("reload"), plain=False)  # fmt: skip
    prompt = torch.tensor(common.prompt_ids(model, "arithmetic", 1)[0]).int().numpy()
    sampling = Sampling(1.0, 0, 1.0, 1)
    took: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        before = time.perf_counter()
        found = work()
        took.setdefault(name, []).append(1e3 * (time.perf_counter() - before))
        return found

    for _ in range(runs):
        new = timed("read and checked", lambda: read_newest(rig.folder, held))
        timed("installed", lambda new=new: engine.install(new))
        timed(
            "first token",
            lambda: engine.generate([prompt], 2, sampling, seed=0, on_token=lambda: None),
        )
    return ", ".join(f"{name} {statistics.median(ms):.0f} ms" for name, ms in took.items())


def rows(args: argparse.Namespace | None = None) -> list[common.Row]:
    """Three rows a model: ms from the weights to the pointer, from there to their use, and to the next token."""
    given = args or build_parser().parse_args([])
    runs, out = getattr(given, "runs", RUNS), []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        models = {"demo": (lambda: common.demo_model(work), "float32")}
        if not getattr(given, "quick", False):
            models["model"] = (lambda: common.model_of(given), "bfloat16")
        for what, (make, dtype) in models.items():
            try:
                model = make()
                title = f"reload: {what if what == 'demo' else Path(model).name}"
                with Rig(work / f"run-{what}", model, dtype) as rig:
                    rig.start()
                    found = [rig.publish(v) for v in range(1, runs + 1)]
                note = f"parts, in another process: {parts(rig, runs)}"
            except common.Missing as error:
                out.append(common.row(f"reload: {what}", "ms", {}, note=str(error)))
                continue
            published, first, second = zip(*found, strict=True)
            reloads = [a - b for a, b in zip(first, second, strict=True)]
            own = f"written, fsynced, pointed at; LoRA r{RANK}, {dtype}"
            out += [
                common.row(f"{title}, publish", "ms", {common.OURS: published}, note=own),
                common.row(f"{title}, pointer to new weights in use", "ms", {common.OURS: reloads}, note=note),
                common.row(
                    f"{title}, pointer to next token", "ms", {common.OURS: first},
                    note=f"scored and sent as well; a round without a reload takes {statistics.median(second):.0f} ms",
                ),
            ]  # fmt: skip
    return out


def build_parser() -> argparse.ArgumentParser:
    """Flags of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default=str(HERE.parent / "models/smollm2"))
    parser.add_argument("--runs", type=common.at_least_one, default=RUNS)
    parser.add_argument("--quick", action="store_true", help="the demo model only")
    return parser


def show(found: list[common.Row]) -> None:
    """One line a row."""
    for row in found:
        ours = "-" if row["ours"] is None else f"{row['ours']:.3g}"
        sys.stdout.write(f"{row['name']:48} {ours:>8} {row['unit']:3} {row['note']}\n")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    common.run_main(lambda: show(rows(build_parser().parse_args())))
