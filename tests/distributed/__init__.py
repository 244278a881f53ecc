"""Tests of `dsv4.distributed`."""
