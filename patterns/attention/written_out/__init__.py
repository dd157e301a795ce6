"""Attention as products and a softmax.

reading.py               where it begins: all of it, around one softmax
softmax.py, scores.py    the softmax, and what is done to the scores before it
products.py, sinks.py    queries by keys and weights by values; a score without a key
nodes.py                 what all of these ask of single nodes
"""
