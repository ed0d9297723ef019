"""The small models that the book trains."""
