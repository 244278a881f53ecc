"""Other projects' kernels, timed beside ours by `dsv4 bench --compare`; no backend runs these."""
