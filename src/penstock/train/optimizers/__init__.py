"""The trainer's optimizers: which one trains each parameter, at what rate, in how many bits.

optimizer.py   one entry for each optimizer of a config, and the groups of parameters
rates.py       the learning rate of a step
low_bit.py     states in few bits, and stochastic rounding, by torchao
"""
