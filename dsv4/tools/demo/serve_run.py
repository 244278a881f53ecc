"""`dsv4 demo --serve`: ask the memory model through `dsv4 serve`, with the openai client."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from dsv4.model.memory_book import VOCABULARY, make_tokenizer, text_of, write_book
from dsv4.tools.demo.memory_run import describe, make_model

MAIN = "from dsv4.tools.cli import main; raise SystemExit(main())"
PATIENCE = 300.0  # seconds


def run_served(
    *, num_tokens: int, num_questions: int, kv_format: Any, index_format: Any, device: str
) -> dict[str, Any]:
    """Ask each question behind the whole book; the server knows the book after the first."""
    try:
        import openai
    except ImportError as error:
        raise ImportError("--serve needs openai: pip install 'dsv4[serve]'") from error
    model, book = make_model(device), write_book(num_tokens)
    questions, text = book.choose(num_questions), text_of(book.ids)
    options = ["--kv", kv_format, "--index", index_format, "--device", device,
               "--max-tokens", str(len(book.ids) + 16)]  # fmt: skip
    answers, times = [], [time.perf_counter()]
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder), model, options) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE)
        times[0] = time.perf_counter()
        for question in questions:
            said = f"{text} {text_of(question.ids)}"
            reply = client.chat.completions.create(
                model="memory", messages=[{"role": "user", "content": said}], temperature=0,
                max_tokens=4,
            )  # fmt: skip
            answers.append((reply.choices[0].message.content or "").strip())
            times.append(time.perf_counter())
    right = [answer == VOCABULARY[q.answer] for q, answer in zip(questions, answers, strict=True)]
    num_later = len(questions) - 1
    run = {
        "right": sum(right), "num_bytes": None,
        "prefill_per_second": len(book.ids) / (times[1] - times[0]),
        "answers_per_second": 2 * num_later / (times[-1] - times[1]) if num_later else None,
    }  # fmt: skip
    runs = {f"dsv4 serve, {kv_format} + {index_format}": run}
    return describe(book, questions, answers, runs, {}, device=device, is_same=None)


@contextmanager
def _server(folder: Path, model: Any, options: list[str]) -> Iterator[str]:
    """Write a model folder, serve it from another process and yield the address."""
    disable_progress_bar()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    arguments = ["serve", str(folder), "--name", "memory", "--port", "0", *options]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *arguments], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        end = time.monotonic() + PATIENCE
        while not (found := re.search(r"running on (http://\S+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"dsv4 serve does not listen: {log.read_text()[-500:]}")
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        process.wait(PATIENCE)
