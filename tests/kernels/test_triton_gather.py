"""The Triton gathers return the reference's values: on a GPU, or under Triton's interpreter."""

from dataclasses import dataclass, field, replace

import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.formats import KV_FORMATS, PagedRows, kv_row
from dsv4.kernels import reference
from dsv4.kernels.backends import load_backend
from dsv4.kernels.contracts import Gathered
from dsv4.kernels.reference.codec import EncodedRows, encode, write_rows
from dsv4.kernels.reference.gather import gather_rows
from dsv4.kernels.triton import gather
from dsv4.testing import (
    POISON_BYTE,
    join_rows,
    model_projections,
    model_weights,
    move_to,
    poison,
    take_rows,
)
from tests.kernels.serving import write_in_parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SWA, CSA, HCA = (0,), (4,), (128,)


@dataclass(frozen=True)
class Case:
    """A layer, its choices, and lengths of each request before and after the last forward."""

    name: str
    ratios: tuple[int, ...]
    before: list[int]
    after: list[int]
    choices: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("csa one before, at and after an entry", CSA, [2, 3, 4], [3, 4, 5]),
    Case("csa one before, at and after a block", CSA, [254, 255, 256], [255, 256, 257]),
    Case("hca one before, at and after an entry", HCA, [126, 127, 128], [127, 128, 129]),
    Case("hca one before, at and after a block", HCA, [254, 255, 256], [255, 256, 257]),
    Case("swa at the ring's wrap", SWA, [126, 127, 128], [127, 128, 129]),
    Case("a chunk among steps", CSA, [0, 126], [1, 130]),
    Case("chunks alone", HCA, [0, 127], [2, 129]),
    Case("a verify step", CSA, [0, 127], [1, 130], {"drafts_per_step": 2}),
    Case("rows that are no power of two", CSA, [3], [5],
         {"head_dim": 104, "rope_dim": 24, "kv_format": "fp8_entry_scale"}),
    *(Case(f"chunk and step {name}", CSA, [0, 6], [2, 7], {"kv_format": name})
      for name in KV_FORMATS),
]  # fmt: skip


def filled(
    config: CacheConfig,
    before: list[int],
    after: list[int],
    *,
    device: str = DEVICE,
    max_forward_tokens: int = 2048,
):
    """Handle of a layer after a forward; a padding row follows the first request.

    The reference writes, which compiles nothing.
    """
    num_blocks = sum(-(-length // config.block_tokens) for length in after) + len(before) + 2
    manager = KVCacheManager(
        config, max_requests=len(before) + 3, num_blocks=num_blocks, device=device,
        max_forward_tokens=max_forward_tokens, backend="reference",
    )  # fmt: skip
    poison(manager)
    slots = [manager.open_request() for _ in range(len(before) + 1)][1:]
    weights = move_to(device, model_weights(config, seed=0)[0])
    layers = [written_projections(config, max(after), seed=10 * s) for s in range(len(after))]
    for starts, ends in (([0] * len(before), before), (before, after)):
        plan = prepare_forward(
            manager,
            [slots[0], -1, *slots[1:]],
            [starts[0], 0, *starts[1:]],
            [ends[0], 1, *ends[1:]],
        )
        parts = [take_rows(*row) for row in zip(layers, map(slice, starts, ends), strict=True)]
        padding = take_rows(layers[0], slice(0, 1))
        inputs = move_to(device, join_rows([parts[0], padding, *parts[1:]]))
        handle = manager.acquire(0, plan)
        write_in_parts(handle, inputs, weights)
    return handle


def written_projections(config: CacheConfig, num_tokens: int, *, seed: int):
    """Projections of the first layer, with queries of one head, since none is written."""
    narrow = replace(config, num_query_heads=1, index_num_heads=1)
    return model_projections(narrow, num_tokens, seed=seed)[0]


@pytest.fixture
def wide_tiles(monkeypatch):
    """Under the interpreter a program takes as long for one row as for many."""
    if DEVICE == "cpu":
        from dsv4.kernels.triton import gather

        wide = gather.GatherLaunch(tile=32, num_warps=4)
        monkeypatch.setattr(gather, "gather_launch", lambda num_rows, device: wide)


def triton():
    return load_backend("triton")


def listed_rows(pages: PagedRows, *, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random rows of the pages, a third of them missing."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = pages.data.shape[0] * pages.rows_per_page
    rows = torch.randint(-num_rows // 2, num_rows, shape, generator=generator)
    return rows.to(pages.data.device)


def random_pages(
    name: str, *, num_pages: int, rows_per_page: int, head_dim: int = 512, device: str = DEVICE
) -> PagedRows:
    """Pages with values over many magnitudes."""
    fmt = kv_row(name, head_dim=head_dim, rope_dim=64)
    run_bytes, num_rows = fmt.page_bytes(rows_per_page, align=576), num_pages * rows_per_page
    storage = torch.full((num_pages, 2 * run_bytes), POISON_BYTE, dtype=torch.uint8, device=device)
    pages = fmt.pages(storage, offset=run_bytes, rows_per_page=rows_per_page)
    values = torch.randn(num_rows, head_dim, generator=torch.Generator().manual_seed(1))
    values = values * torch.logspace(-6, 6, num_rows)[:, None]
    write_rows(pages, torch.arange(num_rows, device=device), encode(fmt, values.to(device)))
    return pages


def assert_same(got: Gathered, expected: Gathered) -> None:
    """Compare bit for bit. A NaN's bits don't count: torch's conversions differ in them."""
    assert got.values.dtype == expected.values.dtype
    assert got.values.shape == expected.values.shape
    assert torch.equal(got.is_present, expected.is_present)
    nan = expected.values.isnan()
    assert torch.equal(got.values.isnan(), nan)
    assert torch.equal(
        bits(got.values.masked_fill(nan, 0)), bits(expected.values.masked_fill(nan, 0))
    )


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16 if values.dtype is torch.bfloat16 else torch.int32)


def all_gathers(backend, handle) -> list[Gathered]:
    """The three gathers of a layer; SWA has one."""
    memory, tokens = handle.memory, handle.tokens
    gathered = [backend.gather_swa_kv(memory, tokens)]
    if handle.paged is not None:
        count = handle.plan.max_entries(handle.layer.ratio)
        gathered += [
            backend.gather_all_compressed_kv(memory, tokens, max_entries=max_entries)
            for max_entries in (count, count + 3)
        ]
        gathered.append(backend.gather_compressed_kv(memory, gathered_rows(handle, count)))
    return gathered


def listed_reference(pages: PagedRows, rows: torch.Tensor) -> Gathered:
    """The reference's gather of listed rows, on pages alone."""
    values = gather_rows(pages, rows.long().contiguous()).to(pages.format.value_dtype)
    return Gathered(values, rows >= 0)


def gathered_rows(handle, count: int) -> torch.Tensor:
    """Flat rows of the batch's entries, last one first, and some that are missing."""
    per_block = handle.paged.entries.rows_per_page
    entry = torch.arange(count - 1, -1, -1, device=handle.block_table.device)
    blocks = handle.block_table.long()[:, entry // per_block]
    is_closed = entry < handle.block_lens[:, None]
    return torch.where(is_closed & (blocks >= 0), blocks * per_block + entry % per_block, -7)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case, wide_tiles):
    config = CacheConfig.tiny(compress_ratios=case.ratios, **case.choices)
    handle = filled(config, case.before, case.after)
    expected = all_gathers(reference, handle)
    for got, want in zip(all_gathers(triton(), handle), expected, strict=True):
        assert_same(got, want)
        assert want.values.isfinite().all(), "nothing of the poison is read"


def test_the_handle_uses_them(wide_tiles):
    config = CacheConfig.tiny(compress_ratios=CSA)
    handle = filled(config, [8], [9])
    kernels = replace(handle, parts=replace(handle.parts, backend="triton"))
    assert_same(kernels.gather_swa_kv(), handle.gather_swa_kv())
    assert_same(kernels.gather_all_compressed_kv(), handle.gather_all_compressed_kv())


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("head_dim", [512, 704])  # 7 groups, and more than fit one word of scales
def test_listed_rows_at_the_real_width(name, head_dim):
    pages = random_pages(name, num_pages=3, rows_per_page=5, head_dim=head_dim)
    rows = listed_rows(pages, shape=(3, 11))
    assert_same(gather.gather_listed(pages, rows), listed_reference(pages, rows))


@pytest.mark.parametrize("shape", [(1,), (61,), (2, 63), (2, 3, 9), (5, 1), (1, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_shapes_of_rows(shape, dtype):
    pages = random_pages("fp8", num_pages=2, rows_per_page=4)
    rows = listed_rows(pages, shape=shape).to(dtype)
    assert_same(gather.gather_listed(pages, rows), listed_reference(pages, rows))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_outside_of_the_pool_are_missing(dtype):
    handle = filled(CacheConfig.tiny(compress_ratios=CSA), [8], [9])
    num_rows, limits = handle.memory.entries.num_rows, torch.iinfo(dtype)
    wrong = [num_rows, 2 * num_rows, limits.max, -2, limits.min]
    if dtype is torch.int64:
        wrong += [2**31, 2**32, 2**32 + 1, -(2**32) + 1]
    right = gathered_rows(handle, 2)[0].tolist()
    rows = torch.tensor([wrong + right], dtype=dtype, device=DEVICE)
    cleaned = torch.tensor([[-1] * len(wrong) + right], device=DEVICE)
    want = reference.gather_compressed_kv(handle.memory, cleaned)
    assert want.is_present.tolist() == [[False] * len(wrong) + [True, True]]
    for backend in (reference, triton()):
        assert_same(backend.gather_compressed_kv(handle.memory, rows), want)


STRIDED = {
    "transposed": lambda rows: rows.t(),
    "every other column": lambda rows: rows[:, ::2],
    "a column repeated": lambda rows: rows[:, :1].expand(-1, 5),
    "a row repeated": lambda rows: rows[:1].expand(4, -1),
    "not one view": lambda rows: rows.view(4, 2, 6).transpose(0, 1),
    "unaligned": lambda rows: rows[:, 1:],
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_rows(name):
    pages = random_pages("fp8", num_pages=2, rows_per_page=4)
    rows = STRIDED[name](listed_rows(pages, shape=(4, 12)))
    assert not rows.is_contiguous()
    assert_same(gather.gather_listed(pages, rows), listed_reference(pages, rows))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)], ids=str)
def test_no_rows(shape):
    pages = random_pages("fp8", num_pages=1, rows_per_page=2)
    gathered = gather.gather_listed(pages, torch.zeros(shape, dtype=torch.int64))
    assert gathered.values.shape == (*shape, 512) and gathered.is_present.shape == shape


def test_no_entries_and_no_tokens():
    config = CacheConfig.tiny(compress_ratios=CSA)
    manager = KVCacheManager(config, max_requests=2, num_blocks=2, device=DEVICE)
    tokens = prepare_forward(manager, [], [], []).tokens
    (memory,) = manager.device_memory.memories
    none = gather.gather_swa_kv(memory, tokens)
    assert none.values.shape == (0, 128, 96) and none.is_present.shape == (0, 128)
    none = gather.gather_all_compressed_kv(memory, tokens, max_entries=3)
    assert none.values.shape == (0, 3, 96)
    tokens = prepare_forward(manager, [manager.open_request()], [0], [1]).tokens
    none = gather.gather_all_compressed_kv(memory, tokens, max_entries=0)
    assert none.values.shape == (1, 0, 96)


def test_missing_rows_are_zeros_and_read_nothing():
    pages = random_pages("fp8", num_pages=1, rows_per_page=4)
    pages.data.fill_(POISON_BYTE)
    pages.scales.fill_(POISON_BYTE)
    rows = torch.tensor([[-1, -5, -(2**31)]], device=DEVICE)
    gathered = gather.gather_listed(pages, rows)
    assert not gathered.is_present.any()
    assert (bits(gathered.values) == 0).all()


def every_code(name: str) -> PagedRows:
    """256 rows with every E4M3 code, each row with another scale."""
    fmt = kv_row(name, head_dim=320, rope_dim=64)
    storage = torch.zeros(1, fmt.page_bytes(256, align=576), dtype=torch.uint8)
    pages = fmt.pages(storage, offset=0, rows_per_page=256)
    codes = torch.arange(256, dtype=torch.uint8).expand(256, 256)
    rope = torch.zeros(256, 128, dtype=torch.uint8)
    if name == "fp8":
        scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8)
    else:
        generator = torch.Generator().manual_seed(0)
        scale = (
            torch.randn(256, 1, generator=generator).exp() * torch.logspace(-38, 38, 256)[:, None]
        )
        scales = scale.view(torch.uint8)
    write_rows(pages, torch.arange(256), EncodedRows(torch.cat((codes, rope), dim=1), scales))
    return fmt.pages(storage.to(DEVICE), offset=0, rows_per_page=256)


@pytest.mark.parametrize("name", ["fp8", "fp8_entry_scale"])
def test_every_code_with_many_scales(name):
    pages = every_code(name)
    rows = torch.arange(256, device=DEVICE)
    got = gather.gather_listed(pages, rows)
    assert_same(got, listed_reference(pages, rows))
    nan = bits(got.values)[got.values.isnan()]
    assert len(nan) and (nan == 0x7FFF).all()


@pytest.mark.parametrize("name", KV_FORMATS)
def test_stored_nans_and_infinities(name):
    fmt = kv_row(name, head_dim=512, rope_dim=64)
    pages = random_pages(name, num_pages=1, rows_per_page=2)
    values = torch.ones(2, 512, device=DEVICE)
    values[0, [0, 70, 450, 511]] = torch.nan
    values[1, [1, 300, 460]] = torch.tensor([torch.inf, -torch.inf, -torch.inf], device=DEVICE)
    rows = torch.arange(2, device=DEVICE)
    write_rows(pages, rows, encode(fmt, values))
    got = gather.gather_listed(pages, rows)
    assert_same(got, listed_reference(pages, rows))
    assert got.values[0].isnan().sum() == 4


def real_handle(name: str = "fp8"):
    config = CacheConfig.v4_flash(compress_ratios=CSA, num_query_heads=1, kv_format=name)
    return filled(config, [0, 254, 126, 700], [130, 255, 128, 701], device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", KV_FORMATS)
def test_values_at_the_real_width(name):
    handle = real_handle(name)
    for got, want in zip(
        all_gathers(triton(), handle), all_gathers(reference, handle), strict=True
    ):
        assert_same(got, want)
        assert want.values.isfinite().all()


@pytest.mark.gpu
def test_reruns_are_bitwise_equal():
    handle = real_handle()
    first = all_gathers(triton(), handle)
    for _ in range(20):
        for got, want in zip(all_gathers(triton(), handle), first, strict=True):
            assert torch.equal(got.is_present, want.is_present)
            assert torch.equal(bits(got.values), bits(want.values))


@pytest.mark.gpu
def test_a_pool_beyond_2_to_the_31_bytes():
    config = CacheConfig.v4_flash(compress_ratios=CSA, num_query_heads=1)
    probe = KVCacheManager(config, max_requests=1, num_blocks=1)
    block_bytes = probe.paged.storage.shape[1]
    num_blocks = 2**31 // block_bytes + 4096
    storage = torch.full((num_blocks, block_bytes), POISON_BYTE, dtype=torch.uint8, device="cuda")
    assert storage.numel() > 2**31
    pages = config.kv_row.pages(storage, offset=0, rows_per_page=64)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2**31 // block_bytes * 64, num_blocks * 64, (256,), generator=generator)
    rows = torch.cat((rows, torch.tensor([0, num_blocks * 64 - 1]))).unique().to("cuda")
    values = torch.randn(len(rows), 512, generator=generator).to("cuda")
    write_rows(pages, rows, encode(config.kv_row, values))
    listed = torch.cat((rows, torch.tensor([-1], device="cuda"), rows.flip(0)))[None]
    got = gather.gather_listed(pages, listed)
    assert_same(got, listed_reference(pages, listed))
    assert got.values.isfinite().all() and got.is_present.sum() == 2 * len(rows)


@pytest.mark.gpu
def test_more_values_than_2_to_the_31():
    pages = random_pages("fp8", num_pages=2, rows_per_page=64, device="cuda")
    rows = listed_rows(pages, shape=(8200, 512))
    got = gather.gather_listed(pages, rows)
    assert got.values.numel() > 2**31
    for part in (slice(0, 2), slice(-2, None)):
        want = listed_reference(pages, rows[part])
        assert_same(Gathered(got.values[part], got.is_present[part]), want)


@pytest.mark.gpu
def test_lengths_do_not_compile_anew():
    from dsv4.kernels.triton.gather import _gather_kernel

    pages = random_pages("fp8", num_pages=2, rows_per_page=64, device="cuda")

    def num_compiled() -> int:
        return sum(len(cache[0]) for cache in _gather_kernel.device_caches.values())

    gather.gather_listed(pages, listed_rows(pages, shape=(4, 512)))
    before = num_compiled()
    for shape in ((1, 1), (3, 61), (16, 512), (2, 1024), (7,)):
        gather.gather_listed(pages, listed_rows(pages, shape=shape))
    gather.gather_listed(pages, listed_rows(pages, shape=(4, 16))[:, 1:])
    assert num_compiled() == before
