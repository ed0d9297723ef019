"""Flash attention, the KV cache, and one entry point that picks an implementation."""
