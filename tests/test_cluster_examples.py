"""The examples for Kubernetes and SkyPilot: valid YAML, whose commands torchrun and penstock accept."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser
from typer.core import TyperGroup

from penstock.cli.main import app
from penstock.train.config.load import load_config
from support.tiny import config_file

EXAMPLES = Path(__file__).parent.parent / "examples" / "clusters"
# what each platform puts into the environment of the second host
ENVIRONMENT = {
    "kubernetes": {"JOB_COMPLETION_INDEX": "1"},
    "skypilot": {
        "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    },
}  # fmt: skip


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))


def job() -> Any:
    return documents("kubernetes")[1]["spec"]


def pod() -> Any:
    return job()["template"]["spec"]


def command(name: str) -> str:
    """The text that a shell runs."""
    text = pod()["containers"][0]["args"][0] if name == "kubernetes" else documents(name)[0]["run"]
    return str(text)


def words(name: str) -> list[str]:
    """What the shell makes of the command, in the platform's environment."""
    script = command(name).replace("exec torchrun", "printf '%s\\n' torchrun")
    environment = {**os.environ, **ENVIRONMENT[name]}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.splitlines()


def shutdown_seconds(name: str) -> int:
    """How long torchrun waits for ranks to save. The torchrun of torch 2.11 has no option for it."""
    variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    if name == "skypilot":
        return int(documents(name)[0]["envs"][variable])
    [seconds] = [entry["value"] for entry in pod()["containers"][0]["env"] if entry["name"] == variable]
    return int(seconds)


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_torchrun_and_penstock_accept_the_command(name: str, tmp_path: Path) -> None:
    program, *given = words(name)
    assert program == "torchrun"
    launch = get_args_parser().parse_args(given)
    assert (launch.nnodes, launch.nproc_per_node, launch.node_rank) == ("2", "8", 1)
    assert (launch.module, launch.training_script) == (True, "penstock")
    assert launch.master_addr == {"kubernetes": "penstock-0.penstock", "skypilot": "10.0.0.1"}[name]
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    context = group.make_context("penstock", ["train"], resilient_parsing=True)
    train = group.get_command(context, "train")
    assert train is not None
    parsed = train.make_context("train", launch.training_script_args[1:], parent=context).params
    assert launch.training_script_args[0] == "train"
    assert parsed["resume"]
    assert Path(parsed["config"]).name == "train.yaml"
    config = load_config(config_file(tmp_path), parsed["arguments"])
    assert config.train.stop_seconds == 90
    assert shutdown_seconds(name) > config.train.stop_seconds


def test_a_wrong_option_would_not_be_accepted() -> None:
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(["--node-rankk", "1", "-m", "penstock"])


def test_every_host_of_the_job_runs_one_index() -> None:
    launch = get_args_parser().parse_args(words("kubernetes")[1:])
    hosts = int(launch.nnodes)
    assert (job()["completionMode"], job()["completions"], job()["parallelism"]) == ("Indexed", hosts, hosts)
    assert pod()["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == int(launch.nproc_per_node)
    assert pod()["terminationGracePeriodSeconds"] > shutdown_seconds("kubernetes")


def test_the_first_pod_has_the_name_that_the_others_look_up() -> None:
    service, described = documents("kubernetes")
    name = described["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert pod()["subdomain"] == service["metadata"]["name"]
    assert f"--master-addr {name}-0.{pod()['subdomain']}" in " ".join(shlex.split(command("kubernetes")))


def test_each_mount_has_its_volume() -> None:
    mounts = {mount["name"] for mount in pod()["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod()["volumes"]}
    sky = documents("skypilot")[0]
    assert sky["num_nodes"] == 2
    assert "/shared" in sky["volumes"]
    assert sky["resources"]["accelerators"].endswith(":8")
