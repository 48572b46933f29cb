"""Axes, meshes, models and batches that do not fit: one typed error on every rank, and none that waits."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock import AutoPipeline, Axes, Padding, Sharded
from penstock.errors import ConfigError, InputError, ModelError, WorldSizeError
from support import jobs_axes as jobs
from support.families import tiny_model
from support.jobs_mesh import batch
from support.pool import Pool
from support.reference import plain_step

# ---- sizes


def changed(axes: Axes, ranks: int, world: int, remedy: str) -> tuple[Axes, int, int]:
    """Axes, ranks and world after one of the remedies that an error names."""
    sizes = dict(axes.sizes)
    if remedy.endswith(" with ep=1"):
        sizes["ep"], remedy = 1, remedy.removesuffix(" with ep=1")
    number = int(re.findall(r"\d+", remedy)[-1])
    if remedy.startswith("start "):
        world = number
    elif remedy.startswith("set the pipeline's ranks to"):
        ranks = number
    else:
        (name,) = re.fullmatch(r"set (\w+) to \d+", remedy).groups()  # type: ignore[union-attr]
        sizes[name] = number
    return Axes(**sizes), ranks, world


def remedies(error: InputError) -> list[str]:
    if "ep to" in error.remedy and isinstance(error, ConfigError):
        return [f"set ep to {number}" for number in re.findall(r"\d+", error.remedy)]
    return re.split(r" or (?=set)", error.remedy[0].lower() + error.remedy[1:])


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12])
def test_every_remedy_for_sizes_works(world: int) -> None:
    open_ended = 0
    for ranks, replicate, shard, cp, ep, tp in product(
        (1, 2, 3), (-1, 1, 2), (-1, 1, 2, 3), (-1, 1, 2), (-1, 1, 2, 3), (-1, 1, 2)
    ):
        given = (replicate, shard, cp, ep, tp)
        if given.count(-1) > 1:
            continue
        axes, full = Axes(*given), None
        offered: list[str] = []
        try:
            full = axes.resolve(ranks, world)
        except (WorldSizeError, ConfigError) as error:
            offered = remedies(error)
        if full is None:
            assert offered
            for remedy in offered:
                other, other_ranks, other_world = changed(axes, ranks, world, remedy)
                other.resolve(other_ranks, other_world)
            continue
        open_ended += -1 in given
        assert ranks * full.ranks_per_stage == world
        assert full.dp_shard * full.cp % full.ep == 0
        assert all(size in (-1, full.sizes[name]) for name, size in axes.sizes.items())
        assert full.resolved
    assert open_ended


@pytest.mark.parametrize(
    ("axes", "ranks", "world", "message"),
    [
        (Axes(dp_shard=2), 2, 6, "6 processes for pp=2 x dp_shard=2: .* Start 4 processes or set the "
                                 "pipeline's ranks to 3 or set dp_shard to 3$"),
        (Axes(dp_shard=-1, ep=4), 2, 5, "5 processes for pp=2 x dp_shard=-1: .* Start 8 processes$"),
        (Axes(dp_shard=3, ep=2), 2, 4, "Set dp_shard to 2$"),
        (Axes(dp_shard=2, cp=2, ep=3), 1, 4, "ep=3 with dp_shard=2 and cp=2: .* Set ep to 1, 2 or 4$"),
        (Axes(ep=2), 1, 1, "Set ep to 1$"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_multiply(axes: Axes, ranks: int, world: int, message: str) -> None:
    with pytest.raises((WorldSizeError, ConfigError), match=message):
        axes.resolve(ranks, world)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp_shard": -1, "tp": -1}, "dp_shard and tp of -1: one axis at most .* Give all but one a size"),
        ({"cp": 0}, "cp=0: an axis has one rank at least"),
        ({"tp": 2.0}, "tp=2.0: an axis has a whole number of ranks"),
        ({"ep": True}, "ep=True: an axis has a whole number of ranks"),
        ({"dp_shard": "2"}, "dp_shard='2': an axis has a whole number of ranks"),
    ],
)
def test_sizes_that_are_none(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Axes(**sizes)


# ---- models, before anything is read or joined

SIX_HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}
SIX_EXPERTS = {"num_local_experts": 6}
ROUTERS = {"output_router_logits": True}
MODELS: list[tuple[str, dict[str, Any], Axes, type[InputError], str]] = [
    ("llama", SIX_HEADS, Axes(cp=4), ConfigError, "cp=4 by ulysses: .* 6 attention heads. Let cp divide 6"),
    ("llama", {}, Axes(cp=4, tp=2), ConfigError, "cp=4 by ulysses: .* 2 attention heads"),
    ("llama", SIX_HEADS, Axes(tp=4), ConfigError, "tp=4 .*6 num_attention_heads.* a tp of 1 or 2 or 3 or 6$"),
    ("mixtral", SIX_EXPERTS, Axes(dp_shard=4, ep=4), ConfigError, "ep=4 with the 6 experts .* 1, 2, 3, 6"),
    ("llama", {}, Axes(dp_shard=2, ep=2), ConfigError, "ep=2 for LlamaForCausalLM: it has no experts"),
    ("mamba", {}, Axes(cp=2), ModelError, "cp=2 for MambaForCausalLM: its state runs over the sequence"),
    ("gpt2", {}, Axes(tp=2), ModelError, "GPT2LMHeadModel"),
    ("llama", ROUTERS, Axes(cp=2), ConfigError, "output_router_logits=True with cp"),
]


@pytest.mark.parametrize(("family", "sizes", "axes", "kind", "message"), MODELS)
def test_a_model_that_an_axis_does_not_fit(
    family: str, sizes: dict[str, Any], axes: Axes, kind: type[InputError], message: str
) -> None:
    made = AutoPipeline(ranks=1, schedule="1f1b", microbatches=2, axes=axes)
    with pytest.raises(kind, match=message):
        made.build_plan(jobs.model_of(family, **sizes))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gemma4_text", "Gemma4ForCausalLM with sequence_parallel: its layers take values of all tokens"),
        ("deepseek_v4", r"DeepseekV4ForCausalLM with .*: its hidden states are not \(rows, tokens, width\)"),
    ],
)
def test_layers_that_cannot_have_a_part_of_the_tokens(family: str, message: str) -> None:
    """0.5.0: their first forward failed in a sum of tensors of two lengths."""
    options: dict[str, Any] = {"axes": Axes(tp=2), "sequence_parallel": True}
    with pytest.raises(ModelError, match=message):
        AutoPipeline(ranks=1, microbatches=2, **options).build_plan(jobs.model_of(family))


DROPS: list[tuple[str, dict[str, Any], Axes, dict[str, Any], str]] = [
    ("qwen3", {"attention_dropout": 0.1}, Axes(tp=2), {}, "attention_dropout=0.1 of .*attn with tp: each"),
    ("qwen3", {"attention_dropout": 0.1}, Axes(cp=2), {}, "attention_dropout=0.1 with cp"),
    (
        "gpt_neox",
        {"hidden_dropout": 0.1},
        Axes(cp=2),
        {},
        "p=0.1 of .*dropout with cp: each rank holds a part",
    ),
    ("gpt_neox", {"hidden_dropout": 0.1}, Axes(tp=2), {"sequence_parallel": True}, "with sequence_parallel"),
]


@pytest.mark.parametrize(("family", "sizes", "axes", "options", "message"), DROPS)
def test_dropout_that_would_hang_on_the_mesh(
    family: str, sizes: dict[str, Any], axes: Axes, options: dict[str, Any], message: str
) -> None:
    common: dict[str, Any] = {"ranks": 1, "microbatches": 2, "axes": axes, **options}
    with pytest.raises(ConfigError, match=message):
        AutoPipeline(schedule="1f1b", **common).build_plan(jobs.model_of(family, **sizes))
    plain = jobs.model_of(family, **dict.fromkeys(sizes, 0.0))
    AutoPipeline(schedule="1f1b", **common).build_plan(plain)


def test_without_backwards_nothing_is_dropped() -> None:
    made = AutoPipeline(ranks=1, schedule="inference", microbatches=2, axes=Axes(tp=2))
    made.build_plan(jobs.model_of("qwen3", attention_dropout=0.1))


def test_heads_by_the_ring_need_not_divide() -> None:
    made = AutoPipeline(ranks=1, schedule="1f1b", microbatches=2, axes=Axes(cp=4, tp=2), context="ring")
    made.build_plan(jobs.model_of("llama"))


@pytest.mark.parametrize("options", [{}, {"transport": "local"}])
def test_axes_in_one_process(options: dict[str, Any]) -> None:
    for axes in (Axes(dp_shard=2), Axes(cp=2, tp=-1)):
        with pytest.raises(
            WorldSizeError, match=r"in one process: .* Start 4 processes with torchrun, or set"
        ):
            jobs.made("llama", 2, axes, options)
    with pytest.raises(ConfigError, match=r"Set ep to 1$"):
        jobs.made("mixtral", 2, Axes(ep=2), options)
    for axes in (Axes(), Axes(dp_shard=-1), Axes(ep=-1)):
        jobs.made("llama", 2, axes, options).step(batch())


# ---- on a mesh

BUILDS: list[tuple[str, int, Axes, dict[str, Any], str]] = [
    ("llama", 2, Axes(dp_shard=3), {}, "WorldSizeError: 4 processes for pp=2 x dp_shard=3: .* to 2"),
    ("llama", 3, Axes(dp_shard=-1), {"model": {"layers": 3}},
     "WorldSizeError: 4 processes for pp=3 x dp_shard=-1: .* Start 3 processes"),
    ("mixtral", 2, Axes(dp_shard=2, ep=3), {"model": SIX_EXPERTS},
     "ConfigError: ep=3 with dp_shard=2 and cp=1"),
    ("llama", 1, Axes(tp=-1), {}, "ConfigError: tp=4 .*2 num_key_value_heads"),
    ("llama", 1, Axes(cp=-1), {"model": SIX_HEADS}, "ConfigError: cp=4 by ulysses"),
    ("mixtral", 1, Axes(dp_shard=4, ep=-1), {"model": SIX_EXPERTS}, "ConfigError: ep=4 with the 6 experts"),
    ("llama", 1, Axes(dp_shard=4, ep=-1), {}, "ConfigError: ep=4 for LlamaForCausalLM"),
    ("mamba", 1, Axes(cp=-1), {}, "ModelError: cp=4 for MambaForCausalLM"),
    ("gpt2", 1, Axes(tp=-1), {}, "ModelError: .*GPT2LMHeadModel"),
    ("llama", 1, Axes(cp=-1), {"model": ROUTERS}, "ConfigError: output_router_logits=True with cp"),
    ("llama", 2, Axes(tp=2), {"transport": "local"}, "WorldSizeError: the axes tp=2 in one process"),
]  # fmt: skip


def alike(found: list[Any]) -> Any:
    """What all ranks tell, which is the same."""
    assert all(told == found[0] for told in found), found
    return found[0]


def test_builds_are_refused_on_every_rank_alike(pool: Pool) -> None:
    """Sizes of -1 too, which are known once the processes are."""
    found = alike(pool.run(4, jobs.refused_builds, [case[:4] for case in BUILDS]))
    for words, (*_, message) in zip(found, BUILDS, strict=True):
        assert re.match(message, words), words


def test_what_is_left_may_be_one(pool: Pool) -> None:
    cases: list[jobs.Built] = [
        ("llama", 2, Axes(dp_shard=2, cp=-1), {}),
        ("llama", 2, Axes(ep=-1, tp=2), {}),
        ("mixtral", 2, Axes(dp_shard=2, ep=-1), {}),
    ]
    losses = alike(pool.run(4, jobs.built, cases))
    expected = [plain_step(jobs.model_of(family), batch())[0] for family, *_ in cases]
    assert losses == pytest.approx(expected, rel=1e-10)


MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
MESHES: list[tuple[tuple[int, ...], tuple[str, ...], int, Axes, str]] = [
    ((2, 2), ("pp", "dp_shard"), 2, Axes(dp_shard=2), "ConfigError: axes beside a mesh with the axes pp, dp"),
    ((2, 1, 1, 2, 1), MESH, 2, Axes(dp_shard=2),
     "WorldSizeError: dp_shard=2, cp=1 beside a mesh .* Set dp_shard to 1 and cp to 2, or leave mesh out"),
    ((2, 1, 2, 1, 1), MESH, 1, Axes(),
     "WorldSizeError: pp=1, dp_shard=1 beside .* Set ranks to 2 and dp_shard to 2"),
    ((1, 1, 2, 2, 1), ("dp_replicate", "tp", "pp", "dp_shard", "cp"), 2, Axes(dp_shard=2),
     "ConfigError: axes beside a mesh .* in this order"),
]  # fmt: skip


def test_a_mesh_that_is_not_that_of_the_axes(pool: Pool) -> None:
    found = alike(pool.run(4, jobs.refused_meshes, [case[:4] for case in MESHES]))
    for words, (*_, message) in zip(found, MESHES, strict=True):
        assert re.match(message, words), words


@pytest.mark.parametrize("axes", [Axes(tp=2), Axes(cp=-1), Axes(dp_shard=2, ep=2)])
def test_modules_of_ones_own_take_no_axes_of_a_model(axes: Axes) -> None:
    assert re.match("ConfigError: .* with from_provider: .* Take dp_shard", jobs.refused_provider(axes))


BATCHES: list[tuple[str, int, Axes, dict[str, Any], dict[str, str]]] = [
    ("llama", 2, Axes(dp_shard=2), {}, {
        "few rows": "BatchError: a batch of 1 rows, given to process 1, 3: .* Give 2 rows or more",
        "list": "BatchError: a list of 1 microbatches, given to process 0, 2: ",
        "other data": r"BatchError: process 1: .*; process 3: .* pipe.batch_part names",
    }),
    ("llama", 1, Axes(dp_shard=2, cp=2), {}, {
        "short": "BatchError: a microbatch of 3 tokens a row, given to process 0, 1: over cp=2 .* 4 tokens",
        "few rows": "BatchError: a batch of 1 rows, given to process 2, 3: ",
        "other data": "BatchError: process 2: .*; process 3: .* pipe.batch_part names",
    }),
    ("llama", 2, Axes(tp=2), {"shapes": "padded"}, {
        "other data": "BatchError: process 0: .*; process 1: .*; process 2: .*; process 3: ",
    }),
]  # fmt: skip


@pytest.mark.parametrize(("family", "ranks", "axes", "options", "wrongs"), BATCHES)
def test_batches_are_refused_on_every_rank_alike(
    pool: Pool, family: str, ranks: int, axes: Axes, options: dict[str, Any], wrongs: dict[str, str]
) -> None:
    """And the next one is taken."""
    found = alike(pool.run(4, jobs.refused_batches, family, ranks, axes, list(wrongs), options))
    expected = plain_step(jobs.model_of(family), batch())[0]
    for wrong, message in wrongs.items():
        words, *more = found[wrong]
        assert re.match(message, words), words
        if wrong == "few rows":
            assert more[0] == pytest.approx(expected, rel=1e-10)
        else:
            assert more[0].startswith("BatchError"), more
            assert more[1] == pytest.approx(expected, rel=1e-10)


# ---- what comes out under cp


@pytest.mark.parametrize(
    ("ranks", "axes", "options"),
    [(2, Axes(cp=2), {"context": "ulysses"}), (1, Axes(dp_shard=2, cp=2), {"context": "ring"})],
)
def test_outputs_are_of_whole_sequences(pool: Pool, ranks: int, axes: Axes, options: dict[str, Any]) -> None:
    """Of the rows of the own part of the batch."""
    for differences in pool.run(4, jobs.outputs, ranks, axes, options, 13):
        assert len(differences) >= 2
        assert max(differences) < 1e-10, differences


@pytest.mark.parametrize(
    ("ranks", "axes", "shapes"),
    [
        (2, Axes(cp=2), "padded"),
        (1, Axes(dp_shard=2, cp=2), Padding(multiple=3, context_shards=2)),
        (2, Axes(dp_shard=2), "padded"),
    ],
)
def test_lengths_that_differ(pool: Pool, ranks: int, axes: Axes, shapes: Any) -> None:
    """Between microbatches, and between parts of the batch, each of which is padded by itself."""
    parts = jobs.ragged(axes.batch_parts)
    model = tiny_model("llama", torch.float64, layers=jobs.LAYERS)
    given = [microbatch for part in parts for microbatch in part]
    loss = ragged_loss(model, given)
    for steps in pool.run(4, jobs.padded, ranks, axes, {"shapes": shapes}):
        for found, gradients in steps:
            assert found == pytest.approx(loss, rel=1e-10)
            for name, gradient in gradients.items():
                whole = model.get_parameter(name).grad
                assert whole is not None
                assert float((gradient - whole).abs().max()) < 1e-10 * float(whole.abs().max()), name


def ragged_loss(model: Any, microbatches: list[dict[str, Tensor]]) -> float:
    """Of all microbatches in one plain process; its gradients are left in the model."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for one in microbatches:
        logits, labels = model(input_ids=one["input_ids"]).logits[:, :-1], one["labels"][:, 1:]
        total = total + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        tokens += int((labels != -100).sum())
    (total / tokens).backward()  # type: ignore[no-untyped-call]
    return float(total.detach()) / tokens


# ---- what would be wrong in silence


@pytest.mark.parametrize(("options", "message"), [
    ({"axes": Axes(cp=2), "loss_fn": lambda output, part: output.square().mean()},
     "a loss_fn that is a function, with cp=2: .* `weight`, of the whole microbatch"),
    ({"sharded": Sharded(param_dtype=torch.bfloat16)}, "here no weight is sharded"),
    ({"axes": Axes(tp=2), "sharded": Sharded(cpu_offload=True)}, "axes tp=2: .* Set dp_shard to 2 or more"),
    ({"axes": Axes(dp_shard=6, ep=2)}, r"down_proj of shape \[4, 32, .* over 3 ranks with the same experts"),
])  # fmt: skip
def test_options_that_would_be_wrong_or_ignored(options: dict[str, Any], message: str) -> None:
    """0.5.0: the loss and all gradients were cp times too large; and weights stayed as they were."""
    with pytest.raises(ConfigError, match=message):
        AutoPipeline(ranks=2, microbatches=2, **options).build_plan(
            tiny_model("mixtral" if "ep=2" in str(options) else "llama")
        )


def test_a_loss_that_is_an_object_is_exact_over_a_cut_sequence(pool: Pool) -> None:
    for differences in pool.run(2, jobs.own_loss, 1, Axes(cp=2)):
        assert max(differences) < 1e-10


@pytest.mark.parametrize(("ranks", "axes"), [(1, Axes(dp_replicate=2)), (1, Axes(dp_shard=2)),
                                             (2, Axes(dp_shard=2))])  # fmt: skip
def test_modules_of_ones_own_are_compared_and_exact(pool: Pool, ranks: int, axes: Axes) -> None:
    """0.5.0: replicas of other values were trained apart, and a single stage beside others failed."""
    for refused, differences in pool.run(2 * ranks, jobs.modules_of_ones_own, ranks, axes):
        assert refused.startswith("HandshakeError: ranks that were given models with other values")
        assert max(differences) < 1e-12


def test_models_of_a_pipeline_of_one_rank_are_compared(pool: Pool) -> None:
    told = pool.run(2, jobs.other_models, Axes(dp_replicate=2))
    assert told[0] == told[1]
    assert told[0].startswith("HandshakeError: ranks that were given models with other values")


def test_no_step_follows_one_that_failed_beside_others(pool: Pool) -> None:
    """0.5.0: where the pipeline has one rank a second one went ahead, into the collectives of the first."""
    first, other = pool.run(2, jobs.after_a_failure, Axes(dp_replicate=2))
    assert first == ["ValueError", "RunError"]
    assert other == ["PeerLostError", "RunError"]
