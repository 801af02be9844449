"""Rows that several ranks share: which slice of a row is whose, and exact attention over all of it."""

from packer.runtime.sequence_parallel.ulysses import UlyssesAttention

__all__ = ["UlyssesAttention"]
