"""`dsv4 bench engine` on a small model."""

from dsv4.model.random_hf import random_hf_model
from dsv4.tools.bench import engine as bench
from dsv4.tools.bench.tables import show


def test_the_table():
    model = random_hf_model(seed=0, compress_ratios=[0, 4], hc_sinkhorn_iters=2)
    result = bench.measure(model, 3, 512, 20, 2)
    ours, theirs = result["rows"]
    assert ours["found_tokens"] == 2 * 512  # the second and the third waited for the first
    assert ours["tokens_per_s"] * ours["seconds"] > 5.9
    assert result["faster"] == ours["tokens_per_s"] / theirs["tokens_per_s"]
    assert 0 < ours["first_token_s"] <= ours["last_first_token_s"] < ours["seconds"]
    shown = show("engine", result)
    assert shown.sentences == [f"{result['faster']:.1f} x the tokens a second; 1,024 tokens found"]
    assert not {"generate", "forward"} & set(vars(model))
