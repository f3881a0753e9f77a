"""A sampler without a model: a real process and a real GroupClient that send made-up groups. Imports no torch.

python fake_sampler.py PORT KEY_FILE SAMPLER_ID SPEED BATCH NUM_GROUPS      see `parse` for the options

SPEED is in groups a second, 0 as fast as it goes; NUM_GROUPS 0 goes on until the learner has finished. With
--num_samplers N it forks into N samplers with ids from SAMPLER_ID on, which spares the time of N imports.
"""

import argparse
import hashlib
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from splitgrpo import admission, client, server, transport
from splitgrpo.client import GroupClient, RunFinished, make_hello
from splitgrpo.monitor import setup_logging
from splitgrpo.process import StopFlag, begin_process, end_process, run_main
from splitgrpo.rollout import Group, Rollout
from splitgrpo.transport import read_key

SETTINGS = {"group_size": "any"}
PROMPT_TOKENS, VOCAB = 8, 1000
log = logging.getLogger("sampler")


def digest_of(version: int) -> str:
    """What stands for the sha256 of the adapter of a version."""
    return hashlib.sha256(str(version).encode()).hexdigest()


def prompt_of(sampler_id: int, seq: int) -> int:
    """The prompt that belongs to a sequence number, as PromptOrder says it in earnest."""
    return (sampler_id * 7919 + seq * 31) % 997


def quicken(factor: float) -> None:
    """Let all that takes a second by the clock take `factor` of it, in this process."""
    transport.HEARTBEAT_S *= factor
    admission.HEARTBEAT_S *= factor
    client.REFUSED_FOR_S *= factor
    server.SILENT_S *= factor
    server.ASK_AGAIN_S *= factor


def make_group(
    sampler_id: int,
    completions: int,
    tokens: int,
    prompt_tokens: int = PROMPT_TOKENS,
    seed: int = 0,
) -> Group:
    """A group that passes check_group: `completions` of `tokens` tokens each; seq and version are put in later."""
    rng = np.random.default_rng([sampler_id, seed])
    prompt = rng.integers(3, VOCAB, size=prompt_tokens)
    mask = np.arange(prompt_tokens + tokens) >= prompt_tokens
    rollouts = []
    for _ in range(completions):
        ids = np.concatenate([prompt, rng.integers(3, VOCAB, size=tokens)]).astype(np.int32)
        nats = (rng.uniform(-3, -0.1, size=len(ids)) * mask).astype(np.float32)
        rollouts.append(Rollout(ids, mask, nats, nats, float(rng.integers(0, 3)), False, True))
    return Group(
        rollouts=tuple(rollouts), sampler_id=sampler_id, seq=0, prompt_index=0, epoch=0, policy_version=0,
        lineage=1, adapter_digest="", temperature=1.0, run_id="run",
    )  # fmt: skip


def work(args: argparse.Namespace, sampler_id: int, stop: StopFlag) -> None:
    """Ask for credit, take the time that sampling takes, send or drop; again and again."""
    sampler = GroupClient(
        ("127.0.0.1", args.port), read_key(args.key_file), make_hello(sampler_id, "run", SETTINGS),
        wait_timeout_s=args.wait_timeout_s, check_stop=stop.raise_if_set, log=log,
    )  # fmt: skip
    made = [
        make_group(sampler_id, args.completions, args.tokens, args.prompt_tokens, i)
        for i in range(args.distinct)
    ]
    sent = rounds = 0
    try:
        while not args.num_groups or sent < args.num_groups:
            num, (lineage, version) = sampler.wait_grant(args.batch)
            first, rounds = sampler.next_seq, rounds + 1
            done_at = time.monotonic() + (num / args.speed if args.speed else 0.0)
            while (left_s := done_at - time.monotonic()) > 0:
                stop.raise_if_set()
                sampler.bump("sampling")
                time.sleep(min(left_s, 0.05))
            filtered = args.filter_rounds and rounds % args.filter_rounds == 0
            for seq in range(first, first + num):
                if filtered:
                    goes_on = sampler.drop(seq, (lineage, version), "filtered")
                else:
                    group = replace(
                        made[seq % len(made)], seq=seq, prompt_index=prompt_of(sampler_id, seq), lineage=lineage,
                        policy_version=version, adapter_digest=digest_of(version),
                    )  # fmt: skip
                    goes_on = sampler.send(group)
                if not goes_on:
                    sampler.discard(first + num - 1 - seq)
                    break
                sent += 1
    except RunFinished:
        log.info("the run is finished")
    finally:
        sampler.close("ended")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for name, kind in (("port", int), ("key_file", Path), ("sampler_id", int), ("speed", float),
                       ("batch", int), ("num_groups", int)):  # fmt: skip
        parser.add_argument(name, type=kind)
    parser.add_argument("--num_samplers", type=int, default=1)
    parser.add_argument("--completions", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="of each completion")
    parser.add_argument("--prompt_tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument(
        "--distinct", type=int, default=1, help="groups made once, then sent in turn"
    )
    parser.add_argument("--filter_rounds", type=int, default=0, help="drop every n-th round whole")
    parser.add_argument("--wait_timeout_s", type=float, default=30.0)
    parser.add_argument("--quicken", type=float, default=1.0, help="seconds that a second takes")
    return parser.parse_args()


def main() -> int:
    """Run as one sampler, or fork into several; the highest of their exit codes."""
    args = parse()
    quicken(args.quicken)
    setup_logging(f"sampler {args.sampler_id}", verbose=False)
    children = []
    for sampler_id in range(args.sampler_id, args.sampler_id + args.num_samplers):
        if args.num_samplers > 1 and (pid := os.fork()):
            children.append(pid)
            continue
        begin_process()
        return run_main(lambda stop, mine=sampler_id: work(args, mine, stop), log)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    return max(codes)  # below 0: killed


if __name__ == "__main__":
    end_process(main())
