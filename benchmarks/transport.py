"""The way of a group from sampler to learner: bytes made and read, and through a socket between two processes.

    python benchmarks/transport.py [--seconds 3] [--runs 3] [--step_s 10]

A group is 8 completions of 256 tokens to a prompt of 100: ids, mask, old and reference log-probs, 38 kB. Ours is signed
(HMAC-SHA256) when written; when read the signature, the structure and every value are checked. The peers only write and
read: pickle of lists, as trainers that send Python objects have it, and safetensors' own functions on the same arrays.
"""

import argparse
import functools
import hmac
import logging
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.numpy

sys.path[:0] = [str(Path(__file__).resolve().parent)]
import common  # noqa: E402
import receive  # noqa: E402 - it adds the tests' folder
from fake_sampler import make_group  # noqa: E402

from splitgrpo.blob import read_arrays  # noqa: E402
from splitgrpo.rollout import Group  # noqa: E402
from splitgrpo.wire import GroupHeader, pack_group, seal, unpack_group, unseal  # noqa: E402

LOAD = receive.Load(completions=8, tokens=256, prompt_tokens=100, batch=256, distinct=64)
KEY = bytes(32)
ROUNDS, CALLS = 60, 25  # of all codecs in turn, so that noise hits each
RUNS, SECONDS, STEP_S = 3, 3.0, 10.0
LISTS, SAFETENSORS = "pickle of lists", "safetensors"


def encode(group: Group) -> bytes:
    """As GroupClient.send makes the bytes."""
    return seal(KEY, *pack_group(group, "session", "settings"))


def decode(payload: bytes, check: Callable[[Group], None]) -> Group:
    """As GroupServer takes them in."""
    header, blob = unseal(KEY, payload)
    assert isinstance(header, GroupHeader)
    group = unpack_group(header, blob)
    check(group)
    return group


def as_lists(group: Group) -> dict[str, Any]:
    """The same content as plain Python objects."""
    streams = ("token_ids", "completion_mask", "old_logprobs", "ref_logprobs")
    rest = ("reward", "correct", "finished", "reward_parts")
    return {
        "rollouts": [
            {n: getattr(r, n).tolist() for n in streams} | {n: getattr(r, n) for n in rest}
            for r in group.rollouts
        ]
    } | {name: value for name, value in vars(group).items() if name not in ("rollouts", "streams")}


def time_codecs(rounds: int = ROUNDS) -> dict[str, dict[str, list[float]]]:
    """µs a group of each way to write and to read one, by what and by side; one number a round."""
    group = make_group(0, LOAD.completions, LOAD.tokens, LOAD.prompt_tokens)
    check, lists = receive.check_of(LOAD), as_lists(group)
    payload, pickled = encode(group), pickle.dumps(lists, pickle.HIGHEST_PROTOCOL)
    _, blob = pack_group(group, "session", "settings")
    arrays = read_arrays(blob)
    plain = safetensors.numpy.save(arrays)
    work: dict[tuple[str, str], Callable[[], object]] = {
        ("encode", common.OURS): lambda: encode(group),
        ("encode", LISTS): lambda: pickle.dumps(lists, pickle.HIGHEST_PROTOCOL),
        ("encode", SAFETENSORS): lambda: safetensors.numpy.save(arrays),
        ("decode", common.OURS): lambda: decode(payload, check),
        ("decode", LISTS): lambda: pickle.loads(pickled),
        ("decode", SAFETENSORS): lambda: safetensors.numpy.load(plain),
        ("hmac", common.OURS): lambda: hmac.digest(KEY, payload, "sha256"),
    }
    found: dict[str, dict[str, list[float]]] = {"encode": {}, "decode": {}, "hmac": {}}
    for _ in range(rounds):
        for (what, side), call in work.items():
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            took_us = 1e6 * (time.perf_counter() - started) / CALLS
            found[what].setdefault(side, []).append(took_us)
    return found


def codec_rows(rounds: int) -> list[common.Row]:
    """Writing and reading one group."""
    found = time_codecs(rounds)
    hmac_us = statistics.median(found["hmac"][common.OURS])
    notes = {
        "encode": f"of it HMAC {hmac_us:.0f} µs; the peers sign nothing",
        "decode": f"of it HMAC {hmac_us:.0f} µs and every check; the peers check nothing",
    }
    return [
        common.row(f"{what} a group of 38 kB", "µs", found[what], note=note)
        for what, note in notes.items()
    ]


def link_rows(runs: int, seconds: float, step_s: float) -> list[common.Row]:
    """Through loopback, everything on; and the share of a step that receiving its groups takes."""
    found, notes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(runs):
            common.wait_for_quiet()
            found.append(receive.measure(LOAD, 1, seconds, Path(folder)))
            notes.append(f"{found[-1].learner_us:.0f} + {found[-1].sampler_us:.0f}")
    groups_s = [f.groups_s for f in found]
    groups = receive.GROUPS_PER_STEP
    row = functools.partial(common.row, peak_rss_mib=max(f.rss_bytes for f in found) / 2**20)
    return [
        row("one sampler to one learner, loopback", "groups/s", {common.OURS: groups_s},
            note=f"CPU µs a group, learner's + sampler's process: {', '.join(notes)}"),
        row("the same", "MB/s", {common.OURS: [f.bytes_s / 1e6 for f in found]}),
        row(f"receiving the {groups} groups of a step", "% of the step",
            {common.OURS: [100 * groups / rate / step_s for rate in groups_s]}, note=f"of a step of {step_s:g} s"),
    ]  # fmt: skip


def rows(args: argparse.Namespace | None = None) -> list[common.Row]:
    """All rows; `args.quick` measures each once and for a moment."""
    quick = getattr(args, "quick", False)
    runs = 1 if quick else getattr(args, "runs", RUNS)
    seconds = 0.5 if quick else getattr(args, "seconds", SECONDS)
    logging.disable(logging.WARNING)  # the samplers' coming and going
    common.wait_for_quiet()
    out = codec_rows(3 if quick else ROUNDS)
    return out + link_rows(runs, seconds, getattr(args, "step_s", STEP_S))


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--runs", type=common.at_least_one, default=RUNS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each run")
    parser.add_argument("--step_s", type=float, default=STEP_S, help="of a learner's step")
    for row in rows(parser.parse_args()):
        ratios = ", ".join(
            f"{peer} {row['peers'][peer]:.1f} (x{x:.2f})" for peer, x in row["ratio"].items()
        )
        sys.stdout.write(
            f"{row['name']:38} {row['ours']:9.2f} {row['unit']:14} {ratios}\n    {row['note']}\n"
        )


if __name__ == "__main__":
    common.run_main(main)
