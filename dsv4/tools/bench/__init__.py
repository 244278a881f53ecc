"""`dsv4 bench`: `bench_NAME` of module `NAME` runs a bench and returns its result as JSON.

To read in order: `command` lists the benches, `tables` prints their results, `timing` holds the
clocks, `requests` makes requests of any length, `environment` names the machine. `decode` is the
second half of `step`; `attend_case` belongs to `attend`, `tune_cases` to
`tune`, `long_contexts` to `transformers`. `external` holds other projects' kernels.
"""
