"""Record, merge and show traces."""
