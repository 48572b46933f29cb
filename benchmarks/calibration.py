"""Does a calibrated device predict ops that calibration never ran? ``python -m benchmarks.calibration 20``

Prints predicted and measured seconds of products as a model's layers have them, of attention and of an op
that only moves. The bar is 25 % for the median of the products. Ops are measured right after the calibration
of so many seconds, by the same median.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from penstock.planner.calibrate import calibrate, clock_of
from penstock.planner.hardware import Cluster, to_yaml
from penstock.planner.roofline import op_seconds
from penstock.planner.work import OpWork

PRODUCTS = ((512, 768, 3072), (1024, 1024, 4096), (2048, 512, 512), (256, 2048, 2048), (384, 1536, 1536))
BAR = 0.25


def timed(run: Callable[[], object], repeats: int = 15) -> float:
    run()
    clock, taken = clock_of(torch.device("cpu")), []
    for _ in range(repeats):
        begin = clock()
        run()
        taken.append(clock() - begin)
    return median(taken)


def cases() -> list[tuple[str, OpWork, Callable[[], object]]]:
    """What is compared: its name, its work, and the op itself."""
    listed: list[tuple[str, OpWork, Callable[[], object]]] = []
    for rows, inner, columns in PRODUCTS:
        a, b, out = torch.randn(rows, inner), torch.randn(inner, columns), torch.empty(rows, columns)
        nbytes = a.nbytes + b.nbytes + out.nbytes
        work = OpWork("matmul", "float32", 2.0 * rows * inner * columns, nbytes)
        listed.append((f"{rows} x {inner} x {columns}", work, partial(torch.mm, a, b, out=out)))
    query = torch.randn(2, 8, 256, 64)
    work = OpWork("attention", "float32", 4.0 * 16 * 256 * 256 * 64, 4 * query.nbytes)
    listed.append(("attention, forward", work, lambda: F.scaled_dot_product_attention(query, query, query)))
    x, y = torch.randn(4096, 1024), torch.empty(4096, 1024)
    listed.append(("addition", OpWork("other", "float32", 0, 3 * x.nbytes), lambda: torch.add(x, x, out=y)))
    return listed


def compare(cluster: Cluster) -> bool:
    """Print a line for each case. Whether the median product is predicted within the bar."""
    errors = []
    for name, work, run in cases():
        predicted, measured = op_seconds(work, cluster.device), timed(run)
        error = predicted / measured - 1
        errors += [abs(error)] if work.kind == "matmul" else []
        print(
            f"{name:24} predicted {predicted * 1e3:8.3f} ms, measured {measured * 1e3:8.3f} ms, {error:+7.1%}"
        )
    print(f"products: median error {median(errors):.1%}, worst {max(errors):.1%}, bar {BAR:.0%}")
    return median(errors) <= BAR


if __name__ == "__main__":
    torch.set_num_threads(1)
    calibrated = calibrate(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0, "cpu")
    print(to_yaml(calibrated))
    sys.exit(not compare(calibrated))
