"""One forward, one backward: PipeDream's schedule with a flush, run on a chain of linear layers and drawn.

    rank 0 | F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    rank 1 | .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
    rank 2 | .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .

Each rank (a row) holds one stage. Rank r of P starts with P-1-r forwards to fill the pipe (warm-up), then
alternates one forward with one backward (steady), and ends with the backwards that are left (cool-down).

The bubble is that of afab.py: (P-1) / (m+P-1). But a rank begins its backwards as early as it can, so rank r
holds what it needs for P-r of them at most, however many microbatches there are.

    torchrun --nproc-per-node 4 examples/one_f_one_b.py --microbatches 8
    python examples/one_f_one_b.py --ranks 4 --microbatches 8 --pseudo-computation-time 0.05 --out timelines
"""

from chain import read_options, run

if __name__ == "__main__":
    run("1f1b", read_options("One forward, one backward, on a chain of stages that take a known time."))
