"""The sampler's machinery: what the named steps of sampling_worker.py do."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from splitgrpo import models
from splitgrpo.adapters import Adapter
from splitgrpo.client import GroupClient, RunFinished, make_hello
from splitgrpo.config import (
    PeerTimeout,
    SamplerSettings,
    SettingsError,
    agreed_settings,
    default_threads,
    effective_kl_coef,
)
from splitgrpo.engines.base import Completion, Engine, Sampling
from splitgrpo.engines.fast import open_engine
from splitgrpo.engines.vllm import VLLMEngine, check_vllm
from splitgrpo.keys import read_curve
from splitgrpo.pointer import POINTER, AdapterError, last_pointer, read_pointer
from splitgrpo.process import StopFlag
from splitgrpo.reload import Failures, read_newest
from splitgrpo.rollout import Group, Rollout
from splitgrpo.scoring import Score
from splitgrpo.transport import read_key
from splitgrpo.wire import Reason

SAY_EVERY_S = 10.0
RETRY_S = 0.5  # after a failure
POLL_S = 0.05  # for what is not there yet
LOOK_S = 2.0


class Sampler:
    """One sampler: an engine with the newest adapter, and a line to the learner; both from `join` on."""

    adapter: Adapter
    engine: Engine
    client: GroupClient

    def __init__(self, settings: SamplerSettings, stop: StopFlag, log: logging.Logger) -> None:
        """Check what can be checked and load the tokenizer. Raises SettingsError."""

        self.settings, self.stop, self.log = settings, stop, log
        self.run_dir = Path(settings.lora_path)
        self.sampling = Sampling(
            settings.temperature, settings.top_k, settings.top_p, settings.max_new_tokens
        )
        self.num_replaced = self._in_row = 0
        self._looked = self._waited_s = 0.0
        self.failures = Failures(settings.reload_failures, log)
        self.want_ref = effective_kl_coef(settings) > 0
        if settings.engine == "vllm":
            check_vllm(settings)
        models.check_model_path(settings.model_path)
        self.device = models.pick_device(settings.device, log)
        models.use_threads(default_threads(settings.num_threads))
        self.tokenizer = models.load_tokenizer(settings.model_path)

    def join(self) -> None:
        """Wait for the learner's first published adapter, load the base model with it and connect.

        Raises Stopped, PeerTimeout, SettingsError.
        """
        settings, base = self.settings, None
        dtype = models.likely_dtype(settings.model_path, self.device)
        place = "cpu" if settings.engine == "vllm" else self.device  # vLLM loads its own
        if not (self.run_dir / POINTER).exists():  # what the learner's start takes is time to use
            base = models.load_base(settings.model_path, dtype, place)
        self.adapter = self._wait_for(self._first_adapter, "a learner to publish an adapter")
        published = models.DTYPES[self.adapter.manifest.base_dtype]
        if base is None or dtype != published:
            base = None  # not two of them in memory
            base = models.load_base(settings.model_path, published, place)
        self.engine = build_engine(
            settings, base, self.adapter, self.tokenizer, self.device, self.log
        )
        self.client = GroupClient(
            (settings.host, settings.port),
            read_key(self.run_dir / "run.key"),
            make_hello(settings.sampler_id, self.adapter.pointer.run_id, agreed_settings(settings)),
            wait_timeout_s=settings.wait_timeout_s,
            check_stop=self._raise_if_over,
            log=self.log,
            curve=read_curve(settings.curve_key, "sampler"),
        )

    def close(self) -> None:
        """Say goodbye to the learner, if it was joined."""
        if hasattr(self, "client"):
            self.client.close("ended")

    # -- adapters -------------------------------------------------------------------------------------------------------

    def _wait_for(self, get: Callable[[], Any], what: str) -> Any:
        """Poll until `get` returns something. Raises Stopped, PeerTimeout."""
        started = said = time.monotonic()
        while (value := get()) is None:
            self.stop.raise_if_set()
            waited = time.monotonic() - started
            if waited > self.settings.wait_timeout_s:
                raise PeerTimeout(
                    f"waited {waited:.0f} s for {what}: {self._looked_for()}. Start the learner with --save_path "
                    f"{self.run_dir}; --wait_timeout_s waits longer."
                )
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                self.log.info("waiting for %s (%.0f s): %s", what, waited, self._looked_for())
            time.sleep(RETRY_S if self.failures.num else POLL_S)
        return value

    def _raise_if_over(self) -> None:
        """While the learner is waited for: its goodbye may have been lost, and latest.json says the same."""
        self.stop.raise_if_set()
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        pointer = last_pointer(self.run_dir)  # a damaged one is for the next reload to tell of
        if pointer is not None and pointer.done and pointer.run_id == self.adapter.pointer.run_id:
            raise RunFinished

    def _looked_for(self) -> str:
        path = self.run_dir / POINTER
        if path.exists():
            if (pointer := last_pointer(self.run_dir)) is not None and pointer.done:
                return f"{path} is of a run that is finished; the learner goes on with it by --resume and more --max_steps"
            return f"{path} names no such version that can be loaded"
        if not self.run_dir.is_dir():
            return f"{path} is not there, nor is the folder"
        if (self.run_dir / "adapter_config.json").exists():
            return f"{path} is not there; that folder is an adapter, --lora_path must be the learner's --save_path"
        return f"{path} is not there"

    def _first_adapter(self) -> Adapter | None:
        try:
            pointer = read_pointer(self.run_dir)
            if pointer is not None and pointer.done:
                return None  # a learner that goes on with it may just be starting
            return read_newest(self.run_dir)
        except AdapterError as error:
            self._count_failure(error)
            return None

    def reload_adapter(self, least: tuple[int, int]) -> None:
        """Load the adapter that latest.json names if it is newer; it must be of at least (lineage, version) `least`.

        A damaged one is tried again; the old one stays in use meanwhile, and the sampler ends after --reload_failures.
        Raises Stopped, PeerTimeout, SettingsError.
        """
        self._wait_for(lambda: self._reload(least), f"adapter version {least[1]}")

    def _reload(self, least: tuple[int, int]) -> bool | None:
        self.client.bump("reloading the adapter")
        try:
            adapter = read_newest(self.run_dir, self.adapter)
            if adapter is not None:
                self.engine.install(adapter)
                self.adapter = adapter
            self.failures.clear(self.adapter.pointer.folder)
        except AdapterError as error:
            self._count_failure(error)
        pointer = self.adapter.pointer
        return True if (pointer.lineage, pointer.version) >= least else None

    def _count_failure(self, error: AdapterError) -> None:
        if self.failures.count(error) >= self.settings.reload_failures:
            raise SettingsError(
                f"{self.failures.num} reloads of the adapter in a row failed (--reload_failures); last: {error}"
            ) from error

    # -- rounds ---------------------------------------------------------------------------------------------------------

    def wait_credit(self) -> int:
        """Wait until the learner wants groups, then hold an adapter that is new enough for them.

        Returns how many; they start at `next_seq`. Raises RunFinished, Stopped, PeerTimeout, SettingsError.
        """
        started = time.monotonic()
        num_groups, least = self.client.wait_grant(
            self.settings.batch_size // self.settings.group_size
        )
        self.reload_adapter(least)
        self._waited_s = time.monotonic() - started
        return num_groups

    @property
    def next_seq(self) -> int:
        """Sequence number of the next group to send."""
        return self.client.next_seq

    def generate(self, prompts: Sequence[np.ndarray]) -> list[list[Completion]]:
        """Sample group_size completions of each prompt, seeded by the next sequence number. Raises Stopped."""
        started = time.monotonic()
        seed = round_seed(self.settings.seed, self.settings.sampler_id, self.next_seq)

        def on_token() -> None:
            self.stop.raise_if_set()
            self.client.bump(f"sampling, {self._in_row} groups replaced in a row")

        out = self.engine.generate(
            prompts, self.settings.group_size, self.sampling, seed=seed, on_token=on_token
        )
        num_tokens = sum(len(c.token_ids) for group in out for c in group)
        took = time.monotonic() - started
        self.log.info(
            "sampled %d completions, %d tokens in %.1f s (%.0f tokens/s) with version %d, waited %.2f s%s",
            len(prompts) * self.settings.group_size, num_tokens, took, num_tokens / took,
            self.adapter.pointer.version, self._waited_s,
            f"; {self.num_replaced} groups without a difference replaced so far" if self.settings.dynamic_sampling else "",
        )  # fmt: skip
        return out

    def responses(self, completions: Sequence[Completion], prefix: str) -> list[str]:
        """Text to score: what the template put into the model's mouth, and what it generated."""
        return [prefix + self.engine.decode(c.token_ids) for c in completions]

    def is_to_be_replaced(self, scores: Sequence[Score]) -> bool:
        """True for a group whose rewards are all equal; never for more than --dynamic_sampling of them in a row."""
        equal = len({score.reward for score in scores}) == 1
        replaced = equal and self._in_row < self.settings.dynamic_sampling
        self._in_row = self._in_row + 1 if replaced else 0
        self.num_replaced += replaced
        return replaced

    def send(
        self,
        draw: tuple[int, int, int],
        prompt: np.ndarray,
        completions: Sequence[Completion],
        scores: Sequence[Score],
    ) -> bool:
        """Send one group; `draw` is (sequence number, prompt_index, epoch). False if the learner wants another first."""
        pointer = self.adapter.pointer
        refs: Sequence[np.ndarray | None] = [None] * len(completions)
        if self.want_ref:
            refs = self.engine.ref_logprobs(prompt, completions, self.sampling)
        rollouts = tuple(
            make_rollout(prompt, c, ref, score)
            for c, ref, score in zip(completions, refs, scores, strict=True)
        )
        group = Group(
            rollouts=rollouts,
            sampler_id=self.settings.sampler_id,
            seq=draw[0],
            prompt_index=draw[1],
            epoch=draw[2],
            policy_version=pointer.version,
            lineage=pointer.lineage,
            adapter_digest=pointer.sha256,
            temperature=self.settings.temperature,
            run_id=pointer.run_id,
        )
        return self.client.send(group)

    def drop(self, seq: int, reason: Reason) -> bool:
        """Say that the group of a sequence number is not sent, and why. Returns as `send` does."""
        pointer = self.adapter.pointer
        return self.client.drop(seq, (pointer.lineage, pointer.version), reason)


def build_engine(
    settings: SamplerSettings, base: Any, adapter: Adapter, tokenizer: Any, device: Any,
    log: logging.Logger,
) -> Engine:  # fmt: skip
    """The engine of --engine with its first adapter; `base` is on `device`, for vLLM on the CPU. Raises SettingsError."""
    if settings.engine == "vllm":
        return VLLMEngine(base, adapter, tokenizer, device, max_rows=settings.batch_size,
                          max_tokens=settings.max_prompt_tokens + settings.max_new_tokens)  # fmt: skip
    return open_engine(models.attach_adapter(base, adapter), tokenizer, log, plain=settings.plain)


def round_seed(*numbers: int) -> int:
    """One 63-bit seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def make_rollout(
    prompt: np.ndarray, completion: Completion, ref: np.ndarray | None, score: Score
) -> Rollout:
    """Join a prompt and a completion into full-length streams."""
    p, c = len(prompt), len(completion.token_ids)
    zeros = np.zeros(p, dtype=np.float32)
    return Rollout(
        token_ids=np.concatenate([prompt, completion.token_ids]).astype(np.int32),
        completion_mask=np.arange(p + c) >= p,
        old_logprobs=np.concatenate([zeros, completion.logprobs]).astype(np.float32),
        ref_logprobs=None if ref is None else np.concatenate([zeros, ref]).astype(np.float32),
        reward=score.reward,
        correct=score.correct,
        finished=completion.finished,
        reward_parts=score.parts,
    )
