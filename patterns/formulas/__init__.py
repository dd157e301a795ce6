"""Formulas of a position: what an index or mask tensor is, for every position and length at once (docs/masks.md).

reading.py                              where it begins: the formula of a node
operations.py, movement.py, runs.py     what an operation does to formulas
terms.py, box.py                        what a formula is; what it says of a whole box of positions
"""
