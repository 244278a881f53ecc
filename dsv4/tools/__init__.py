"""The `dsv4` command and its parts: benches, planner, inspector, demo."""
