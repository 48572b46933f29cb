"""The field holds every mesh of a cluster."""

from __future__ import annotations

from penstock.parallel.axes import Axes
from penstock.planner.candidate import Candidate
from penstock.planner.space import SCHEDULES, meshes, runs
from penstock.schedule.choose import MAKERS
from support.planning import LENGTH, cluster, workload


def test_a_mesh_takes_all_devices_and_the_whole_batch() -> None:
    field = list(meshes(workload(), cluster(2, 4), 32, LENGTH))
    assert {(mesh.devices, mesh.batch) for mesh in field} == {(8, 32)}
    assert {mesh.axes.tp for mesh in field} == {1, 2, 4}
    assert {mesh.axes.cp for mesh in field} == {1}
    assert {mesh.ranks for mesh in field} == {1, 2, 4}  # of 6 layers
    assert {mesh.rows for mesh in field} == {1, 2, 4, 8}
    assert {mesh.axes for mesh in field if mesh.ranks == 2 and mesh.axes.tp == 1} == {
        Axes(dp_shard=4), Axes(dp_replicate=4),
    }  # fmt: skip
    assert all(mesh.sequence_parallel == (mesh.axes.tp > 1) for mesh in field)
    assert len(set(field)) == len(field)


def test_an_odd_batch_leaves_meshes_that_divide_it() -> None:
    assert {mesh.axes.batch_parts for mesh in meshes(workload(), cluster(2, 2), 6, LENGTH)} == {1, 2}
    assert {mesh.axes.tp for mesh in meshes(workload(), cluster(1, 7), 3, LENGTH)} == {7}


def test_a_kind_says_whether_its_backwards_are_split() -> None:
    for kind in SCHEDULES:
        schedule = Candidate(
            4, schedule=kind.name, options=tuple(kind.options.items()), microbatches=8
        ).built()
        assert kind.splits == bool(schedule.split)


def test_schedules_have_a_layer_for_each_stage() -> None:
    assert [run.schedule for run, _ in runs(Candidate(1), 6)] == ["1f1b"]
    names = {run.label for run, _ in runs(Candidate(4), 6)}
    assert "1f1b stages_per_rank=2" not in names
    assert "zb_h1" in names
    assert len(list(runs(Candidate(2), 64))) == len(SCHEDULES)
    assert {kind.name for kind in SCHEDULES} <= MAKERS.keys()
