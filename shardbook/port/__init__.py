"""Find what a CUDA-only project does that an NPU does not."""

from .report import Report, report

__all__ = ["Report", "report"]
