"""From files to batches: records (sources.py), stored tokens, rows, and the rows of each step.

train/encoding makes the tokens.
"""
