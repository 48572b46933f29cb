"""A cluster: its hosts, their devices, and the links between them.

    hosts: 8                                   # cluster.yaml
    host: DGX H100                             # all else as devices.yaml has it, unless a key says otherwise
    between: {bandwidth: 200 Gbit/s}
    oversubscription: 2

Amounts are numbers in bytes, FLOPs and seconds, or texts with a unit: 80 GB, 989 TFLOP/s, 3.35 TB/s,
400 Gbit/s, 2 us. A link's bandwidth is one device's, in one direction.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from penstock.errors import ConfigError
from penstock.findings import Finding, as_one, finding, shown
from penstock.options import at_most
from penstock.reading import parse_rate, parse_seconds, parse_size, path_fault
from penstock.yaml_reader import read_yaml

DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8")
_LIBRARY = Path(__file__).with_name("devices.yaml")
_TIMES = re.compile(r"\s*(?:(\d{1,7})\s*[x*]\s*)?(.+?)\s*")  # 8 x DGX H100
_KNOWN_AS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
             "tf32": "tfloat32", "fp8": "float8", "fp64": "float64", "double": "float64"}  # fmt: skip


def _amount(
    unit: str, read: Callable[[str], float | None], limits: tuple[float, float], example: str
) -> BeforeValidator:
    """Read a number, or a text with its unit, within what hardware has."""
    least, most = limits

    def check(value: object) -> object:
        amount = read(value) if isinstance(value, str) else value
        if not isinstance(amount, int | float) or isinstance(amount, bool):
            raise ValueError(f"{shown(value)} is no amount in {unit}; write {example}")
        if not least <= amount <= most:
            rule = f"{shown(value)} is outside of what hardware has, {least:g} to {most:g} {unit}"
            raise ValueError(f"{rule}; write it with its unit, such as {example}")
        return float(amount)

    return BeforeValidator(check, json_schema_input_type=float | str)


def _peaks(peaks: dict[str, float]) -> dict[str, float]:
    for name in peaks:
        if name not in DTYPES:
            near = _KNOWN_AS.get(name) or next(iter(difflib.get_close_matches(name, DTYPES, n=1)), None)
            remedy = f"did you mean {near}?" if near else f"take one of {', '.join(DTYPES)}"
            raise ValueError(f"{shown(name)} is no dtype of a peak; {remedy}")
    if "float32" not in peaks:
        raise ValueError("float32 is missing; give its peak too: FLOPs outside of products run at its rate")
    return peaks


Capacity = Annotated[float, _amount("bytes", parse_size, (1e6, 1e16), "80 GB")]
Bandwidth = Annotated[float, _amount("bytes/s", parse_rate, (1e4, 1e15), "3.35 TB/s or 400 Gbit/s")]
Peak = Annotated[float, _amount("FLOP/s", parse_rate, (1e6, 1e18), "989 TFLOP/s")]
Latency = Annotated[float, _amount("seconds", parse_seconds, (0.0, 1.0), "2 us")]
Efficiency = Annotated[float, Field(gt=0, le=1)]


class Hardware(BaseModel):
    """Unknown keys are errors, and so is a value of another type: nothing is guessed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Efficiencies(Hardware):
    """The share of its peaks that a device reaches.

    matmul, attention: of the peak of their dtype, where an op is large
    memory: of the bandwidth
    half: FLOPs of a matmul or attention that reaches half of its share
    exposed: of the shorter of computing and moving bytes, the share that the longer does not hide
    """

    matmul: Efficiency = 0.8
    attention: Efficiency = 0.5
    memory: Efficiency = 0.9
    half: Annotated[float, Field(ge=0, le=1e15)] = 0.6e9
    exposed: Annotated[float, Field(ge=0, le=1)] = 0.0


class Device(Hardware):
    """What computes: a GPU, or a process on a CPU.

    peaks: FLOP/s of dense products by dtype; that of float32 is also the rate of other ops
    memory: bytes
    bandwidth: bytes/s of its memory
    launch: seconds that an op takes beside its work
    """

    name: str = "device"
    peaks: Annotated[dict[str, Peak], AfterValidator(_peaks)]
    memory: Capacity
    bandwidth: Bandwidth
    launch: Latency
    efficiencies: Efficiencies = Efficiencies()

    def peak(self, dtype: str) -> float:
        """FLOP/s of products in `dtype`, a name of torch. Raises ConfigError where the device lists none."""
        key = "float8" if dtype.startswith("float8") else dtype
        if (peak := self.peaks.get(key)) is None:
            rule = f"it has no peak for {dtype}, and this model computes products in it"
            remedy = f"Give device.peaks.{key}, or train in one of {', '.join(self.peaks)}"
            raise ConfigError(f"device {self.name}", rule, remedy)
        return peak


class Link(Hardware):
    """How a device reaches another one.

    latency: seconds of an empty message
    bandwidth: bytes/s of a device, in one direction
    efficiency: the share of the bandwidth that large messages reach
    """

    latency: Latency
    bandwidth: Bandwidth
    efficiency: Efficiency = 1.0

    @property
    def rate(self) -> float:
        """Bytes/s of large messages."""
        return self.bandwidth * self.efficiency


class Cluster(Hardware):
    """Equal hosts with equal devices.

    host: the name of such hosts, for messages
    devices: number of devices of a host; rank r lives on host r // devices
    inside: between two devices of a host; with one device a host it may be left out
    between: between devices of two hosts; with one host it may be left out
    oversubscription: how many times more the hosts could send than the network between them carries
    host_memory: bytes of a host
    host_link: between a device and the memory of its host
    disk: bytes/s that a host writes and reads
    """

    hosts: Annotated[int, Field(ge=1), at_most(10**6)] = 1
    host: str = "host"
    devices: Annotated[int, Field(ge=1), at_most(10**4)]
    device: Device
    inside: Link | None = None
    between: Link | None = None
    oversubscription: Annotated[float, Field(ge=1, le=100)] = 1.0
    host_memory: Capacity
    host_link: Link
    disk: Bandwidth

    @model_validator(mode="after")
    def _linked(self) -> Self:
        if self.devices > 1 and self.inside is None:
            raise ValueError("devices of one host need inside; write {latency: 2 us, bandwidth: 450 GB/s}")
        if self.hosts > 1 and self.between is None:
            raise ValueError("several hosts need between; write {latency: 4 us, bandwidth: 400 Gbit/s}")
        return self

    @property
    def world(self) -> int:
        """Number of devices."""
        return self.hosts * self.devices

    def link(self, between_hosts: bool) -> Link:
        """The link between two devices; oversubscription narrows the one between hosts.

        Raises ConfigError where the cluster has none, as it has one host or one device.
        """
        link = self.between if between_hosts else self.inside
        if link is None:
            kind, key = ("hosts", "between") if between_hosts else ("devices of a host", "inside")
            rule = f"it has no link between {kind}, and a message crosses one"
            raise ConfigError(
                f"cluster of {self.hosts} x {self.host}", rule, f"Give {key} in the cluster's file"
            )
        if between_hosts and self.oversubscription > 1:
            return link.model_copy(update={"bandwidth": link.bandwidth / self.oversubscription})
        return link


# ---- reading: a name, a file, or a mapping; known hosts and devices fill in what is not said


def read_cluster(source: str | Path | Mapping[str, Any]) -> Cluster:
    """Read a cluster.

    source: the path of a YAML file, a mapping of the same keys, or a known host's name, as in
        ``8 x DGX H100``

    Raises ConfigError that lists everything wrong at once.
    """
    if isinstance(source, str) and (named := _named(source)):
        what, tree = f"cluster {source}", named
    elif isinstance(source, Mapping):
        what, tree = "cluster", dict(source)
    else:
        what, tree = f"cluster {source}", _read(source)
    try:
        return Cluster.model_validate(_filled(tree))
    except ValidationError as error:
        raise as_one(what, [_finding(entry) for entry in error.errors(include_url=False)]) from None


def known(kind: Literal["devices", "hosts"]) -> list[str]:
    """The names of the devices or hosts that need no figures."""
    return list(library()[kind])


@functools.cache
def library() -> Mapping[str, Mapping[str, dict[str, Any]]]:
    """devices.yaml: ``devices`` and ``hosts`` by name, each with the ``sources`` of its figures."""
    tree: Mapping[str, Mapping[str, dict[str, Any]]] = read_yaml(_LIBRARY, "library")
    return tree


def _named(text: str) -> dict[str, Any] | None:
    """The keys that a text such as 8 x DGX H100 stands for; None for a path."""
    match = _TIMES.fullmatch(text)
    count, name = match.groups() if match else (None, text)
    host = _same(name, known("hosts"))
    if host is None and count is None:
        return None
    return {"hosts": int(count or 1), "host": host or name}


def _read(path: str | Path) -> dict[str, Any]:
    if isinstance(path, str) and not path.endswith((".yaml", ".yml")) and not Path(path).exists():
        _refuse_name("host", path, "it is neither a known host nor a file", "or the path of a YAML file")
    if fault := path_fault(str(path)):
        raise ConfigError(
            f"cluster {shown(str(path))}", fault, "Give the path of a YAML file, or 8 x DGX H100"
        )
    tree = read_yaml(Path(path), "cluster")
    if not isinstance(tree, dict):
        keys = ", ".join(Cluster.model_fields)
        raise ConfigError(f"cluster {path}", f"it holds no keys, but {shown(tree)}", f"Write {keys}")
    return tree


def _filled(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a cluster, with those of its known host below them and of its known device below these."""
    keys = dict(tree)
    if isinstance(name := keys.get("host"), str):
        if (host := _same(name, known("hosts"))) is not None:
            figures = _figures("hosts", host)
            if isinstance(
                device := keys.get("device"), Mapping
            ):  # changes to the host's own, unless it names one
                keys["device"] = {"name": figures["device"], **device}
            keys = _over(figures, keys | {"host": host})
        elif not keys.keys() >= {"devices", "device"}:  # a host of the user's own says what it has
            _refuse_name("host", name, "no such host is known", "or give devices, device, inside, ... here")
    return keys | {"device": _device(keys["device"])} if "device" in keys else keys


def _device(value: object) -> object:
    """The keys of a device that is given by name, or as a mapping that may name a known one."""
    keys = {"name": value} if isinstance(value, str) else value
    if not isinstance(keys, Mapping) or not isinstance(name := keys.get("name"), str):
        return keys
    if (device := _same(name, known("devices"))) is not None:
        return _over(_figures("devices", device), {**keys, "name": device})
    if keys.keys() == {"name"}:
        _refuse_name(
            "device", name, "no such device is known", "or give its peaks, memory, bandwidth and launch"
        )
    return keys


def _figures(kind: Literal["devices", "hosts"], name: str) -> dict[str, Any]:
    return {key: value for key, value in library()[kind][name].items() if key != "sources"}


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both; where both have one, that of `above`, and key by key where both are mappings."""
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        both = isinstance(lower, Mapping) and isinstance(value, Mapping)
        merged[key] = _over(lower, value) if both else value  # type: ignore[arg-type]
    return merged


def _same(name: str, names: list[str]) -> str | None:
    """The known name that `name` is, but for case and spaces: dgx-h100, a100 80 gb."""
    plain = {re.sub(r"[\W_]", "", other).lower(): other for other in names}
    return plain.get(re.sub(r"[\W_]", "", name).lower())


def _refuse_name(kind: Literal["device", "host"], name: str, rule: str, otherwise: str) -> None:
    names = known("devices" if kind == "device" else "hosts")
    lowered = {other.lower(): other for other in names}
    near = [lowered[other] for other in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.4)]
    remedy = f"Take {', '.join(near or names)}, {otherwise}"
    raise ConfigError(f"{kind} {shown(name)}", rule, remedy)


# ---- writing


def to_yaml(cluster: Cluster) -> str:
    """The text of a file that `read_cluster` reads, with units; figures keep four digits."""
    return yaml.safe_dump(_with_units(cluster.model_dump(exclude_none=True), _UNITS), sort_keys=False)


_PREFIXES = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
_UNITS = {"memory": "B", "host_memory": "B", "bandwidth": "B/s", "disk": "B/s", "latency": "s", "launch": "s"}


def _with_units(keys: Mapping[str, Any], units: Mapping[str, str]) -> dict[str, Any]:
    """The keys with amounts as texts; all others as they are, floats with four digits."""
    texts: dict[str, Any] = {}
    for key, value in keys.items():
        if isinstance(value, Mapping):
            below = {"peaks": dict.fromkeys(value, "FLOP/s"), "efficiencies": {}}
            texts[key] = _with_units(value, below.get(key, _UNITS))
        elif key in units:
            texts[key] = _with_unit(value, units[key])
        else:
            texts[key] = float(f"{value:.4g}") if isinstance(value, float) else value
    return texts


def _with_unit(amount: float, unit: str) -> str:
    scales = {"": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9} if unit == "s" else _PREFIXES
    prefix = next((name for name, scale in scales.items() if amount >= scale), [*scales][-1])
    digits = f"{float(f'{amount / scales[prefix]:.4g}'):.10f}".rstrip("0").rstrip(".")
    return f"{digits} {prefix}{unit}"


# ---- pydantic's findings in the user's words


def _finding(entry: Any) -> Finding:
    name = ".".join(str(key) for key in entry["loc"])
    *path, key = entry["loc"] or ("",)
    match entry["type"]:
        case "extra_forbidden":
            keys = list(_section(path).model_fields)
            near = difflib.get_close_matches(str(key), keys, n=1, cutoff=0.5)
            remedy = f"Did you mean {near[0]}?" if near else f"Take one of {', '.join(keys)}"
            where = ".".join(map(str, path)) or "a cluster"
            return f"{name}={shown(entry['input'])}", f"{where} has no such key", remedy
        case "missing":
            remedy = "Write it, or name a known host or device that has it"
            return f"{name} is missing", "the prediction needs it", remedy
        case "model_type" | "model_attributes_type" | "dict_type":
            written = ", ".join(_section(entry["loc"]).model_fields)
            return f"{name}={shown(entry['input'])}", "it holds keys", f"Write {written}"
    return finding(entry, name or "cluster", "See the keys and their types in penstock.planner.hardware")


def _section(path: Any) -> type[Hardware]:
    """The class whose keys stand at a path: device.efficiencies."""
    sections: dict[str, type[Hardware]] = {
        "device": Device,
        "efficiencies": Efficiencies,
        "inside": Link,
        "between": Link,
        "host_link": Link,
    }
    return sections.get(str(path[-1]), Cluster) if path else Cluster
