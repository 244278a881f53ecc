"""The `dsv4` command and what it runs: benches, planner, inspector, demo."""
