"""`make soak MINUTES=…`: random lives of requests with fresh seeds, for as long as asked.

A failure prints the steps that led to it, as small as Hypothesis gets them, and exits with 1. The
last line is JSON.
"""

import argparse
import json
import time

import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.cache.life import Life, WholeLife

ROUND = {Life: settings(max_examples=100, stateful_step_count=50),
         WholeLife: settings(max_examples=10, stateful_step_count=50)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    minutes = parser.parse_args().minutes
    torch.set_num_threads(1)
    start, num_rounds = time.monotonic(), 0
    while time.monotonic() - start < 60 * minutes:
        for machine, sizes in ROUND.items():
            chosen = settings(
                sizes, deadline=None, database=None, suppress_health_check=list(HealthCheck)
            )
            run_state_machine_as_test(machine, settings=chosen)
        num_rounds += 1
    result = {
        "soak": "cache",
        "minutes": round((time.monotonic() - start) / 60, 1),
        "rounds": num_rounds,
        "steps": {machine.__name__: machine.num_steps for machine in ROUND},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
