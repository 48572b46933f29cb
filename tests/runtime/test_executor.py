"""The executor follows the schedule: what it ran, what it held, what it left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, ConfigError, ModelError, ShapeError
from penstock.models.stage import StageInfo
from penstock.schedule import Placement, build
from penstock.schedule.choose import ScheduleLike
from support.programs import written
from support.refusals import refuses


class Chunk(nn.Module):
    """One linear layer; the first stage reads `x`."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        torch.manual_seed(info.stage)
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.linear(x))
        return result


def squares(output: Tensor, microbatch: Microbatch) -> Tensor:
    difference: Tensor = output - microbatch["y"]
    return difference.square().sum() / output.shape[0]


def weight(module: nn.Module) -> nn.Parameter:
    return module.get_parameter("linear.weight")


def batch(rows: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x.flip(0)}


def whole(stages: int) -> nn.Sequential:
    return nn.Sequential(*(Chunk(StageInfo(stage, stages)) for stage in range(stages)))


def test_every_op_takes_time() -> None:
    """test_every_schedule.py has the order, the gradients and the live activations."""
    pipe = Pipeline.from_provider(Chunk, schedule="1f1b", ranks=3, microbatches=2, loss_fn=squares)
    pipe.step(batch())
    assert len(pipe.timeline.spans) == 2 * 3 * 2
    assert all(span.end > span.start for span in pipe.timeline.spans)


def test_several_stages_on_a_rank_in_any_order() -> None:
    """A schedule of one's own on a V placement: rank 0 hosts the first stage and the last."""
    programs = "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"
    schedule = written(Placement((0, 1, 1, 0)), 2, *programs)
    pipe = Pipeline.from_provider(Chunk, schedule=schedule, loss_fn=squares)
    assert pipe.evaluate(batch()).loss == pytest.approx(pipe.step(batch()).loss, rel=1e-12)
    reference = whole(4)
    squares(reference(batch()["x"]), batch()).backward()  # type: ignore[no-untyped-call]
    for stage, module in pipe.modules.items():
        torch.testing.assert_close(weight(module).grad, weight(reference[stage]).grad)


# _training: what a step leaves behind is seen there alone
@pytest.mark.parametrize(
    ("schedule", "ranks"),
    # on one rank of two stages, results for the second stage wait in the inbox when the sixth forward fails
    [("1f1b", 2), ("zb_v", 2), ({"schedule": "looped_bfs", "stages_per_rank": 2}, 1)],
    ids=str,
)
def test_a_failed_step_leaves_nothing_behind(schedule: ScheduleLike, ranks: int) -> None:
    class Moody(Chunk):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if x.device.type != "meta":
                Moody.calls += 1
                if Moody.calls == 6:
                    raise RuntimeError("out of temper")
            return super().forward(x)

    pipe = Pipeline.from_provider(Moody, schedule=schedule, ranks=ranks, microbatches=4, loss_fn=squares)
    with pytest.raises(RuntimeError, match="out of temper") as error:
        pipe.step(batch())
    assert pipe._training is not None
    assert [executor.left_over for executor in pipe._training.executors] == [0] * ranks
    assert any("penstock: on rank" in note for note in error.value.__notes__)
    # 0.2.0: an error before the next step's first op was noted to be in the op of the one that had failed,
    # which no executor forgot
    with pytest.raises(BatchError) as refused:
        pipe.step(batch(1))
    assert not hasattr(refused.value, "__notes__")
    pipe.zero_grad()
    pipe.step(batch())
    reference = whole(len(pipe.modules))
    squares(reference(batch()["x"]), batch()).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(weight(pipe.modules[1]).grad, weight(reference[1]).grad)


@pytest.mark.parametrize(
    ("change", "gave"),
    [(lambda out: out[:, :2], "float64[4, 2]"), (lambda out: out.float(), "float32[4, 3]")],
    ids=["shape", "dtype"],
)
def test_an_output_that_the_next_rank_does_not_expect_is_not_sent(
    change: Callable[[Tensor], Tensor], gave: str
) -> None:
    class Changing(Chunk):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x.double())
            return out if x.device.type == "meta" else change(out)

    pipe = Pipeline.from_provider(Changing, schedule="1f1b", ranks=2, microbatches=2, loss_fn=squares)
    with refuses(ShapeError, f"0F0 gave {gave}", "expects float64[4, 3]"):
        pipe.step(batch())


def test_refusals_before_the_first_step() -> None:
    with refuses(ConfigError, "schedule='1f1b' without microbatches"):
        Pipeline.from_provider(Chunk, schedule="1f1b", ranks=2, loss_fn=squares)
    schedule = build("1f1b", ranks=2, microbatches=2)
    with refuses(ConfigError, "ranks=3", "given has 2"):
        Pipeline.from_provider(Chunk, schedule=schedule, ranks=3, loss_fn=squares)
    pipe = Pipeline.from_provider(
        Chunk, schedule=build("inference", ranks=2, microbatches=2), loss_fn=squares
    )
    with refuses(ConfigError, "step() with schedule 'inference'", "backward"):
        pipe.step(batch())
    with refuses(ConfigError, "timeline before the first step"):
        _ = pipe.timeline
    with refuses(ModelError, "made by from_provider"):
        pipe.save_pretrained("/nowhere")


def test_a_batch_with_fewer_rows_than_microbatches() -> None:
    pipe = Pipeline.from_provider(Chunk, schedule="1f1b", ranks=2, microbatches=4, loss_fn=squares)
    with refuses(BatchError, "a batch of 3 rows", "4 microbatches"):
        pipe.step(batch(3))
    assert pipe.evaluate(batch(3)).tokens == 3  # evaluation takes what there is
