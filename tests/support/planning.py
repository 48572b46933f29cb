"""A small model and a small cluster, to plan with."""

from __future__ import annotations

import functools

from transformers import LlamaConfig, PretrainedConfig

from penstock.planner.hardware import Cluster, read_cluster
from penstock.planner.workload import Workload

LENGTH = 128


def small_config(**keys: object) -> PretrainedConfig:
    sizes = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    return LlamaConfig(**(sizes | keys))


@functools.cache
def workload() -> Workload:
    return Workload(small_config())


def cluster(hosts: int = 2, devices: int = 2, memory: str = "1 GB") -> Cluster:
    keys = {"hosts": hosts, "host": "DGX H100", "devices": devices, "device": {"memory": memory}}
    return read_cluster(keys)
