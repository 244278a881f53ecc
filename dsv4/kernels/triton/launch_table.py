"""Launch parameters by architecture and work, which `launch` reads and `dsv4 bench tune` writes."""

LAUNCHES: dict[str, dict[str, list[dict[str, int | None]]]] = {
    "sm_80": {
        "attend bf16": [
            {"up_to": 16, "heads": 16, "tile": 32, "num_warps": 8},
            {"up_to": None, "heads": 32, "tile": 32, "num_warps": 8},
        ],
    },
    "sm_90": {
        "swa decode": [{"up_to": None, "num_warps": 1}],
        "swa step": [{"up_to": None, "num_warps": 4}],
        "swa chunk": [
            {"up_to": 512, "num_warps": 1},
            {"up_to": None, "num_warps": 2, "window_rows": 4},
        ],
        "csa decode": [{"up_to": None, "num_warps": 4}],
        "csa step": [{"up_to": None, "num_warps": 4}],
        "csa chunk": [
            {"up_to": 512, "num_warps": 4, "window_rows": 4, "maxnreg": 96},
            {"up_to": None, "num_warps": 4, "window_rows": 4, "maxnreg": 80},
        ],
        "hca decode": [
            {"up_to": 64, "num_warps": 4, "channels": 32},
            {"up_to": None, "num_warps": 2},
        ],
        "hca step": [{"up_to": None, "num_warps": 4}],
        "hca chunk": [
            {"up_to": 512, "num_warps": 4, "channels": 32, "window_rows": 4},
            {"up_to": None, "num_warps": 4, "window_rows": 4},
        ],
        "gather": [{"up_to": None, "tile": 8, "num_warps": 4}],
        "index query": [
            {"up_to": 256, "heads": 4, "num_warps": 2},
            {"up_to": None, "heads": 16, "num_warps": 4},
        ],
        "score mxfp4": [
            {
                "up_to": 32,
                "tile": 128,
                "num_warps": 4,
                "stages": 2,
                "programs_per_sm": 4,
                "maxnreg": 128,
            },
            {
                "up_to": None,
                "tile": 64,
                "num_warps": 4,
                "stages": 2,
                "programs_per_sm": 5,
                "maxnreg": 104,
            },
        ],
        "score nvfp4": [
            {"up_to": None, "tile": 128, "num_warps": 4, "stages": 3, "programs_per_sm": 4},
        ],
        "score fp8": [
            {"up_to": None, "tile": 128, "num_warps": 4, "stages": 3, "programs_per_sm": 3},
        ],
        "score bf16": [
            {"up_to": None, "tile": 64, "num_warps": 4, "stages": 3, "programs_per_sm": 4},
        ],
        "score fp32": [
            {"up_to": None, "tile": 32, "num_warps": 8, "stages": 3, "programs_per_sm": 4},
        ],
        "score fp8 chunk": [
            {
                "up_to": None,
                "tile": 128,
                "num_warps": 8,
                "stages": 3,
                "programs_per_sm": 10,
                "tokens": 2,
            },
        ],
        "score mxfp4 chunk": [
            {
                "up_to": None,
                "tile": 64,
                "num_warps": 4,
                "stages": 2,
                "programs_per_sm": 3,
                "tokens": 4,
            },
        ],
        "top-k groups": [{"up_to": None, "scores": 4096, "num_warps": 4}],
        "top-k": [
            {"up_to": 8192, "num_warps": 8},
            {"up_to": None, "num_warps": 16},
        ],
        "attend fp32": [{"up_to": None, "heads": 16, "tile": 16, "num_warps": 8}],
        "attend bf16": [
            {"up_to": 16, "heads": 16, "tile": 32, "num_warps": 8},
            {"up_to": 32, "heads": 32, "tile": 32, "num_warps": 8},
            {"up_to": None, "heads": 64, "tile": 64, "num_warps": 8},
        ],
        "attend hopper": [
            {
                "up_to": 8,
                "heads": 8,
                "stages": 3,
                "decoding_registers": 128,
                "multiplying_registers": 128,
                "start_cost": 92,
                "tile_cost": 42,
            },
            {
                "up_to": 16,
                "heads": 16,
                "stages": 3,
                "decoding_registers": 128,
                "multiplying_registers": 128,
                "start_cost": 139,
                "tile_cost": 35,
            },
            {
                "up_to": None,
                "heads": 64,
                "stages": 2,
                "decoding_registers": 64,
                "multiplying_registers": 192,
            },
        ],
        "attend hopper chunk": [
            {
                "up_to": None,
                "heads": 64,
                "stages": 2,
                "decoding_registers": 56,
                "multiplying_registers": 200,
            },
        ],
        "attend hopper dense": [
            {"up_to": None, "copying_registers": 104, "multiplying_registers": 200},
        ],
        "combine": [
            {"up_to": 8, "splits": 8, "num_warps": 4},
            {"up_to": 16, "splits": 16, "num_warps": 4},
            {"up_to": None, "splits": 32, "num_warps": 4, "channels": 128},
        ],
    },
    "sm_100": {
        "score mxfp4": [
            {
                "up_to": None,
                "tile": 64,
                "num_warps": 4,
                "stages": 2,
                "programs_per_sm": 5,
                "maxnreg": 104,
            },
        ],
        "score mxfp4 chunk": [
            {
                "up_to": None,
                "tile": 64,
                "num_warps": 4,
                "stages": 2,
                "programs_per_sm": 3,
                "tokens": 4,
                "maxnreg": 200,
            },
        ],
        "attend bf16": [
            {"up_to": 16, "heads": 16, "tile": 32, "num_warps": 8},
            {"up_to": None, "heads": 32, "tile": 32, "num_warps": 8},
        ],
    },
}
