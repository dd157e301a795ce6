"""What a mask says, from its formula (docs/masks.md).

proof.py                        where it begins: a mask becomes arguments
masked_scores.py                which mask meets which scores
reading.py, parts.py            a mask as a formula; a bias and a mask in one tensor
bounds.py, documents.py         what is proved: causality and windows; packed documents
finite_numbers.py, ranges.py    keys hidden by finite numbers; how large a bias can be
operand.py                      what stays a mask
"""
