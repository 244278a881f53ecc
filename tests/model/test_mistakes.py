"""Every known way to be wrong is caught: break the reference, and the parity check must fail."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from dsv4 import CacheConfig
from dsv4.formats import index_row
from dsv4.kernels.reference import addressing, attention, codec, compressor, flush_write
from dsv4.kernels.reference.codec import decode, encode
from dsv4.model.random_hf import random_hf_model, record_attention
from tests.model.parity import CachedRun, chunked

NUM_TOKENS = 300
RATIOS = {"SWA": 0, "CSA": 4, "HCA": 128}


@dataclass(frozen=True)
class Mistake:
    """A wrong reading of the model: what to break, and the layer types that must show it."""

    name: str
    kinds: str
    apply: Callable[[pytest.MonkeyPatch], None]

    def __str__(self) -> str:
        return self.name.replace(" ", "_")


def replace(module, name: str, make: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """Put `make(original)` in the place of a function."""
    return lambda patch: patch.setattr(module, name, make(getattr(module, name)))


def with_columns(choose: Callable[[slice, int], slice]):
    """Read the rows of a CSA window from other columns of the projection."""

    def make(original):
        def wrong(rows, tail, tokens, closing, ratio, back, columns):
            columns = choose(columns, tail.shape[-1] // 2)
            return original(rows, tail, tokens, closing, ratio, back, columns)

        return wrong

    return replace(compressor, "_window_rows", make)


def index_key_from_entry(original):
    def wrong(closed, closed_keys, *args, **kwargs):
        dim = closed_keys.entries.shape[1]
        return original(
            closed, closed_keys._replace(entries=closed.entries[:, -dim:]), *args, **kwargs
        )

    return wrong


def without_bias(original):
    return lambda kv, gate, bias, *rest: original(kv, gate, torch.zeros_like(bias), *rest)


def window_of(change: int):
    return lambda original: lambda positions, window: original(positions, window + change)


MISTAKES = [
    Mistake("previous rows from the current series", "CSA",
            with_columns(lambda columns, dim: slice(dim, 2 * dim))),
    Mistake("halves of the projection swapped", "CSA",
            with_columns(lambda columns, dim: slice(dim - columns.start, 2 * dim - columns.start))),
    Mistake("index key is the KV entry", "CSA",
            replace(flush_write, "flush_write_csa", index_key_from_entry)),
    Mistake("no position bias", "CSA HCA", replace(flush_write, "tail_rows", without_bias)),
    Mistake("no norm on the entry", "CSA HCA",
            replace(compressor, "rms_norm", lambda _: lambda x, weight, eps: x)),
    Mistake("no RoPE on the entry", "CSA HCA",
            replace(compressor, "rotate", lambda _: lambda x, cos, sin: x)),
    Mistake("entry rotated at the last token", "CSA HCA",
            replace(addressing, "entry_rope_position", lambda _: lambda positions, m: positions)),
    Mistake("no attention sink", "SWA CSA HCA",
            replace(attention, "attend_dense",
                    lambda original: lambda q, v, mask, sinks: original(q, v, mask, None))),
    Mistake("output not rotated back", "SWA CSA HCA",
            replace(attention, "unrotate", lambda _: lambda output, rope: output)),
    Mistake("window one token too long", "SWA CSA HCA",
            replace(addressing, "window_positions", window_of(1))),
    Mistake("window one token too short", "SWA CSA HCA",
            replace(addressing, "window_positions", window_of(-1))),
    Mistake("closed blocks inside the window not attended", "CSA HCA",
            replace(addressing, "visible_entries",
                    lambda _: lambda positions, m: (positions - 127).clamp(min=0) // m)),
    Mistake("the open window is visible", "CSA HCA",
            replace(addressing, "visible_entries", lambda _: lambda p, m: p // m + 1)),
]  # fmt: skip


@pytest.fixture(scope="module")
def recordings():
    ids = torch.randint(0, 128, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
    models = {kind: random_hf_model(seed=7, compress_ratios=[r]) for kind, r in RATIOS.items()}
    return {kind: (model, [record_attention(model, ids)]) for kind, model in models.items()}


def check_parity(recordings, kind: str, change: Callable[[CacheConfig], CacheConfig] | None = None):
    model, recorded = recordings[kind]
    config = CacheConfig.from_hf(model.config, kv_format="fp32", index_format="fp32")
    # Longer than the window and no divisor of it, so that ring and workspace both matter.
    run = CachedRun(model, change(config) if change else config, recorded)
    run.run(chunked(0, NUM_TOKENS, 50))
    run.check()


@pytest.mark.parametrize("kind", RATIOS)
def test_the_right_reading_passes(recordings, kind):
    check_parity(recordings, kind)


@pytest.mark.parametrize(
    ("mistake", "kind"),
    [(mistake, kind) for mistake in MISTAKES for kind in mistake.kinds.split()],
    ids=str,
)
def test_a_mistake_is_caught(recordings, monkeypatch, mistake, kind):
    mistake.apply(monkeypatch)
    with pytest.raises(AssertionError, match=r"error|token"):
        check_parity(recordings, kind)


@pytest.mark.parametrize("kind", ["CSA", "HCA"])
def test_the_wrong_rope_base_is_caught(recordings, kind):
    with pytest.raises(AssertionError, match=r"error|token"):
        check_parity(
            recordings,
            kind,
            lambda config: dataclasses.replace(config, compress_rope_theta=10000.0, yarn=None),
        )


def key_error() -> float:
    keys = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
    row = index_row("mxfp4", head_dim=128)
    return float((decode(row, encode(row, keys)) - keys).norm() / keys.norm())


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda original: lambda x: original(x) & 7, id="no_sign"),
        pytest.param(
            lambda _: (
                lambda x: x.abs().round().clamp(max=6).byte() | (torch.signbit(x).byte() << 3)
            ),
            id="integers_for_codes",
        ),
    ],
)
def test_wrong_fp4_codes_are_caught(monkeypatch, wrong):
    assert key_error() == pytest.approx(0.115, abs=0.003)
    monkeypatch.setattr(codec, "encode_e2m1", wrong(codec.encode_e2m1))
    assert key_error() > 0.3
