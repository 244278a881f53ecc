"""Run the tests on a GPU, several at a time, in parts that can be resumed; record them as JSON.

`make gpu` runs what is left for about eight minutes and writes docs/gpu-tests.json; run it again
until it says that all have run. `--state` names the one file that carries what has run from part
to part. Another commit starts anew, or with `--resume-any` keeps what did not fail before. The
file is also the pytest plugin of its own workers.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
MARKERS = "gpu or not slow"
SLICE_TESTS, SLICE_SECONDS = 40, 60.0  # of one file, run by one process
SAVE_SECONDS = 10.0
GRACE_SECONDS = 75.0  # for tests that run when the minutes are over
OUTCOMES = ("passed", "failed", "skipped")
SUMS = ("seconds", "kernels", "compiler_seconds")  # of a test; kernels are those it compiled


# What a worker writes, a JSON object a line: tests it collected, began, finished; what it compiled.


def _write_line(**values: Any) -> None:
    with open(os.environ["GPU_TESTS_LOG"], "a") as file:
        file.write(json.dumps(values) + "\n")


def pytest_collection_finish(session: Any) -> None:
    """Write the names of all tests, for the plan; or listen to the compiler before they run."""
    if session.config.option.collectonly:
        _write_line(collected=[item.nodeid for item in session.items])
        return
    with suppress(ImportError):
        from triton import knobs  # after conftest.py has chosen whether the interpreter runs

        knobs.compilation.listener = _write_kernel


def _write_kernel(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
    """Write a kernel that was compiled, with the compiler's seconds."""
    if not cache_hit:
        _write_line(kernel=src.name, seconds=times.total / 1e6)


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """Write which test begins, so that one that ends the process is known."""
    _write_line(began=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """Write the outcome and the seconds of a test's setup, call or teardown."""
    error = report.longreprtext[-2000:] if report.failed else None
    _write_line(
        test=report.nodeid, when=report.when, outcome=report.outcome, seconds=report.duration,
        error=error,
    )  # fmt: skip


def pytest_runtest_teardown(item: Any) -> None:
    """Stop after this test if the part's minutes are over."""
    if time.time() > float(os.environ.get("GPU_TESTS_DEADLINE", "inf")):
        item.session.shouldstop = "the minutes of this part are over"


@dataclass
class State:
    """Which tests there are, and what has become of those that have run.

    Attributes:
        tests: Node ids in the order of collection.
        results: By node id: outcome, seconds, and the error of a failure.
        earlier_commits: Commits at which some of the results were found.
    """

    commit: str
    tests: list[str] = field(default_factory=list)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)
    earlier_commits: list[str] = field(default_factory=list)

    @property
    def left(self) -> list[str]:
        """The tests that have not run."""
        return [test for test in self.tests if test not in self.results]

    @property
    def is_complete(self) -> bool:
        return bool(self.tests) and not self.left


def read_state(path: Path, commit: str, *, resume_any: bool = False) -> State:
    """The state to go on from; a new one if there is none or if it is of another commit.

    With `resume_any`, results of another commit stay but for failures; tests are collected anew.
    """
    if not path.is_file():
        return State(commit)
    state = State(**json.loads(path.read_text()))
    if state.commit == commit:
        return state
    if not resume_any:
        return State(commit)
    kept = {name: r for name, r in state.results.items() if r["outcome"] != "failed"}
    earlier = [*state.earlier_commits, state.commit]
    return State(commit, results=kept, seconds=state.seconds, earlier_commits=earlier)


def save(path: Path, value: dict[str, Any]) -> None:
    """Write JSON so that a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(value, indent=1) + "\n")
    fresh.replace(path)


def slices(
    tests: list[str], *, size: int = SLICE_TESTS, seconds: dict[str, float] | None = None
) -> list[list[str]]:
    """Tests of one file at a time, at most `size` or of about SLICE_SECONDS; long files come first.

    Other files come between the slices of one file, which need the same compiled kernels.
    `seconds` are those of a file's mean test.
    """
    seconds = seconds or {}
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.partition("::")[0], []).append(test)
    ordered = sorted(files, key=lambda f: (len(files[f]) * seconds.get(f, 0), len(files[f])))
    cut = []
    for file in reversed(ordered):
        each = max(1, min(size, int(SLICE_SECONDS / max(seconds.get(file, 0), 0.01))))
        cut.append([files[file][i : i + each] for i in range(0, len(files[file]), each)])
    return [part for turn in zip_longest(*cut) for part in turn if part]


def mean_seconds(record: Path) -> dict[str, float]:
    """Each file's seconds for a test in the last run, as its record has them."""
    files = json.loads(record.read_text())["files"] if record.is_file() else {}
    return {
        name: file["seconds"] / sum(file[outcome] for outcome in OUTCOMES)
        for name, file in files.items()
    }


def read_results(lines: list[dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], str | None]:
    """The results in a worker's lines, and the test that began and did not finish."""
    results: dict[str, dict[str, Any]] = {}
    running: str | None = None
    for line in lines:
        if "began" in line:
            running = line["began"]
        name = running if "kernel" in line else line.get("test")
        if name is None:
            continue
        result = results.setdefault(name, {"outcome": "passed", **dict.fromkeys(SUMS, 0)})
        if "kernel" in line:
            result["kernels"] += 1
            result["compiler_seconds"] += line["seconds"]
            continue
        result["seconds"] = round(result["seconds"] + line["seconds"], 3)
        if line["outcome"] != "passed" and result["outcome"] != "failed":
            result["outcome"] = line["outcome"]
        if line["error"]:
            result["error"] = line["error"]
        if line["when"] == "teardown" and line["test"] == running:
            running = None
    if running is not None:
        results.pop(running, None)
    return results, running


def record(state: State) -> dict[str, Any]:
    """The state as docs/gpu-tests.json has it: counts, and for each file its seconds."""
    files: dict[str, dict[str, Any]] = {}
    for test in state.tests:
        if test in state.results:
            counts = files.setdefault(test.partition("::")[0], dict.fromkeys((*SUMS, *OUTCOMES), 0))
            counts[state.results[test]["outcome"]] += 1
            for name in SUMS:
                counts[name] = round(counts[name] + state.results[test].get(name, 0), 1)
    total = Counter(result["outcome"] for result in state.results.values())
    failures = [test for test in state.tests if state.results.get(test, {}).get("error")]
    return {
        "complete": state.is_complete,
        "commit": state.commit,
        "earlier_commits": state.earlier_commits,
        "date": datetime.now(UTC).date().isoformat(),
        **state.environment,
        **{outcome: total[outcome] for outcome in OUTCOMES},
        "left": len(state.left),
        "seconds": round(state.seconds),
        "failures": failures,
        "files": dict(sorted(files.items())),
    }


class Worker:
    """A pytest process that runs some tests of one file."""

    def __init__(self, tests: list[str], folder: Path, deadline: float) -> None:
        self.tests = tests
        self.log = Path(tempfile.mkstemp(dir=folder, suffix=".jsonl")[1])
        names = self.log.with_suffix(".txt")
        names.write_text("\n".join(tests))
        self.output: IO[bytes] = self.log.with_suffix(".out").open("w+b")
        environment = worker_environment(self.log, deadline)
        self.process = subprocess.Popen(
            command_of_pytest(f"@{names}"), cwd=ROOT, env=environment, stdout=self.output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def results(self) -> tuple[dict[str, dict[str, Any]], str | None]:
        """What has become of its tests so far, and the one that is running."""
        return read_results(read_lines(self.log))

    def last_output(self) -> str:
        self.output.seek(0)
        return self.output.read()[-2000:].decode(errors="replace")


def command_of_pytest(*arguments: str) -> list[str]:
    options = ["-q", "-p", "gpu_tests", "-p", "no:cacheprovider", "-m", MARKERS]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def worker_environment(log: Path, deadline: float) -> dict[str, str]:
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "GPU_TESTS_LOG": str(log),
        "GPU_TESTS_DEADLINE": str(deadline),
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; the last may be half written."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def collect(folder: Path, targets: list[str]) -> list[str]:
    """The node ids of all tests."""
    log = folder / "collected.jsonl"
    result = subprocess.run(
        command_of_pytest("--collect-only", *targets), cwd=ROOT, capture_output=True, text=True,
        env=worker_environment(log, float("inf")),
    )  # fmt: skip
    if result.returncode:
        raise SystemExit(f"the tests could not be collected:\n{result.stdout}{result.stderr}")
    (line,) = read_lines(log)
    names: list[str] = line["collected"]
    return names


def finish(worker: Worker, state: State, *, is_late: bool) -> list[str]:
    """Take over what an ended worker did; return the tests to run in another process."""
    results, running = worker.results()
    if running is not None and not is_late:
        code, output = worker.process.returncode, worker.last_output()
        error = f"the process ended with {code}\n{output}"
        results[running] = {"outcome": "failed", "seconds": 0.0, "error": error}
    left = [test for test in worker.tests if test not in results]
    if left and not results and not is_late:
        output = worker.last_output()
        results = {t: {"outcome": "failed", "seconds": 0.0, "error": output} for t in left}
        left = []
    state.results.update(results)
    return left


def run_part(
    state: State,
    folder: Path,
    save_state: Any,
    *,
    minutes: float,
    num_workers: int,
    seconds: dict[str, float],
) -> None:
    """Run tests that are left until none is, or until the minutes are over."""
    start = time.time()
    deadline = start + 60 * minutes
    queue, workers = slices(state.left, seconds=seconds), list[Worker]()
    before, saved = state.seconds, start
    while workers or (queue and time.time() < deadline):
        while queue and len(workers) < num_workers and time.time() < deadline:
            workers.append(Worker(queue.pop(0), folder, deadline))
        time.sleep(0.2)
        is_late = time.time() > deadline
        if time.time() > deadline + GRACE_SECONDS:
            for worker in workers:
                print(f"stopped, to be run again: {worker.results()[1]}", flush=True)
                worker.process.kill()
                worker.process.wait()
        for worker in [each for each in workers if each.process.poll() is not None]:
            workers.remove(worker)
            left = finish(worker, state, is_late=is_late)
            queue += [left] if left else []
        if time.time() > saved + SAVE_SECONDS:
            for worker in workers:
                state.results.update(worker.results()[0])
            saved = time.time()
            state.seconds = before + saved - start
            save_state()
            print(f"{len(state.results)} of {len(state.tests)} tests", flush=True)
    state.seconds = before + time.time() - start


def describe_environment() -> dict[str, Any]:
    """The GPU, its driver and the versions."""
    import torch

    versions = {
        name: metadata.version(name)
        for name in ("torch", "triton", "transformers")
        if any(True for _ in metadata.distributions(name=name))
    }
    has_gpu = torch.cuda.is_available()
    driver = None
    if has_gpu:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        driver = subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    return {
        "gpu": torch.cuda.get_device_name(0) if has_gpu else None,
        "driver": driver,
        "python": platform.python_version(),
        **versions,
    }


def find_commit() -> str:
    """The commit of the tree, with `-dirty` if the library or its tests were changed."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "dsv4", "tests")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            "no git here: name the commit with --commit or GPU_TESTS_COMMIT"
        ) from error


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders")
    parser.add_argument("--minutes", type=float, default=8.0, help="of this part")
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--commit", default=os.environ.get("GPU_TESTS_COMMIT"))
    parser.add_argument("--state", type=Path, default=ROOT / "build/gpu-tests/state.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/gpu-tests.json")
    parser.add_argument("--resume-any", action="store_true", help="keep another commit's results")
    parser.add_argument("--allow-cpu", action="store_true", help="run where there is no GPU")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run one part; 0 if all tests have run and none failed, 2 if some are left, else 1."""
    options = parse(arguments)
    state = read_state(
        options.state, options.commit or find_commit(), resume_any=options.resume_any
    )
    state.environment = describe_environment()
    if state.environment["gpu"] is None and not options.allow_cpu:
        raise SystemExit("no CUDA device: the tests of `make gpu` need one")

    def save_state() -> None:
        save(options.state, vars(state))
        save(options.out, record(state))

    seconds = mean_seconds(options.out)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not state.tests:
            state.tests = collect(folder, options.tests)
            state.results = {t: state.results[t] for t in state.tests if t in state.results}
        run_part(
            state, folder, save_state, minutes=options.minutes, num_workers=options.workers,
            seconds=seconds,
        )  # fmt: skip
    save_state()
    counts = record(state)
    for test in counts["failures"]:
        print(f"FAILED {test}\n{state.results[test]['error']}")
    print(", ".join(f"{counts[name]} {name}" for name in (*OUTCOMES, "left")))
    return 2 if state.left else 1 if counts["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
