"""The learner's machinery: what the named steps of training_worker.py do."""

import dataclasses
import functools
import logging
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from splitgrpo import checkpoints, enginestate, models, zero
from splitgrpo.adapters import Publisher, base_digest
from splitgrpo.arrivals import REASONS, Trained
from splitgrpo.config import LearnerSettings, default_threads, loss_options
from splitgrpo.feed import Feed
from splitgrpo.journal import Journal, Replay, count_steps
from splitgrpo.ledger import Ledger
from splitgrpo.losses import soft_overlong_penalty
from splitgrpo.mismatch import WARN_ABOVE, Correction, MismatchAlarm, PolicyHistory
from splitgrpo.monitor import MetricsWriter, step_line
from splitgrpo.opening import Start, is_main, old_adapters, open_run, share_start
from splitgrpo.policy import PolicyModule
from splitgrpo.process import StopFlag
from splitgrpo.rankwatch import join_ranks
from splitgrpo.rollout import Group
from splitgrpo.runfolder import PatientWriter, mark_done
from splitgrpo.server import GroupServer
from splitgrpo.step import BadSteps, LossFn, StepPlan, optimizer_step, rollout_metrics


class Learner:
    """One rank of the learner; what only rank 0 has (server, publisher, metrics) is None on the others."""

    def __init__(self, settings: LearnerSettings, stop: StopFlag, log: logging.Logger) -> None:
        """Check everything that can be checked first, then join the ranks, load the model and start DeepSpeed."""
        self.settings, self.stop, self.log = settings, stop, log
        self.step, self._saved_step, self._published = 0, -1, False
        self.server: GroupServer | Replay | None = None
        self._cursor: dict[int, int] = {}
        self.ledger: Ledger | None = None
        self.metrics: MetricsWriter | None = None
        self.journal: Journal | None = None
        self.publisher: Publisher | None = None
        self.bad_steps = BadSteps(settings.max_bad_steps)
        self.started = self.step_started = time.monotonic()
        self.patiently = PatientWriter(
            settings.save_path, settings.wait_timeout_s / 2, stop, self._bump, log
        )
        self.ds = zero.read_ds_config(settings.ds_config, settings.learning_rate)
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        zero.check_batch(self.ds, num_ranks, settings.group_size, settings.ds_config)
        self.groups_per_step = self.ds.completions_per_step(num_ranks) // settings.group_size
        models.check_model_path(settings.model_path)
        self.max_steps = settings.max_steps
        if settings.replay:
            recorded = count_steps(settings.replay, self.groups_per_step, self.max_steps, log)
            self.max_steps = min(self.max_steps, recorded)
        self.run_dir, key, self.start = Path(settings.save_path), b"", Start("")
        watch = join_ranks(str(self.run_dir.absolute()), stop, log)
        if is_main():
            key, self.start, opened = open_run(settings, self.ds.config, self.groups_per_step, log)
            self.server, self.ledger = opened.server, opened.ledger
            self.metrics, self.journal = opened.metrics, opened.journal
            self._cursor = self.server.cursor()
        models.use_threads(default_threads(settings.num_threads))
        self.ranks = zero.start_ranks(watch)
        key, self.start = share_start(self.ranks, self.run_dir, key, self.start)
        self.step = self.start.step
        self.engine = self._start_engine()
        self.feed = Feed(self.ranks, self.server, key, wait_timeout_s=settings.wait_timeout_s, should_stop=stop,
                         log=log)  # fmt: skip
        watch.expect_progress(settings.wait_timeout_s)

    # -- start-up -----------------------------------------------------------------------------------------------------

    def _start_engine(self) -> Any:
        s = self.settings
        base = models.load_base(s.model_path, models.DTYPES[self.ds.dtype_name])
        self.base_digest = base_digest(base)
        if self.start.index is not None:
            checkpoints.check_base(self.start.index, self.base_digest, s.model_path)
        self.model = models.add_lora(base, s.lora_rank, s.lora_alpha, s.seed)
        self.log.info("%s: %s", s.model_path, models.describe_parameters(self.model))
        if self.ranks.is_main:
            self.publisher = Publisher(
                run_dir=self.run_dir, run_id=self.start.run_id, lineage=self.start.lineage,
                base_model=s.model_path, base_digest=self.base_digest, base_dtype=self.ds.dtype_name,
                config=models.lora_config(self.model),
                keep=max(s.keep_adapters, s.max_staleness + 1),  # a checkpoint may ask for them
            )  # fmt: skip
            self._hold_needed()
        self.history = PolicyHistory(self.model, s.max_staleness + 1)
        limit = WARN_ABOVE[self.ds.dtype_name] if s.mismatch_warn is None else s.mismatch_warn
        self.alarm = MismatchAlarm(limit, filtered=s.top_k > 0 or s.top_p < 1)
        policy = PolicyModule(self.model, s.temperature, s.top_k, s.top_p,
                              entropy_grad=s.entropy_coef > 0)  # fmt: skip
        engine = zero.start_engine(policy, self.ds)
        self.packed = not s.plain and policy.pack(self.log)
        if self.start.path is not None and self.start.index is not None:
            self._go_on(engine, self.start.path, self.start.index)
        return engine

    def _go_on(self, engine: Any, path: Path, index: checkpoints.Index) -> None:
        """Put the state of a checkpoint into a fresh engine. Every rank calls this."""
        checkpoints.restore(engine, self.ranks, path, index)
        self.bad_steps.total, self.bad_steps.in_row = index.skipped, index.bad_in_row
        self._saved_step = index.step
        self.started -= index.elapsed_s
        old = old_adapters(self.run_dir, self.start, self.settings.max_staleness)
        for version, adapter in old.items():
            self.history.add(version, adapter.tensors)

    # -- the steps ------------------------------------------------------------------------------------------------------

    def next_groups(self) -> list[Group]:
        """Wait for the groups of the next step. Raises Stopped, PeerTimeout."""
        self.step_started = time.monotonic()
        self.patiently.spent_s = 0.0
        self.ranks.bump(f"step {self.step + 1}: waiting for rollouts")
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
            packed=self.packed,
            pad_id=0,
            max_new_tokens=s.max_new_tokens,
            mask_truncated=s.mask_truncated,
            entropy_coef=s.entropy_coef,
            history=self.history,
            correction=correction if corrected else None,
            agree=self.feed.agree,
            should_stop=self.stop,
            bump=self._bump,
        )
        self.ranks.bump(f"step {self.step + 1}: forward and backward")
        started = time.monotonic()
        lr = float(self.engine.get_lr()[0])  # before the step: a scheduler moves it there
        result = optimizer_step(self.engine, groups, advantages, plan, self.step)
        if result is None:
            self.stop.raise_with_the_others()
        self.step += 1
        self._book(self.feed.taken)
        if warning := self.bad_steps.note(result, self.step):
            self.log.warning("%s", warning)
        if self.ranks.is_main and (warning := self.alarm.note(result)):
            self.log.warning("%s", warning)
        result |= {"lr": lr, "train_s": time.monotonic() - started}
        return result | rollout_metrics(groups, self.step - 1, advantages)

    def publish(self, *, done: bool = False) -> None:
        """Publish the weights at the start, and when a step is due; raise the samplers' credit. Raises DiskTrouble."""
        if self.step % self.settings.sync_steps and self._published and not done:
            return
        self._published = True
        self.ranks.bump(f"publishing version {self.step}")
        tensors = enginestate.lora_state(self.model)
        self.history.add(self.step, tensors)
        if self.publisher is None or self.server is None:
            return
        what, publisher = f"publish version {self.step}", self.publisher
        digest = self.patiently(what, lambda: publisher.write(self.step, tensors))
        # Before it can be found: a sampler may send groups of it sooner than set_version is reached.
        self.server.expect(self.step, digest)
        self.patiently(what, lambda: publisher.point(self.step, digest, done=done))
        self.server.set_version(self.step, digest)

    def _hold_needed(self) -> None:
        """Groups that come again after a restart are measured with the versions that they were sampled by."""
        if self.publisher is not None:
            needed = checkpoints.needed_versions(self.run_dir, self.settings.max_staleness)
            self.publisher = dataclasses.replace(self.publisher, needed=needed)

    def _book(self, trained: list[Trained]) -> None:
        """Write into the ledger what the step was taken on, and what was dropped before. Rank 0 does."""
        if self.ledger is not None and self.server is not None:
            self.ledger.note(self.step, trained, self.server.take_fates(), self.server.lost)
            self._cursor = self.server.cursor()
            self.patiently("write the ledger", self.ledger.write)

    def _bump(self) -> None:
        self.ranks.bump()
        if self.server is not None:
            self.server.bump()

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
            **{f"dropped_{reason}": self.server.dropped[reason] for reason in REASONS},
            "lost_groups": self.server.lost,
            "refused_messages": sum(self.server.invalid.values()),
            "skipped_steps": self.bad_steps.total,
            "max_steps": self.max_steps,
        }
        self.metrics.write(row)
        self.log.info("%s", step_line(row))

    def save_if_due(self) -> None:
        """Write a checkpoint every save_steps; `finish` writes the last one, after what waits then has its fate."""
        if self.step % self.settings.save_steps == 0 and self.step < self.max_steps:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the last finished step. Every rank calls this."""
        if self._saved_step == self.step:
            return
        self.ranks.bump(f"saving step {self.step}")
        cursor = self._cursor  # without the groups of a step that a signal interrupted
        tensors = checkpoints.gather_state(self.engine, self.ranks)
        fields = {
            "step": self.step,
            "lineage": self.start.lineage,
            "run_id": self.start.run_id,
            "base_digest": self.base_digest,
            "adam_step": enginestate.adam_step(self.engine),
            "schedule": zero.schedule_step(self.engine),
            "cursor": cursor,
            "skipped": self.bad_steps.total,
            "bad_in_row": self.bad_steps.in_row,
            "elapsed_s": time.monotonic() - self.started,
            "num_ranks": self.ranks.num_ranks,
            "settings": dataclasses.asdict(self.settings),
        }
        self._saved_step = self.step
        if self.server is None or self.metrics is None:
            return
        self.patiently("write the metrics", self.metrics.flush)  # or the books would not agree
        write = functools.partial(
            checkpoints.write_checkpoint,
            self.run_dir,
            tensors,
            self.settings.keep_checkpoints,
            **fields,
        )
        path = self.patiently(f"save step {self.step}", write)
        self._hold_needed()
        self.server.commit(cursor)
        self.log.info("state of step %d saved in %s", self.step, path)

    def finish(self) -> None:
        """Save, publish with the done flag, leave the final adapter and done.json, and send the samplers home."""
        if self.server is not None:
            self.server.finish()
        self._book([])
        self.save()
        self.publish(done=True)
        if self.publisher is not None:
            report = {"steps": self.step, "skipped_steps": self.bad_steps.total,
                      "train_wall_s": time.monotonic() - self.started}  # fmt: skip
            leave = functools.partial(
                mark_done, self.run_dir, self.publisher.name(self.step), report
            )
            self.patiently("leave the final adapter", leave)
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
