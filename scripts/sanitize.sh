#!/bin/sh
# A tool of compute-sanitizer over the kernels' tests on a GPU: an error that it reports fails.
# memcheck finds accesses out of bounds, racecheck races in shared memory, synccheck wrong barriers.
#
#   PYTHON           the interpreter, by default `python`
#   SANITIZER        by default `compute-sanitizer`
#   SANITIZER_TOOL   by default `memcheck`; also racecheck, synccheck, initcheck
#   PYTEST_ARGS      instead of the selection below; tests marked gpu need -m gpu
#
# A kernel is 10 to 50 times slower here, so that only tests with few launches are chosen: steps,
# chunks and each index format at a small width, every layer type and both input dtypes at the
# real one, writes in parts, gathers from all sources, one captured step; scores and top-k of every
# index format, attention of every layer type, number of heads and row format at the real width,
# over raw queries and in joined splits too. What is left out repeats the same accesses: other
# values, reruns, random schedules, thousands of replays. Run the GPU tests once before, so that the
# kernels are compiled. With SANITIZE=write, read, chunk or v41 only a part of it. Chunks have
# scores by pairs of tokens, dense rows and attention over them. V4.1 has writes, candidates and
# attention over its rows.
set -eu
cd "$(dirname "$0")/.."

WRITE="tests/kernels/test_triton_write.py tests/kernels/test_triton_gather.py
    tests/cache/test_captured_forward.py tests/kernels/test_acceptance.py
    tests/cache/test_group_sums.py tests/kernels/test_triton_rope.py"
READ="tests/kernels/test_triton_attention.py tests/kernels/test_triton_indexer.py
    tests/kernels/test_triton_topk.py"
CHUNK="tests/kernels/test_chunk_scores.py tests/kernels/test_dense_rows.py"
V41=tests/kernels/test_v41_triton.py
case "${SANITIZE:-all}" in
    write) FILES=$WRITE ;;
    read) FILES=$READ ;;
    chunk) FILES=$CHUNK ;;
    v41) FILES=$V41 ;;
    all) FILES="$WRITE $READ $CHUNK $V41" ;;
    *) echo "Invalid SANITIZE: expected write, read, chunk, v41 or all, got $SANITIZE" >&2
        exit 2 ;;
esac
CHOSEN="(test_bytes and (over or verify or keys)) or (test_bytes_at_the_real_width and random)
    or test_window_and_entries_apart or test_strided or test_values or test_shapes_of_rows
    or test_missing_rows or test_planning_and_replaying or test_a_step_moves
    or test_kernels_store_the_same_sums or test_bits_of_the_reference
    or test_the_real_width or test_raw_queries_at_the_real_width or test_formats_at_the_real_width
    or test_batch_invariant_bits_at_the_real_width or test_programs_of_any_heads
    or test_selection_at_the_real_width or (test_long_rows and random)
    or test_scores_are_those_of_steps or test_parts_of_a_chunk or test_rows_outside_of_the_pool
    or test_rows_of_another_request or test_some_tokens_of_a_chunk
    or test_writes_store_the_same_bytes or test_choices_and_candidates
    or test_chunks_over_dense_rows or test_rows_become_dense"

# PyTorch's own cache would hide an access beyond a tensor inside a larger allocation.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
if [ -n "${PYTEST_ARGS:-}" ]; then
    # shellcheck disable=SC2086
    set -- $PYTEST_ARGS
else
    # shellcheck disable=SC2086
    set -- $FILES -m "not slow" -k "$(echo $CHOSEN)"
fi
exec "${SANITIZER:-compute-sanitizer}" --tool "${SANITIZER_TOOL:-memcheck}" --error-exitcode 1 \
    "${PYTHON:-python}" -m pytest -p no:cacheprovider "$@"
