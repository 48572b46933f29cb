"""What penstock does on a GPU, in four parts: ``python -m benchmarks.gpu``.

    A  exactness.py   gradients of one process, under each precision, attention and variant of a layer
    B  processes.py   several processes on one GPU, and what is raised where one of them dies or stops
    C  cost.py        time, memory and synchronisations of a step, next to a plain loop
    D  large.py       a model of 8 B parameters: load, train, save, resume

`part.py` has the bars, the limits and the files, `models.py` the models and the plain loop, and `profiles.py`
reads what torch.profiler has seen. The parts run on a CPU too, with small sizes. There only what does not
depend on the machine is judged: gradients, what is resumed, errors.
"""
