"""All forward, all backward: GPipe's schedule, run on a chain of linear layers and drawn.

    rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    rank 1 | .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
    rank 2 | .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .

Each rank (a row) holds one stage. The batch is cut into m microbatches. A rank runs all their forwards,
each as soon as the rank before has passed its result on, and then all their backwards, the other way.

A rank holds what it needs for m backwards at once. It waits (the dots) while the pipe fills and drains:
(P-1) / (m+P-1) of the time on P ranks, the bubble. More microbatches make it smaller, and take more memory.

    torchrun --nproc-per-node 4 examples/afab.py --microbatches 8
    python examples/afab.py --ranks 4 --microbatches 8 --pseudo-computation-time 0.05 --out timelines
"""

from chain import read_options, run

if __name__ == "__main__":
    run("gpipe", read_options("All forward, all backward, on a chain of stages that take a known time."))
