"""The name by which programs import Ulysses attention; it lives in ``sequence_parallel``."""

from packer.runtime.sequence_parallel import UlyssesAttention

__all__ = ["UlyssesAttention"]
