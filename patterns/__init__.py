"""What is found, one topic a folder and one idea a file; the `__init__.py` of a folder is a map of it.

norm_rope/    norm + rotation of queries and keys
attention/    a call of SDPA, or attention written out (written_out/)
masks/        what a mask is: arguments of the operator, as far as it can be proved
formulas/     an index or mask tensor as one formula of its position
block.py      whole blocks: norm + rotation and the attention it feeds become one site

for all       base.py (the contract), refused.py, literals.py, consumers.py (which attention a tensor goes to)

Each folder may import the files beside this one. Beyond them attention imports masks and formulas, masks imports
formulas, and nothing imports attention or norm_rope; the files beside this one import no folder.

`docs/reading.md` and `docs/masks.md` explain the two ways of reading: on one token, and as formulas of a position.
"""
