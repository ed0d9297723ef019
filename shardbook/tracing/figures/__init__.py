"""Figures of papers as text, and what finds their boxes in a model.

read.py parses the text, library.py holds a few figures, parts.py notes what each module of a model
is made of, kinds.py says how well a module is of a kind, fit.py places the boxes, draw.py draws
them, and `match.py` puts the drawing over the trace of the run.
"""
