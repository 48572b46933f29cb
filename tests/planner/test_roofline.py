"""Seconds of ops: the longer of computing and moving, a launch each; never less for more work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.planner.roofline import op_seconds, seconds
from penstock.planner.work import OpKind, OpWork
from support.clusters import round_cluster
from support.refusals import refuses

SETTINGS = settings(max_examples=50, deadline=None, derandomize=True)

DEVICE = round_cluster().device
KINDS = st.sampled_from(("matmul", "attention", "other"))
AMOUNTS = st.floats(0, 1e18)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        # 99 GFLOP and the ramp's 1, at half of 100 TFLOP/s
        (OpWork("matmul", "bfloat16", 99e9, 0), 2e-3 + 10e-6),
        (OpWork("matmul", "float32", 99e9, 0), 20e-3 + 10e-6),
        # attention at a quarter
        (OpWork("attention", "bfloat16", 99e9, 0), 4e-3 + 10e-6),
        # 800 MB at 80 % of 1 TB/s: longer than the product of 9 GFLOP
        (OpWork("matmul", "bfloat16", 9e9, 800e6), 1e-3 + 10e-6),
        (OpWork("other", "bfloat16", 0, 800e6), 1e-3 + 10e-6),
        (OpWork("other", "int64", 0, 800e6), 1e-3 + 10e-6),
        # flops outside of products run at the rate of float32
        (OpWork("other", "int64", 10e9, 0), 1e-3 + 10e-6),
        (OpWork("other", "bool", 0, 0), 10e-6),
    ],
)
def test_an_op_takes_what_one_reckons_by_hand(work: OpWork, expected: float) -> None:
    assert op_seconds(work, DEVICE) == pytest.approx(expected, rel=1e-12)


def test_a_product_of_half_reaches_half_of_its_share() -> None:
    half = DEVICE.efficiencies.half
    work = OpWork("matmul", "bfloat16", half, 0)
    assert half / (op_seconds(work, DEVICE) - DEVICE.launch) == pytest.approx(100e12 * 0.5 / 2)


@pytest.mark.parametrize("nbytes", [400e6, 1600e6])
def test_what_is_exposed_of_the_shorter_comes_on_top_of_the_longer(nbytes: float) -> None:
    """A product of 9 GFLOP takes 0.2 ms; its bytes take 0.5 or 2 ms."""
    shares = DEVICE.efficiencies.model_copy(update={"exposed": 0.25})
    work = OpWork("matmul", "bfloat16", 9e9, nbytes)
    took = op_seconds(work, DEVICE.model_copy(update={"efficiencies": shares}))
    assert took == pytest.approx(nbytes / 800e9 + 0.25 * 0.2e-3 + 10e-6, rel=1e-12)


def test_works_run_one_after_the_other() -> None:
    works = [OpWork("matmul", "bfloat16", 99e9, 0, calls=3), OpWork("other", "float32", 0, 800e6, calls=2.5)]
    assert seconds(works, DEVICE) == pytest.approx(3 * 2.01e-3 + 2.5 * 1.01e-3)
    assert seconds((), DEVICE) == 0


def test_a_dtype_without_a_peak_is_an_error() -> None:
    with refuses(ConfigError, "device round", "peak for float16", "Give device.peaks.float16"):
        seconds([OpWork("matmul", "float16", 1, 1)], DEVICE)


@SETTINGS
@given(kind=KINDS, flops=AMOUNTS, nbytes=AMOUNTS, more_flops=AMOUNTS, more_bytes=AMOUNTS)
def test_more_work_is_never_faster(
    kind: OpKind, flops: float, nbytes: float, more_flops: float, more_bytes: float
) -> None:
    less = op_seconds(OpWork(kind, "bfloat16", flops, nbytes), DEVICE)
    assert less <= op_seconds(OpWork(kind, "bfloat16", flops + more_flops, nbytes + more_bytes), DEVICE)
    assert less >= DEVICE.launch


@SETTINGS
@given(kind=KINDS, flops=AMOUNTS, nbytes=AMOUNTS, factor=st.floats(1, 10))
def test_a_faster_device_is_never_slower(kind: OpKind, flops: float, nbytes: float, factor: float) -> None:
    work = OpWork(kind, "bfloat16", flops, nbytes)
    peaks = {name: peak * factor for name, peak in DEVICE.peaks.items()}
    for changes in (
        {"peaks": peaks},
        {"bandwidth": DEVICE.bandwidth * factor},
        {"launch": DEVICE.launch / factor},
    ):
        assert op_seconds(work, DEVICE.model_copy(update=changes)) <= op_seconds(work, DEVICE)
