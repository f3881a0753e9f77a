"""The learner's machinery: what the named steps of training_worker.py do."""

import logging
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from splitgrpo import models, zero
from splitgrpo.adapters import Publisher, base_digest
from splitgrpo.admission import ServerPlan
from splitgrpo.checkpoints import save_checkpoint
from splitgrpo.cli import warn_of
from splitgrpo.config import (
    LearnerSettings,
    agreed_settings,
    default_threads,
    effective_kl_coef,
    loss_options,
)
from splitgrpo.feed import Feed
from splitgrpo.journal import Journal, Replay, count_steps
from splitgrpo.logprobs import PolicyModule
from splitgrpo.losses import soft_overlong_penalty
from splitgrpo.mismatch import WARN_ABOVE, Correction, MismatchAlarm, PolicyHistory
from splitgrpo.monitor import MetricsWriter, step_line
from splitgrpo.process import StopFlag
from splitgrpo.rollout import Group, check_group
from splitgrpo.runfolder import claim_run_folder, mark_done
from splitgrpo.server import GroupServer
from splitgrpo.step import BadSteps, LossFn, StepPlan, optimizer_step, rollout_metrics

LINEAGE = 1  # raised at every start that goes on from a checkpoint


class Learner:
    """One rank of the learner; what only rank 0 has (server, publisher, metrics) is None on the others."""

    def __init__(self, settings: LearnerSettings, stop: StopFlag, log: logging.Logger) -> None:
        """Check everything that can be checked first, then join the ranks, load the model and start DeepSpeed."""
        self.settings, self.stop, self.log = settings, stop, log
        self.step = 0
        self.cursor: dict[int, int] = {}
        self.server: GroupServer | Replay | None = None
        self.journal: Journal | None = None
        self.publisher: Publisher | None = None
        self.metrics: MetricsWriter | None = None
        self.bad_steps = BadSteps(settings.max_bad_steps)
        self.started = self.step_started = time.monotonic()
        self._saved_step = -1
        self.ds = zero.read_ds_config(settings.ds_config, settings.learning_rate)
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        zero.check_batch(self.ds, num_ranks, settings.group_size, settings.ds_config)
        self.groups_per_step = self.ds.completions_per_step(num_ranks) // settings.group_size
        models.check_model_path(settings.model_path)
        self.max_steps = settings.max_steps
        if settings.replay:
            recorded = count_steps(settings.replay, self.groups_per_step)
            self.max_steps = min(self.max_steps, recorded)
        self.run_dir, self.key, self.run_id = Path(settings.save_path), b"", ""
        if int(os.environ.get("RANK", "0")) == 0:
            self._open()
        self.ranks = zero.start_ranks(default_threads(settings.num_threads))
        self.engine = self._start_engine()
        self.feed = Feed(
            self.ranks,
            self.server,
            self._share_key(),
            wait_timeout_s=settings.wait_timeout_s,
            should_stop=stop,
            log=log,
        )

    # -- start-up -----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Rank 0: claim folder and port before anything slow happens."""
        s = self.settings
        for warning in warn_of(s):
            self.log.warning("%s", warning)
        self.run_dir, self.key, self.run_id = claim_run_folder(s.save_path)
        vocab_size = models.load_config(s.model_path).get_text_config().vocab_size
        want_ref = effective_kl_coef(s) > 0

        def check(group: Group) -> None:
            check_group(
                group,
                group_size=s.group_size,
                vocab_size=vocab_size,
                max_len=s.max_prompt_tokens + s.max_new_tokens,
                want_ref=want_ref,
            )

        plan = ServerPlan(
            run_id=self.run_id,
            lineage=LINEAGE,
            settings=agreed_settings(s),
            groups_per_step=self.groups_per_step,
            max_staleness=s.max_staleness,
            max_steps=s.max_steps,
            start_version=self.step,
            next_seq={},
            peer_timeout_s=s.wait_timeout_s,
            check_group=check,
            journal=s.journal,
        )
        self.metrics = MetricsWriter(self.run_dir / "metrics.jsonl")
        if s.replay:
            self.server = Replay(s.replay, self.key, plan, s.temperature)
            self.log.info(
                "replaying %d steps of %s, run folder %s", self.max_steps, s.replay, self.run_dir
            )
            return
        self.server = GroupServer(s.host, s.port, self.key, plan, self.log)
        self.log.info("listening on %s:%d, run folder %s", s.host, s.port, self.run_dir)
        if s.journal:
            self.journal = Journal(self.run_dir, s, self.ds.config, self.groups_per_step, self.log)

    def _start_engine(self) -> Any:
        s = self.settings
        base = models.load_base(s.model_path, models.DTYPES[self.ds.dtype_name])
        digest = base_digest(base)
        self.model = models.add_lora(base, s.lora_rank, s.lora_alpha, s.seed)
        self.log.info("%s: %s", s.model_path, models.describe_parameters(self.model))
        if self.ranks.is_main:
            self.publisher = Publisher(
                run_dir=self.run_dir,
                run_id=self.run_id,
                lineage=LINEAGE,
                base_model=s.model_path,
                base_digest=digest,
                base_dtype=self.ds.dtype_name,
                config=models.lora_config(self.model),
                keep=s.keep_adapters,
            )
        self.history = PolicyHistory(self.model, s.max_staleness + 1)
        limit = WARN_ABOVE[self.ds.dtype_name] if s.mismatch_warn is None else s.mismatch_warn
        self.alarm = MismatchAlarm(limit, filtered=s.top_k > 0 or s.top_p < 1)
        policy = PolicyModule(
            self.model, s.temperature, s.top_k, s.top_p, entropy_grad=s.entropy_coef > 0
        )
        return zero.start_engine(policy, self.ds)

    def _share_key(self) -> bytes:
        """Other ranks need the key to check the bytes that rank 0 shares."""
        tensor = torch.zeros(32, dtype=torch.uint8)
        if self.key:
            tensor = torch.frombuffer(bytearray(self.key), dtype=torch.uint8)
        if self.ranks.num_ranks > 1:
            torch.distributed.broadcast(tensor, src=0, group=self.ranks.control)
        return tensor.numpy().tobytes()

    # -- the steps ------------------------------------------------------------------------------------------------------

    def next_groups(self) -> list[Group]:
        """Wait for the groups of the next step. Raises Stopped, PeerTimeout."""
        self.step_started = time.monotonic()
        groups = self.feed.next_groups(self.groups_per_step, self.step)
        self.wait_s = time.monotonic() - self.step_started
        if groups is None:
            self.stop.raise_with_the_others()
        if self.journal is not None and self.server is not None:
            self.journal.write(self.step, self.server.take_arrivals())
        return groups

    def rewards(self, groups: list[Group]) -> Tensor:
        """(S,) float64 rewards of all completions, less the penalty for overlong ones where that is asked for."""
        s, rollouts = self.settings, [r for g in groups for r in g.rollouts]
        rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float64)
        if s.soft_overlong_tokens:
            lengths = torch.tensor([r.completion_len for r in rollouts])
            rewards += soft_overlong_penalty(lengths, s.max_new_tokens, s.soft_overlong_tokens)
        return rewards

    def optimizer_step(
        self, groups: list[Group], advantages: Tensor, loss_fn: LossFn
    ) -> dict[str, float]:
        """Take one step; `advantages` (S,) in the order of the rollouts. Returns metrics. Raises Stopped."""
        s = self.settings
        corrected = s.mismatch_correction != "none"
        correction = Correction(s.mismatch_correction, s.mismatch_level, s.mismatch_cap)
        plan = StepPlan(
            ranks=self.ranks,
            loss_fn=loss_fn,
            loss_options=loss_options(s),
            micro_batch_size=self.ds.micro_batch_size,
            pad_id=0,
            max_new_tokens=s.max_new_tokens,
            mask_truncated=s.mask_truncated,
            entropy_coef=s.entropy_coef,
            history=self.history,
            correction=correction if corrected else None,
            agree=self.feed.agree,
            should_stop=self.stop,
            bump=self.server.bump if self.server else lambda: None,
        )
        started = time.monotonic()
        lr = float(self.engine.get_lr()[0])  # before the step: a scheduler moves it there
        result = optimizer_step(self.engine, groups, advantages, plan, self.step)
        if result is None:
            self.stop.raise_with_the_others()
        self.step += 1
        for group in groups:
            self.cursor[group.sampler_id] = max(self.cursor.get(group.sampler_id, 0), group.seq + 1)
        if warning := self.bad_steps.note(result, self.step):
            self.log.warning("%s", warning)
        if self.ranks.is_main and (warning := self.alarm.note(result)):
            self.log.warning("%s", warning)
        result |= {"lr": lr, "train_s": time.monotonic() - started}
        return result | rollout_metrics(groups, self.step - 1, advantages)

    def publish(self, *, done: bool = False) -> None:
        """Publish the weights if this step is due, and raise the samplers' credit. Raises OSError."""
        if self.step % self.settings.sync_steps and not done:
            return
        tensors = zero.lora_state(self.model)
        self.history.add(self.step, tensors)
        if self.publisher is not None and self.server is not None:
            pointer = self.publisher.publish(self.step, tensors, done=done)
            self.server.set_version(self.step, pointer.sha256)

    def report(self, metrics: dict[str, float]) -> None:
        """Write one line of metrics.jsonl and one line on the console."""
        if self.metrics is None or self.server is None:
            return
        now = time.monotonic()
        step_s = now - self.step_started
        row = {
            "step": self.step,
            "time_s": now - self.started,
            "step_s": step_s,
            "wait_s": self.wait_s,
            **{k: v for k, v in metrics.items() if k != "applied"},
            "tokens_per_s": metrics["completion_tokens"] / step_s,
            "dropped_stale": self.server.dropped["stale"],
            "dropped_invalid": self.server.dropped["invalid"] + sum(self.server.invalid.values()),
            "skipped_steps": self.bad_steps.total,
            "max_steps": self.max_steps,
        }
        self.metrics.write(row)
        self.log.info("%s", step_line(row))

    def save_if_due(self) -> None:
        """Write a checkpoint every save_steps."""
        if self.step % self.settings.save_steps == 0:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the last finished step. Every rank calls this."""
        if self._saved_step == self.step:
            return
        path = save_checkpoint(
            self.run_dir,
            self.engine,
            self.ranks,
            self.settings,
            step=self.step,
            lineage=LINEAGE,
            cursor=self.cursor,
        )
        self._saved_step = self.step
        self.log.info("state of step %d saved in %s", self.step, path)

    def finish(self) -> None:
        """Save, publish with the done flag, leave the final adapter and done.json, and send the samplers home."""
        self.save()
        self.publish(done=True)
        if self.publisher is not None:
            folder = self.run_dir / "adapters" / f"v{self.step:06d}.L{LINEAGE}"
            report = {"steps": self.step, "skipped_steps": self.bad_steps.total,
                      "train_wall_s": time.monotonic() - self.started}  # fmt: skip
            mark_done(self.run_dir, folder, report)
        self.close(finished=True, reason=f"finished {self.step} steps")
        self.log.info("finished %d steps: %s", self.step, self.run_dir)

    def close(self, *, finished: bool, reason: str) -> None:
        """Say goodbye to the samplers and free the port; harmless when done already."""
        if self.server is not None:
            self.server.close(finished=finished, reason=reason)
            self.server = None

    def __enter__(self) -> "Learner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(finished=False, reason=f"ended by {kind.__name__}" if kind else "ended")
