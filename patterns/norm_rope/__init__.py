"""Norm + rotation of queries and keys, read on one token (docs/reading.md).

pattern.py                                where it begins: readings of single tensors become sites
rotation_places.py, reading.py            where a rotation may be; one rotated tensor
rotary.py, norms.py, norm_search.py       what it is, proved on random numbers
tables.py, rotary_tables.py, mrope.py     which nodes hold cos, sin and the weight
axes.py, pairing.py, packed.py            which axis is which; q and k of one call; packed projections
unrotated.py                              norms outside of all calls
facts.py                                  what is said of one rotation and of one norm
"""
