"""The learner: receives groups of rollouts, takes optimizer steps on LoRA weights, publishes them for the sampler.

deepspeed --num_gpus=2 training_worker.py --model_path M --save_path ./checkpoints --ds_config ds_config.json
python training_worker.py …          the same on one rank, without a launcher
"""

import logging
import os
import sys

from splitgrpo.cli import parse_settings, refuse_early
from splitgrpo.config import LearnerSettings, PeerTimeout, effective_advantage
from splitgrpo.process import begin_process

if __name__ == "__main__":
    begin_process()
    refuse_early(LearnerSettings, "training_worker.py")

from splitgrpo.learner import Learner
from splitgrpo.monitor import setup_logging
from splitgrpo.process import StopFlag, Stopped, end_process, run_main
from utils import LOSSES, group_advantages

log = logging.getLogger("learner")


def train(settings: LearnerSettings, stop: StopFlag) -> None:
    """The learner's story, from an empty run folder to a finished run."""
    loss_fn = LOSSES[settings.loss]  # or name it here: loss_fn = gspo_loss
    with Learner(settings, stop, log) as learner:
        try:
            learner.save()
            learner.publish()
            while learner.step < learner.max_steps:
                groups = learner.next_groups()
                rewards = learner.rewards(groups)
                advantages = group_advantages(
                    rewards, settings.group_size, estimator=effective_advantage(settings)
                )
                metrics = learner.optimizer_step(groups, advantages, loss_fn)
                learner.publish()
                learner.report(metrics)
                learner.save_if_due()
            learner.finish()
        except (Stopped, PeerTimeout):
            learner.save()
            raise


def main() -> int:
    """Parse the flags and run; returns the exit code."""
    setup_logging(f"learner r{os.environ.get('RANK', '0')}", verbose="--verbose" in sys.argv)

    def story(stop: StopFlag) -> None:
        train(parse_settings(LearnerSettings, prog="training_worker.py"), stop)

    return run_main(story, log)


if __name__ == "__main__":
    end_process(main())
