#!/bin/sh
# compute-sanitizer's memcheck over the kernels' tests on a GPU: any access out of bounds fails.
#
#   PYTHON           the interpreter, by default `python`
#   SANITIZER        by default `compute-sanitizer`
#   SANITIZER_TOOL   by default `memcheck`; also racecheck, initcheck, synccheck
#   PYTEST_ARGS      instead of the selection below; tests marked gpu need -m gpu
#
# A kernel is 10 to 50 times slower here, so that only tests with few launches are chosen: steps,
# chunks and each index format at a small width, every layer type and both input dtypes at the
# real one, writes in parts, gathers from all sources, one captured step; scores and top-k of every
# index format, attention of every layer type, number of heads and row format at the real width.
# What is left out repeats the same accesses: other values, reruns, random schedules, thousands of
# replays. Run the GPU tests once before, so that the kernels are compiled. With
# SANITIZE=write or SANITIZE=read only half of it.
set -eu
cd "$(dirname "$0")/.."

WRITE_FILES="tests/kernels/test_triton_write.py tests/kernels/test_triton_gather.py
    tests/cache/test_captured_forward.py tests/kernels/test_acceptance.py"
WRITE="(test_bytes and (over or verify or keys)) or (test_bytes_at_the_real_width and random)
    or test_window_and_entries_apart or test_strided or test_values or test_shapes_of_rows
    or test_missing_rows or test_planning_and_replaying or test_a_step_moves"
READ_FILES="tests/kernels/test_triton_attention.py tests/kernels/test_triton_indexer.py
    tests/kernels/test_triton_topk.py"
READ="(test_the_real_width and False) or test_formats_at_the_real_width
    or test_selection_at_the_real_width or (test_long_rows and random)"
case "${SANITIZE:-all}" in
    write) FILES=$WRITE_FILES CHOSEN=$WRITE ;;
    read) FILES=$READ_FILES CHOSEN=$READ ;;
    all) FILES="$WRITE_FILES $READ_FILES" CHOSEN="$WRITE or $READ" ;;
    *) echo "Invalid SANITIZE: expected write, read or all, got $SANITIZE" >&2; exit 2 ;;
esac

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
