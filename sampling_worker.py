"""The sampler: draws completions with the newest published adapter, scores them, sends whole groups to the learner.

python sampling_worker.py --model_path M --lora_path ./checkpoints --batch_size 8 --port 5555
"""

import logging
import sys

from splitgrpo.cli import parse_settings, refuse_early
from splitgrpo.config import DataError, SamplerSettings
from splitgrpo.process import begin_process

if __name__ == "__main__":
    begin_process()
    refuse_early(SamplerSettings, "sampling_worker.py")

from data import PromptOrder, build_prompts, load_problems
from splitgrpo.client import RunFinished
from splitgrpo.monitor import setup_logging
from splitgrpo.process import StopFlag, end_process, run_main
from splitgrpo.sampler import Sampler
from splitgrpo.scoring import Scorer
from utils import check_answer, reward_function

log = logging.getLogger("sampler")


def sample(settings: SamplerSettings, stop: StopFlag) -> None:
    """The sampler's story, from the learner's first adapter to the end of the run."""
    columns = {"question_column": settings.question_column, "answer_column": settings.answer_column}
    problems = load_problems(settings.data, "train", **columns)
    sampler = Sampler(settings, stop, log)
    prompts, num_dropped = build_prompts(problems, sampler.tokenizer, settings.max_prompt_tokens)
    log.info("%d training prompts, %d dropped as longer than %d tokens", len(prompts), num_dropped,
             settings.max_prompt_tokens)  # fmt: skip
    if not prompts:
        raise DataError(
            f"every prompt is longer than --max_prompt_tokens {settings.max_prompt_tokens}"
        )
    order = PromptOrder(len(prompts), settings.seed, settings.sampler_id)

    def on_wait() -> None:
        stop.raise_if_set()
        sampler.client.bump("scoring")

    scorer = Scorer(
        reward_function, check_answer, log, timeout_s=settings.reward_timeout_s, on_wait=on_wait
    )
    try:
        sampler.join()
        while True:
            num_groups = sampler.wait_credit()
            first = sampler.next_seq
            draws = [(first + i, *order.at(first + i)) for i in range(num_groups)]
            chosen = [prompts[position] for _, position, _ in draws]
            groups = sampler.generate([p.token_ids for p in chosen])
            for (seq, _, epoch), prompt, completions in zip(draws, chosen, groups, strict=True):
                responses = sampler.responses(completions, prompt.response_prefix)
                scores = scorer.score_group(responses, prompt.ground_truth)
                draw = (seq, prompt.prompt_index, epoch)
                if scores is None:
                    goes_on = sampler.drop(seq, "reward")
                elif sampler.is_to_be_replaced(scores):
                    goes_on = sampler.drop(seq, "filtered")
                else:
                    goes_on = sampler.send(draw, prompt.token_ids, completions, scores)
                if not goes_on:  # the learner went back: this round is of weights that it has not
                    sampler.client.discard(first + num_groups - 1 - seq)
                    break
    except RunFinished:
        log.info("the run is finished")
    finally:
        scorer.close()
        sampler.close()


def main() -> int:
    """Parse the flags and run; returns the exit code."""
    setup_logging("sampler", verbose="--verbose" in sys.argv)

    def story(stop: StopFlag) -> None:
        sample(parse_settings(SamplerSettings, prog="sampling_worker.py"), stop)

    return run_main(story, log)


if __name__ == "__main__":
    end_process(main())
