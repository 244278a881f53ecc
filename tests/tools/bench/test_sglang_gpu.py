"""SGLang's kernels on a GPU: the checks that the benches run before they time them.

`DSV4_PEERS` names a folder with an unpacked SGLang.
"""

import pytest
import torch

from dsv4.layer_schedule import AttentionType
from dsv4.tools.bench import index, write
from dsv4.tools.bench.external.sglang import load_sglang
from dsv4.tools.bench.external.sglang_index import SGLangQuery, SGLangTopk
from dsv4.tools.bench.external.sglang_write import check_sglang

pytestmark = pytest.mark.gpu


@pytest.fixture
def kernels():
    try:
        return load_sglang()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("batch", [1, 33])
@pytest.mark.parametrize("num_entries", [513, 8192, 20001])
def test_topk(num_entries, batch, kernels):
    case = index.index_case("fp8", num_entries, batch)
    case.scratch.scores.normal_()
    calls = SGLangTopk(kernels, case.handles[0], case.scratch.scores, num_entries=num_entries)
    calls.check()
    case.scratch.scores.neg_()
    rows = calls.rows.clone()
    calls.check()
    assert not torch.equal(rows, calls.rows)


@pytest.mark.parametrize("batch", [1, 33])
def test_index_query(batch, kernels):
    case = index.index_case("fp8", 1024, batch)
    SGLangQuery(kernels, case.handles[0], case.query, case.head_weights).check()


@pytest.mark.parametrize("kind", AttentionType, ids=lambda kind: kind.name)
def test_writes(kind, kernels):
    check_sglang(kernels, write.write_config(kind))
