"""What is found, one idea a file. Where each topic begins, and the files that are read from there:

norm + rotation: norm_rope.py, readings of single tensors become sites
    rotation_places.py, reading.py               where a rotation may be; one rotated tensor
    rotary.py, norms.py, norm_search.py          what it is, proved on random numbers
    tables.py, rotary_tables.py, mrope.py        which nodes hold cos, sin and the weight
    axes.py, pairing.py, qkv.py                  which axis is which; q and k of one call; packed projections
    consumers.py, unrotated.py                   which attention it goes to; norms outside of all calls

attention: attention.py, an attention becomes a site
    sdpa.py, softmax_attention.py                a call of SDPA; written out, in parts (softmax_*.py)
    heads.py, attention_result.py                q, k, v as far upstream, and the result as far downstream, as is exact
    attention_facts.py, attention_repeats.py     what is said of one attention; equal layers

masks: mask.py, a mask becomes arguments, in steps (mask_*.py)
    masked_scores.py, ranges.py                  which mask meets which scores; how large a bias can be
    index_reading.py                             a mask as a formula of its position (index_*.py)

whole blocks: block.py, norm + rotation and the attention it feeds become one site

for all: base.py (the contract), facts.py, literals.py

`docs/reading.md` and `docs/masks.md` explain the two ways of reading: on one token, and as formulas of a position.
"""
