"""Attention, whose mask `masks/` reads.

pattern.py               where it begins: an attention becomes a site
sdpa.py, written_out/    what is read: a call of SDPA; products and a softmax
heads.py, result.py      q, k, v as far upstream, and the result as far downstream, as is exact
leading.py               batch and heads, as views join and split them
facts.py, repeats.py     what is said of one attention; equal layers

`pattern.py` alone imports `written_out/`.
"""
