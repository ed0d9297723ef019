"""Reference implementations of parallel training, one strategy a file."""
