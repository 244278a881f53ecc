"""`make soak MINUTES=…`: random lives of requests with fresh seeds, for as long as asked.

On a GPU (`DEVICE=cuda`) with Triton's kernels. A failure prints the steps that led to it, as small
as Hypothesis gets them, and exits with 1. The last line is JSON.
"""

import argparse
import json
import time

import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.cache.life import Life, WholeLife, on_kernels

EXAMPLES_A_ROUND = {Life: 100, WholeLife: 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machines = {
        machine if options.device == "cpu" else on_kernels(machine, options.device): num_examples
        for machine, num_examples in EXAMPLES_A_ROUND.items()
    }
    start = time.monotonic()
    while time.monotonic() - start < 60 * options.minutes:
        for machine, num_examples in machines.items():
            chosen = settings(
                max_examples=num_examples, stateful_step_count=50, deadline=None, database=None,
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            run_state_machine_as_test(machine, settings=chosen)
    result = {
        "soak": "cache",
        "device": options.device,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "lives": {machine.__name__: machine.num_lives for machine in machines},
        "steps": {machine.__name__: machine.num_steps for machine in machines},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
