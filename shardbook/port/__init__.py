"""Find what a CUDA-only project does that an NPU does not."""
