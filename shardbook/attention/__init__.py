"""Flash attention, the KV cache, and `attend`, which takes the kernel of the device at hand."""

from .kernels import attend, kernel_for

__all__ = ["attend", "kernel_for"]
