"""One palette, plots and drawings."""
