"""An `EngineThread` that repeats a script of texts, byte by byte, without a model."""

import threading
import time
from types import SimpleNamespace

from dsv4.cache.memory.capacity import ComponentBytes
from dsv4.cache.stats import CacheStats
from dsv4.engine import (
    EngineDeadError,
    EngineSnapshot,
    Output,
    QueueFullError,
    TokenLogprobs,
)
from dsv4.engine.thread import RequestState


class FakeEngine:
    """Gives each sample the script, or the prompt backwards where there is none.

    Attributes:
        script: Texts of samples, by index.
        hold: Requests stop after their first token while it is set.
    """

    def __init__(self, tokenizer, *, max_waiting=1000):
        self.tokenizer, self.max_waiting = tokenizer, max_waiting
        self.script, self.fatal_error = [], None
        self.hold = threading.Event()
        self.open, self.cancelled, self.submitted = {}, [], []
        self.num_steps = 0

    def start(self):
        pass

    def stop(self, timeout=None):
        for request_id in list(self.open):
            self.cancel(request_id)

    def submit(self, prompt, params, on_output, *, request_id, salt=b"", checkpoint_at=None):
        if self.fatal_error is not None:
            raise EngineDeadError(self.fatal_error)
        if len(self.open) >= self.max_waiting:
            raise QueueFullError(f"{self.max_waiting} requests wait")
        self.submitted.append((prompt, params, salt))
        self.checkpoint_at = checkpoint_at
        self.open[request_id] = on_output
        threading.Thread(target=self.run, args=(request_id, prompt, params, on_output)).start()
        return request_id

    def output(self, request_id, index, tokens, text, params, **more):
        scores = [TokenLogprobs(-0.5, [(token, -0.5), (1, -7.0)]) for token in tokens]
        values = {"finish_reason": None, "error": None, "stop": None} | more
        return Output(
            request_id=request_id, index=index, token_ids=tokens, text=text,
            logprobs=scores if params.logprobs is not None else None,
            num_prompt_tokens=3, num_cached_tokens=2, **values,
        )  # fmt: skip

    def run(self, request_id, prompt, params, on_output):
        for index in range(params.n):
            text = self.script[index] if self.script else self.tokenizer.decode(prompt)[::-1]
            ids = self.tokenizer(text)["input_ids"][: params.max_new_tokens]
            for number, token in enumerate(ids):
                while number and self.hold.is_set():
                    if request_id not in self.open:
                        return
                    time.sleep(0.001)
                is_last = number == len(ids) - 1
                reason = "length" if len(ids) == params.max_new_tokens else "stop"
                piece = self.tokenizer.decode([token])
                end = {"finish_reason": reason} if is_last else {}
                on_output(self.output(request_id, index, [token], piece, params, **end))
        self.open.pop(request_id, None)

    def die(self, reason):
        self.fatal_error = reason
        self.end("error", reason)

    def end(self, reason, error=None):
        """End all requests for a reason that is not their own."""
        for request_id, on_output in list(self.open.items()):
            self.open.pop(request_id)
            params = SimpleNamespace(logprobs=None)
            end = {"finish_reason": reason, "error": error}
            on_output(self.output(request_id, 0, [], "", params, **end))

    def cancel(self, request_id):
        if self.open.pop(request_id, None) is not None:
            self.cancelled.append(request_id)

    def snapshot(self):
        stats = CacheStats(
            num_free_blocks=5, num_request_blocks=2, num_swapped_blocks=1, num_hit_tokens=60,
            num_host_hit_tokens=50, num_disk_tokens=20, num_lookups=3, num_asked_tokens=130,
        )  # fmt: skip
        requests = [RequestState(name, 0, "decode", 3, 4, 2) for name in list(self.open)]
        memory = {"csa_kv": ComponentBytes(900, 1024), "swa": ComponentBytes(10, 2048)}
        counts = {"steps": self.num_steps, "prompt_tokens": 100, "generated_tokens": 9}
        return EngineSnapshot(time.monotonic(), counts, requests, stats, memory)
