"""Compile attention of prepared queries, then of raw ones; print what each takes as JSON."""

from tests.kernels.compile_triton import AttentionCase, pretend, record_attention, report

if __name__ == "__main__":
    pretend(80)
    for is_raw in (False, True):
        report(record_attention(AttentionCase(128, 16, "fp8", True, is_raw)), f"{is_raw}", 80)
