"""`make soak MINUTES=…`: random lives of requests with fresh seeds, for as long as asked.

Every round is lives in the worlds of the tests and in one of random sizes and formats; on a GPU
(`DEVICE=cuda`) those of the tests, with Triton's kernels. A failure prints the world and the steps
that led to it, as small as Hypothesis gets them, and exits with 1. The last line is JSON.
"""

import argparse
import json
import random
import time
from collections import Counter

import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.cache.life import Life, V41Life, WholeLife, machine_in, on_kernels, random_world

NUM_SHORT_LIVES, NUM_WHOLE_LIVES = 60, 10  # of a round


def run_lives(machine, num_lives):
    """Run lives of a machine; says in which world one failed."""
    chosen = settings(
        max_examples=num_lives, stateful_step_count=50, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except BaseException:
        print(machine.world.config)
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machines = {Life: NUM_SHORT_LIVES, V41Life: NUM_SHORT_LIVES, WholeLife: NUM_WHOLE_LIVES}
    if options.device == "cuda":
        machines = {on_kernels(each, "cuda"): count for each, count in machines.items()}
    start, lives, steps, num_worlds = time.monotonic(), Counter(), Counter(), 0
    while time.monotonic() - start < 60 * options.minutes:
        round_of = dict(machines)
        if options.device == "cpu":
            world = random_world(random.getrandbits(64))
            round_of[machine_in(world)] = NUM_SHORT_LIVES
            num_worlds += 1
        for machine, num_lives in round_of.items():
            before = machine.num_lives, machine.num_steps
            run_lives(machine, num_lives)
            lives[machine.__name__] += machine.num_lives - before[0]
            steps[machine.__name__] += machine.num_steps - before[1]
    result = {
        "soak": "cache",
        "device": options.device,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "random_worlds": num_worlds,
        "lives": dict(lives),
        "steps": dict(steps),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
