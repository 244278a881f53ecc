"""Two hundred clients at once that come, ask, and go: every answer is the model's own."""

import asyncio
import random
import time
from collections import Counter

import pytest

pytest.importorskip("fastapi", reason="the extra dsv4[serve] is not installed")
import httpx2
import openai

from tests.serve.server import DEADLINE, running

NUM_CLIENTS = 200
TIGHT = [
    "--max-tokens", "1024", "--max-requests", "8", "--num-blocks", "12", "--prefix-bytes", "8MiB",
    "--max-queue", "150", "--drafts", "2",
]  # fmt: skip
GROWTH = 64 << 20  # bytes that a server may grow by after its first third, for the allocator


def make_prompts(count):
    """Texts of 1 to 700 characters, of which some begin alike."""
    rng = random.Random(3)
    shared = ["".join(rng.choices("abcdef ", k=600)) for _ in range(2)]
    beginnings = [rng.choice(["", *shared])[: rng.randrange(600)] for _ in range(count)]
    return [text + "".join(rng.choices("xyz", k=rng.randint(1, 100))) for text in beginnings]


class Crowd:
    """Clients with random arrivals, lengths and cancels, each in a loop until the end."""

    def __init__(self, url, prompts, seconds, seed):
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=NUM_CLIENTS)
        self.api = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE,
            http_client=openai.DefaultAsyncHttpxClient(limits=limits, timeout=DEADLINE),
        )  # fmt: skip
        self.prompts, self.random = prompts, random.Random(seed)
        self.end = time.monotonic() + seconds
        self.counts, self.answers = Counter(), []

    async def ask(self, prompt, num_new, is_stream):
        options = {"model": "tiny", "prompt": prompt, "max_tokens": num_new, "temperature": 0}
        if not is_stream:
            return (await self.api.completions.create(**options)).choices[0].text
        text = ""
        async for chunk in await self.api.completions.create(**options, stream=True):
            text += chunk.choices[0].text
        return text

    async def one(self):
        prompt, num_new = self.random.choice(self.prompts), self.random.randint(1, 24)
        asked = asyncio.ensure_future(self.ask(prompt, num_new, self.random.random() < 0.5))
        self.counts["asked"] += 1
        patience = self.random.expovariate(1.0) if self.random.random() < 0.3 else None
        try:
            text = await asyncio.wait_for(asked, patience)
        except TimeoutError:
            self.counts["gone"] += 1
        except openai.RateLimitError:
            self.counts["refused"] += 1
            await asyncio.sleep(self.random.random())
        else:
            self.counts["answered"] += 1
            self.answers.append((prompt, text, num_new))

    async def client(self):
        await asyncio.sleep(2 * self.random.random())
        while True:
            await self.one()
            if time.monotonic() > self.end:
                return

    async def run(self):
        async with asyncio.timeout(DEADLINE + 300):
            await asyncio.gather(*(self.client() for _ in range(NUM_CLIENTS)))


def run_crowd(checkpoint, folder, alone, *, seconds, seed):
    prompts = make_prompts(24)
    with running(checkpoint, folder / "log", sizes=TIGHT) as server:
        num_blocks = server.state()["stats"]["num_free_blocks"]
        asyncio.run(Crowd(server.url, prompts, seconds / 3, seed).run())
        server.wait_until_idle()
        before = server.resident_bytes()
        crowd = Crowd(server.url, prompts, 2 * seconds / 3, seed + 1)
        asyncio.run(crowd.run())
        stats = server.wait_until_idle()["stats"]
        assert stats["num_free_blocks"] + stats["num_evictable_blocks"] == num_blocks
        assert server.resident_bytes() - before < GROWTH
    counts = crowd.counts
    assert counts["asked"] == counts["answered"] + counts["gone"] + counts["refused"]
    assert counts["answered"] and counts["gone"], counts
    for answer in crowd.answers:
        alone.check(*answer)
    print(counts)


def test_a_crowd(checkpoint, tmp_path, alone):
    run_crowd(checkpoint, tmp_path, alone, seconds=20, seed=1)


@pytest.mark.slow
def test_a_crowd_for_two_minutes(checkpoint, tmp_path, alone):
    run_crowd(checkpoint, tmp_path, alone, seconds=120, seed=5)
