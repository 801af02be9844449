"""Compiled kernels: they read plain arrays and fill others. No objects, no I/O, no messages."""
