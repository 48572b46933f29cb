"""Faults at a set place of a training run: the n-th call of a function on one rank.

Strike(1, "the optimizer", 3)                     rank 1 is killed as it steps for the third time
Strike(0, "the rename", deed="stop")              rank 0 is stopped as it is about to publish a checkpoint
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

# where a run may be struck: the module, and what is called there
# some of the places are private: a strike hits a run within a public call
POINTS = {
    "the look for a checkpoint": ("penstock.train.preflight", "find_start"),
    "the data": ("penstock.train.preflight", "load_data"),
    "the taking of the folder": ("penstock.train.run", "owned"),
    "the joining": ("penstock.parallel.mesh", "_await_all"),
    "the job's group": ("torch.distributed", "init_process_group"),
    "the handshake": ("penstock.runtime.ranks", "Ranks.same"),
    "the mesh": ("penstock.parallel.world", "pipeline_mesh"),
    "the groups": ("penstock.parallel.world", "Groups"),
    "the reductions": ("penstock.parallel.reductions", "Reductions._connect"),
    "the build": ("penstock.train.run", "make_optimizers"),
    "the load of a checkpoint": ("penstock.train.before_steps", "load_checkpoint"),
    "the writer's group": ("penstock.train.run", "CheckpointWriter"),
    "a forward": ("penstock.runtime.step_memory", "StepMemory.forward"),
    "a stage's forward": ("penstock.runtime.stage", "Stage.forward"),
    "a message's arrival": ("penstock.runtime.transport.checksums", "CheckedMessages.compare"),
    "a backward": ("penstock.runtime.step_memory", "StepMemory.before_backward"),
    "the norm": ("penstock.pipeline.pipeline", "Pipeline.clip_grad_norm_"),
    "the optimizer": ("torch.optim.adamw", "AdamW.step"),
    "the next step": ("penstock.train.loop", "seed_step"),
    "a row of metrics": ("penstock.train.records.metrics", "Metrics.write"),
    "an evaluation": ("penstock.pipeline.pipeline", "Pipeline.evaluate"),
    "a save": ("penstock.train.between_steps", "Checkpoints.save"),
    "the folder of a commit": ("penstock.models.weights.folder", "_prepare"),
    "the weights of a commit": ("penstock.models.weights.saved", "SavedModel.write"),
    "the moments of a commit": ("penstock.checkpoint.optimizer_state", "OptimizerState.write"),
    "the hashes of a commit": ("penstock.models.weights.folder", "_describe"),
    "the manifest of a commit": ("penstock.models.weights.folder", "_publish"),
    "the rename of a commit": ("pathlib", "Path.rename"),
    "what follows a commit": ("penstock.checkpoint.background", "follow"),
    "the end": ("penstock.train.run", "_report"),
    "the removal of an older one": ("penstock.train.checkpoints", "remove_folder"),
}
_ENVIRONMENT, AT_STEP = "PENSTOCK_TEST_STRIKES", "PENSTOCK_TEST_KILLS"


class Strike(NamedTuple):
    """deed: what happens there, of `DEEDS`; number: what it needs, such as bytes"""

    rank: int
    point: str
    nth: int = 1
    deed: str = "kill"
    number: int = 0


def _kill(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _pause(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    """Stop for `number` seconds."""
    wake = f"sleep {strike.number}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", wake], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _kill_launcher(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    """The command that started this rank is killed, and this rank goes on."""
    os.kill(int(os.environ["PENSTOCK_LAUNCHER"]), signal.SIGKILL)


def _terminate(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(60)


def _lose_machine(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    """The launcher of this rank goes too."""
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    raise ValueError("this rank gave up")


def _leave(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    os._exit(0)


def _fill(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    """No file of this process takes a byte beyond that `number` any more; Python ignores SIGXFSZ."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (strike.number, resource.RLIM_INFINITY))


def _full(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    """metrics.jsonl is on a full disk."""
    file = folder / "out" / "metrics.jsonl"
    file.unlink()
    file.symlink_to("/dev/full")


def _remove(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    """Somebody removes the run's folder."""
    shutil.rmtree(folder / "out")


def _replace(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    """Somebody moves the run's folder away, and a file has its name."""
    (folder / "out").rename(folder / "moved")
    (folder / "out").touch()


def _freeze(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    """From now on nobody can write in the run's folder, not even root. `thaw` ends it."""
    subprocess.run(["chattr", "-R", "+i", str(folder / "out")], check=True)


def thaw(folder: Path) -> None:
    subprocess.run(["chattr", "-R", "-i", str(folder / "out")], check=True)


def _starve(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    """This process may have as much memory as it has, and needs `number` MiB more."""
    import torch  # late: `sitecustomize` imports this file in every process

    limit = 1024 * int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0])
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    torch.zeros(strike.number << 18)


def _use_up_files(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    """This process may open `number` files more."""
    limit = len(os.listdir("/proc/self/fd")) + strike.number
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


CONTROL_GROUP = Path("/sys/fs/cgroup/memory") / "penstock-faults"


def _be_killed_for_memory(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    """The kernel kills this process, whose control group has no memory for it."""
    (CONTROL_GROUP / "cgroup.procs").write_text(str(os.getpid()))
    bytearray(b"x") * (1 << 28)


def _fail(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    raise OSError(5, "Input/output error")


def _turn_clock(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    """From now on the wall clock of this process is wrong by `number` seconds."""
    clock = time.time
    time.time = lambda: clock() + strike.number


def _spoil_gradient(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    gradients = [each.grad for each in given[0].parameters() if each.grad is not None]
    gradients[0].view(-1)[0] = math.nan


def _spoil_weight(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    weight = next(each for name, each in given[0].named_parameters() if "q_proj" in name)
    weight.data.view(-1)[0] = math.nan


def _spoil_message(strike: Strike, folder: Path, given: Sequence[Any]) -> None:
    """Flip a bit of the first number that a stage has received; with `number` 31 make it NaN."""
    import torch  # late: `sitecustomize` imports this file in every process

    received = given[2].tensors[0].detach().view(-1)
    if strike.number == 31:
        received[0] = math.nan
    else:
        received.view(torch.int32)[0] ^= 1 << strike.number


DEEDS: dict[str, Callable[[Strike, Path, Sequence[Any]], None]] = {
    "kill": _kill, "stop": _stop, "terminate": _terminate, "raise": _raise, "leave": _leave, "fill": _fill,
    "full": _full, "fail": _fail, "clock": _turn_clock, "gradient": _spoil_gradient, "weight": _spoil_weight,
    "message": _spoil_message, "machine": _lose_machine, "pause": _pause, "launcher": _kill_launcher,
    "remove": _remove, "replace": _replace, "freeze": _freeze, "starve": _starve, "files": _use_up_files,
    "memory": _be_killed_for_memory,
}  # fmt: skip


def arm(strikes: Sequence[Strike], rank: int, folder: Path) -> None:
    """From now on the strikes of this rank come down in this process, each once."""
    for strike in strikes:
        if strike.rank != rank:
            continue
        _wrap(*_place(strike.point), strike, folder)


def _place(point: str) -> tuple[Any, str]:
    """What holds the function that is called there, and its name."""
    module, names = POINTS[point]
    *owners, name = names.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


def _wrap(owner: Any, name: str, strike: Strike, folder: Path) -> None:
    called, calls = getattr(owner, name), 0

    def struck(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == strike.nth:
            note = {"time": time.time(), "point": strike.point}
            (folder / f"struck-{strike.rank}").write_text(json.dumps(note))
            DEEDS[strike.deed](strike, folder, args)
        return called(*args, **kwargs)

    for attribute in ("hooked", "__wrapped__"):
        with suppress(AttributeError):
            setattr(struck, attribute, getattr(called, attribute))
    setattr(owner, name, struck)


# ---- In the processes of a command: PYTHONPATH has support/at_start, whose sitecustomize calls `arm_later`


def environment(strikes: Sequence[Sequence[Strike]], folder: Path) -> dict[str, str]:
    """What a command's environment needs for strikes: a list for each attempt."""
    tests = Path(__file__).parents[1]
    paths = [str(tests / "support" / "at_start"), str(tests), os.environ.get("PYTHONPATH", "")]
    plan = json.dumps({"folder": str(folder), "strikes": strikes})
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), _ENVIRONMENT: plan}


def arm_later() -> None:
    """Arm this process as it begins a run, if it is a rank of one by then."""
    if _ENVIRONMENT in os.environ:
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Waits for the import of `penstock.train.preflight`, whose `preflight` then arms the process."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "penstock.train.preflight":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.preflight = _arming(module.preflight)  # which a rank calls once it knows its number

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _arming(preflight: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _arm_of_attempt()
        return preflight(*args, **kwargs)

    return call


def _arm_of_attempt() -> None:
    if "RANK" not in os.environ:  # the command itself looks at the config too
        return
    plan, rank = json.loads(os.environ[_ENVIRONMENT]), int(os.environ["RANK"])
    if AT_STEP in os.environ:
        _kill_at_steps(rank)
    folder = Path(plan["folder"])
    attempt = len(list(folder.glob(f"came-{rank}-*")))
    (folder / f"came-{rank}-{attempt}").touch()
    if attempt < len(plan["strikes"]):
        arm([Strike(*each) for each in plan["strikes"][attempt]], rank, folder)


# _step: a run is killed in chosen steps
def _kill_at_steps(rank: int) -> None:
    """The soak's kills: each once over all attempts, in the step and at the place that the plan has."""
    from penstock.train import loop

    plan, due = json.loads(os.environ[AT_STEP]), ""
    step_of, folder = loop._step, Path(plan["folder"])

    def step(run: Any, step_number: int) -> Any:
        nonlocal due
        struck, point = plan["kills"].get(str(step_number), (None, ""))
        mark = folder / f"killed-{step_number}"
        if struck == rank and not mark.exists():
            mark.touch()
            due = point
        return step_of(run, step_number)

    def watched(owner: Any, name: str, point: str) -> None:
        called = getattr(owner, name)

        @functools.wraps(called)
        def call(*args: Any, **kwargs: Any) -> Any:
            if due == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return called(*args, **kwargs)

        setattr(owner, name, call)

    loop._step = step
    for point in {point for _, point in plan["kills"].values()}:
        watched(*_place(point), point)
