"""Every key is known, typed and within its limits, or the error says what to write instead."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from penstock.errors import ConfigError
from penstock.train.config import load
from penstock.train.config.load import load_config

# the form in which a config is written, given values that no config has
from penstock.train.config.sections import TrainConfig, _Dumper
from penstock.train.optimizers.optimizer import MuonSection
from support.configs import MINIMAL, loaded, pair, refused, same_as_yaml
from support.mutations import CASES, seeded
from support.refusals import refuses

CONFIGS = Path(__file__).parents[3] / "configs"
MUON = "optimizer.name=muon"


def test_overrides_go_over_the_file_and_are_yaml(tmp_path: Path) -> None:
    config = loaded(
        tmp_path, MINIMAL, "train.steps=7", "optimizer.learning_rate=3e-4", "train.clip_norm=null",
        "data.include=['*.py', '*.txt']", "model.config.hidden_size=32", "data.path=a=b",
    )  # fmt: skip
    assert config.train.steps == 7
    assert config.optimizer.learning_rate == 3e-4
    assert config.train.clip_norm is None
    assert config.data.include == ("*.py", "*.txt")
    assert config.model.config == {"model_type": "qwen3", "hidden_size": 32}
    assert config.data.path == "a=b"


@pytest.mark.parametrize("day", ["2026-02-28", "2026-02-30"])
def test_a_day_is_text(tmp_path: Path, day: str) -> None:
    """0.5.0: a day was no text, and one that is in no calendar a ValueError."""
    config = loaded(tmp_path, MINIMAL, f"output.folder={day}")
    assert config.output.folder == day
    same_as_yaml(config)


@pytest.mark.parametrize("word", ["off", "'off'", "false", "auto", "always"])
def test_the_check_is_turned_off_by_a_word_that_yaml_reads_as_false(tmp_path: Path, word: str) -> None:
    config = loaded(tmp_path, MINIMAL, f"train.check={word}")
    assert config.train.check == (word if word.startswith("a") else "off")
    same_as_yaml(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stps=3", "train.stps=3: section train has no such key. Did you mean train.steps?"),
        ("optimizer.lr=1", "section optimizer has no such key. Write optimizer.learning_rate"),
        ("train.lr=1", "section train has no such key. Write optimizer.learning_rate"),
        ("train.max_grad_norm=1", "Write train.clip_norm"),
        ("train.gradient_accumulation_steps=2", "Write pipeline.microbatches"),
        ("train.save_every=2", "Write train.checkpoint_every"),
        ("train.num_train_epochs=2", "Write train.epochs"),
        ("optimizer.num_epochs=2", "Write train.epochs"),
        ("train.per_device_train_batch_size=2", "Write train.batch_size, the rows of a step"),
        ("train.per_device_eval_batch_size=2", "Write train.evaluate_batches, of batch_size rows"),
        ("optimizer.lr_scheduler_type=cosine", "Write optimizer.schedule"),
        ("train.warmup_ratio=0.1", "Did you mean optimizer.warmup_ratio?"),
        ("train.load_best_model_at_end=true", "Write output.keep={best: 1}"),
        ("output.save_total_limit=2", "Write output.keep={last: N}"),
        ("adapter.rank=8", "adapter.rank=8: section adapter has no such key. Write adapter.r"),
        ("pipeline.rank=8", "Did you mean pipeline.ranks?"),  # and not the adapter's
        ("adapter.lora_alpha=8", "Write adapter.alpha"),
        ("optimizer.name=adamw8bit", "no optimizer of the trainer. Write name: adamw and states: 8bit"),
        ("optimizer.name=adamw_torch_4bit", "Write name: adamw and states: 4bit"),
        ("optimizer.name=adamw_torch_fused", "Write name: adamw"),
        ("optimizer.name=sgd", "Write adamw or muon or adafactor"),
        ("parallel.dp=2", "Write parallel.dp_shard (FSDP2 shards the weights) or parallel.dp_replicate"),
        ("output.keep.lst=3", "output.keep.lst=3: section output.keep has no such key. Did you mean"),
        ("output.keep.last=0", "output.keep.last=0: it should be greater than or equal to 1"),
        ("train.learning_rate=1e-3", "Did you mean optimizer.learning_rate?"),
        ("train.betas=[0.9, 0.9]", "Did you mean optimizer.betas?"),
        ("train.momentum=0.9", "Did you mean optimizer.momentum?"),  # of Muon's branch alone
        ("trian.steps=3", "trian={'steps': 3}: a config has no such key. Did you mean train?"),
        ("optimizer.momentun=0.9", "Take one of learning_rate, weight_decay"),  # of AdamW's branch alone
        ("train.loss={kind: dpo, gamma: 2}", "section train.loss has no such key. Take one of kind, beta"),
        ("pipeline=null", "pipeline=None: it is a section of keys. Give its keys, or leave it out"),
        ("train.qqqq=3", "Take one of steps, epochs, batch_size"),
        ("train.steps=ten", "train.steps='ten': it should be a valid integer. Write a whole number"),
        ("train.steps=2.5", "train.steps=2.5: it should be a valid integer"),
        ("train.steps=true", "train.steps=True: it should be a valid integer"),
        ("train.steps=0", "train.steps=0: it should be greater than or equal to 1. Give 1 or more"),
        ("train.clip_norm=.inf", "it should be a finite number"),
        ("train.activation_checkpointing=3", "3 is no way to recompute activations. Write true, false, none"),
        ("train.compile=3", "3 does not say what torch.compile compiles. Write true, false, layers, loss"),
        ("train.compile={backnd: x}", "Did you mean train.compile.backend?"),
        ("train.compile={layers: some}", "train.compile.layers='some': it should be"),
        ("train.activation_checkpointing={evry: 2}", "Did you mean train.activation_checkpointing.every?"),
        ("train.activation_offloading=yes please", "'yes please' does not say what is offloaded. Write true"),
        ("train.activation_offloading={module: [mlp]}", "Did you mean train.activation_offloading.modules?"),
        ("train.activation_offloading={ahead: 0}", "train.activation_offloading.ahead=0: it should be"),
        ("train.check=on", "train.check=True: it should be 'auto', 'always' or 'off'. Take 'auto', 'always'"),
        ("train.activation_checkpointing={every: 0}", "train.activation_checkpointing.every=0: it should be"),
        ("train.activation_checkpointing={in_flight: x}", "'x' is neither a number of microbatches nor a"),
        ("train.activation_checkpointing={in_flight: []}", "[] is neither a number of microbatches"),
        ("train.activation_checkpointing={memory_limit: 8 apples}", "'8 apples' is no number of bytes"),
        ("train.activation_checkpointing={memory_limit: -1}", "-1 is no number of bytes. Write 8 GiB"),
        ("train.activation_checkpointing={memory_limit: 5 iB}", "'5 iB' is no number of bytes"),
        ("train.activation_checkpointing=0", "0 is no way to recompute activations"),
        ("data.packing=bestfit", "it should be 'stream', 'none', 'sequential' or 'best_fit'. Take"),
        ("parallel.dp_shard=0", "dp_shard=0: an axis has at least one rank"),
        ("parallel.pp=2", "parallel.pp=2: section parallel has no such key. Write pipeline.ranks"),
        (
            "parallel.dp_shard=-1 parallel.tp=-1",
            "dp_shard and tp of -1: one axis at most takes all remaining",
        ),
        ("parallel.dp_shard=8", "rows cannot be split into pipeline.microbatches=4 for each of 8 parts"),
        ("pipeline.balance=measured pipeline.layout=EttL", "layout and balance: "),
        ("pipeline.padding={lenght: 3}", "Did you mean pipeline.padding.length?"),
        ("pipeline.padding={multiple: 0}", "pipeline.padding.multiple=0: it should be greater than or equal"),
        ("pipeline.padding={buckets: [64, 0]}", "pipeline.padding.buckets.1=0: it should be"),
        ("pipeline.balance=measured pipeline.head_weight=2", "head_weight and balance: "),
        (
            "pipeline.shapes=padded pipeline.padding={length: 127}",
            "pipeline.padding.length=127 is below data.sequence_length=128. Give no less",
        ),
        ("pipeline.layers_per_stage=0", "0 is neither a number of layers nor a list"),
        ("pipeline.layers_per_stage=[1, x]", "[1, 'x'] is neither"),
        ("pipeline.layers_per_stage=true", "True is neither"),
        ("pipeline.layout=3", "3 is no layout. Write Ett|ttL, or a list"),
        ("pipeline.layout=[[embedding],[decodr]]", "layout, stage 1, entry 0: 'decodr'"),
        ("pipeline.layout=Ettx", "layout, character 4"),
        ("pipeline.first_stage_layers=-1", "Give 0 or more"),
        (
            "pipeline.modules_per_stage=[a]",
            "pipeline.modules_per_stage: ['a'] lists no names for each stage. Write",
        ),
        ("model.new_weights=score", "model.new_weights: 'score' is no list of names. Write [mlp, score.*]"),
        ("train.activation_offloading={modules: mlp}", "offloading.modules: 'mlp' is no list of names."),
        ("data.held_out=1", "it should be less than 1. Give less than 1"),
        ("optimizer.betas=[0.9]", "optimizer.betas"),
        ("optimizer.name=adam", "name='adam' is no optimizer of the trainer. Write adamw or muon or"),
        ("optimizer.momentum=0.9", "optimizer: with name=adamw momentum are Muon's. Set optimizer.name=muon"),
        (
            f"{MUON} optimizer.betas=[0.9, 0.9]",
            "name=muon betas are AdamW's. Write them into optimizer.adamw",
        ),
        (
            f"{MUON} optimizer.momentm=0.9",
            "section optimizer has no such key. Did you mean optimizer.momentum",
        ),
        (f"{MUON} optimizer.momentum=1", "optimizer.momentum=1: it should be less than 1"),
        (f"{MUON} optimizer.adamw.bets=1", "adamw has no such key. Did you mean optimizer.adamw.betas"),
        (f"{MUON} optimizer.adamw.betas=[1, 2]", "optimizer.adamw.betas.0=1: it should be less than 1"),
        ("pipeline.ranks=0", "pipeline.ranks: 0 is no number of ranks. Write 1 or more, or -1 for all"),
        ("pipeline.ranks=two", "pipeline.ranks='two': it should be a valid integer"),
        (
            "train.batch_size=3",
            "config: train.batch_size=3: its rows cannot be split into pipeline.microbatch",
        ),
        ("optimizer.warmup_steps=101", "optimizer.warmup_steps=101 is more than train.steps=100"),
        ("data.tokenizer=null", "data.tokenizer is missing"),
        ("pipeline.schedule=2f2b", "schedule '2f2b'"),
        ("train=3", "what follows the config file is section.key=value"),
        ("trian={steps: 3}", "a config has no such key. Did you mean train?"),
        ("train={stpes: 3}", "section train has no such key. Did you mean train.steps?"),
        ("train.steps", "what follows the config file is section.key=value"),
        ("train.steps=[", "its value is not YAML"),
        ("data.path.x=1", "path holds a str and no keys"),
        ("model.config={[a, b]: 1}", "its value is not YAML: while constructing a mapping"),
        ("train.steps=0x_", "train.steps='0x_': it should be a valid integer"),
        ("train.steps=!!int x", "its value is not YAML: a value is not what its tag says"),
        ("train.compile=!!bool x", "its value is not YAML: a value is not what its tag says"),
        ("data.path=!!binary aGk=", "its value is not YAML: could not determine a constructor for the tag"),
        ("data.path=!!timestamp x", "its value is not YAML: could not determine a constructor for the tag"),
        ("model.config.a/b=1", "what follows the config file is section.key=value"),
    ],
)
def test_wrong_overrides_are_refused(tmp_path: Path, override: str, message: str) -> None:
    overrides = re.split(r" (?=\w+\.[\w.]+=)", override)
    assert message in refused(tmp_path, MINIMAL, *overrides)


def test_muon_has_defaults_and_all_of_it_is_shown(tmp_path: Path) -> None:
    config = loaded(tmp_path, MINIMAL, "optimizer.name=muon", "optimizer.adamw.learning_rate=1e-3")
    assert isinstance(config.optimizer, MuonSection)
    assert (config.optimizer.learning_rate, config.optimizer.momentum) == (0.02, 0.95)
    assert (config.optimizer.adamw.learning_rate, config.optimizer.adamw.betas) == (1e-3, (0.9, 0.95))
    same_as_yaml(config)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    message = refused(tmp_path, MINIMAL + "train: {stps: 3, batch_size: x}\nnope: 1\n")
    assert "3 things are wrong with it" in message
    for part in ("train.stps=3", "train.batch_size='x'", "nope=1"):
        assert part in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it holds sections of keys, and here is nothing"),
        ("- a\n", "here is a list"),
        ("model: [", "it is not YAML"),
        (MINIMAL + "data: {}\n", "key 'data' is given twice"),
        ("model: {[a, b]: 1}\n", "it is not YAML: while constructing a mapping"),
        ("model: {{a: b}: 1}\n", "it is not YAML: while constructing a mapping"),
        ("data: {path: x, tokenizer: bytes}\n", "model is missing: the run needs it"),
        (MINIMAL + "optimizer: muon\n", "'muon' is no section. Write keys such as {name: muon, learning_"),
        # a dot in a key of the file leads to no section
        (MINIMAL + "train.steps: 3\n", "train.steps=3: a config has no such key. Did you mean train?"),
        (
            MINIMAL + "train: {optimizer.lr: 3}\n",
            "train.optimizer.lr=3: section train has no such key. Take one of steps,",
        ),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)
MERGED = "a0: &a0 {x: 1}\n" + "".join(
    f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}]}}\n" for level in range(1, 10)
)
HOSTILE = {
    "aliases of aliases": (BOMB, "with its aliases expanded it has more than 1,048,576 characters"),
    "merges of merges": (MERGED, "with its aliases expanded it has more than 1,048,576 characters"),
    "a long text, often": (f"a: &a {'x' * 10_000}\nb: [{'*a, ' * 1000}]", "with its aliases expanded"),
    "an alias of itself": ("a: &a [*a]", "an alias is within its own expansion"),
    "very deep": (f"a: {'[' * 5000}", "it nests deeper than 100 levels"),
    "many digits": (f"a: 0x{'f' * 20_000}", "a number of more than 100 digits"),
    "a large file": ("#" * 300_000, "cannot be read (it has more than 256 KiB)"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_would_take_all_memory_is_refused(tmp_path: Path, case: str) -> None:
    """0.5.0: it filled memory, or ended with a RecursionError: PyYAML expands all that it reads."""
    text, message = HOSTILE[case]
    found = refused(tmp_path, MINIMAL + text)
    assert message in found
    assert len(found) < 1000


def test_aliases_of_ordinary_size_stay(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(MINIMAL + "train: &t {steps: 3}\n")
    assert load_config(tmp_path / "config.yaml").train.steps == 3


def test_overrides_have_the_limits_of_the_file(tmp_path: Path) -> None:
    """0.5.0: deep ones ended with a RecursionError."""
    (tmp_path / "config.yaml").write_text(MINIMAL)
    for override in (f"train.ramp={'[' * 3000}", f"model.config.{'a.' * 20_000}b=1"):
        with pytest.raises(ConfigError) as found:
            load_config(tmp_path / "config.yaml", [override])
        assert len(str(found.value)) < 1000


def test_of_many_wrong_keys_the_first_are_named(tmp_path: Path) -> None:
    """0.5.0: 15,000 of them took 13 s and 5 MB of message: each was compared with all keys."""
    found = refused(tmp_path, MINIMAL + f"train: {{{', '.join(f'k{n}: 1' for n in range(3000))}}}\n")
    assert "3000 things are wrong with it" in found
    assert "and 2980 more" in found
    assert len(found) < 10_000


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with refuses(ConfigError, rule="No such file"):
        load_config(tmp_path / "nowhere.yaml")
    with refuses(ConfigError, rule="it is a folder"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with refuses(ConfigError, rule="it is not YAML"):
        load_config(tmp_path / "binary.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    with refuses(ConfigError, rule="it is a pipe"):
        load_config(tmp_path / "pipe.yaml")


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_examples_are_right(file: Path) -> None:
    load_config(file)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("sft_*.yaml")), ids=lambda file: file.stem)
def test_the_commands_that_an_example_shows_are_right(file: Path) -> None:
    """Unreleased: a whole section was refused, and each of these configs shows `model='{path: ...}'`."""
    head = file.read_text().partition("\nmodel:")[0].replace("\\\n", "").replace("#", "")
    shown = [line.strip() for line in head.splitlines() if "penstock train" in line and "=" in line]
    assert shown
    for line in shown:
        _, _, name, *overrides = shlex.split(line)
        found = load_config(CONFIGS.parent / name, overrides).model
        assert (found.path or "").startswith("models/")
        assert found.config is None


def test_a_section_is_replaced_or_left_out(tmp_path: Path) -> None:
    text = MINIMAL + "adapter: {r: 4, alpha: 2}\n"
    found = loaded(tmp_path, text, "adapter={r: 2}").adapter
    assert found is not None
    assert (found.r, found.alpha) == (2, 32)
    assert loaded(tmp_path, text, "adapter=null").adapter is None


# ---- What a value is


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30", "1:30"), ("1:30.5", "1:30.5"), ("017", 17), ("0o17", 15), ("0x1f", 31), ("0b11", "0b11"),
        ("1_000", "1_000"), ("+7", 7), ("1e3", 1e3), ("1e-3", 1e-3), (".5", 0.5), ("5.", 5.0),
        ("-.inf", -float("inf")),
        ("1e", "1e"), ("yes", True), ("off", False), ("null", None), ("=", "="),
        ("'1'", "1"), ("'1e3'", "1e3"), ("'0o17'", "0o17"), ("2026-02-28", "2026-02-28"),
    ],
)  # fmt: skip
def test_numbers_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    """0.5.0: train.steps=1:30 made 90 steps: PyYAML reads YAML 1.1, where that is a number to the base 60."""
    config = loaded(tmp_path, MINIMAL, f"model.config.key={text}")
    assert config.model.config is not None
    found = config.model.config["key"]
    assert (type(found), found) == (type(value), value)
    same_as_yaml(config)


@pytest.mark.parametrize("key", ["data.path", "adapter", "train.clip_norm", "model.config.key"])
@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "nothing follows the =, as if a shell's variable is not set"),
        (" ", "nothing follows the ="),
        ("~", "~ alone would be null, and not your home"),
        ("-", "- alone would be a list, and nothing is read from standard input"),
    ],
)
def test_a_value_that_nobody_gave_is_refused(tmp_path: Path, key: str, text: str, rule: str) -> None:
    """0.5.0: adapter=$UNSET trained all weights, and data.path=- was called [None]: so YAML reads them."""
    message = refused(tmp_path, MINIMAL, f"{key}={text}")
    assert rule in message
    assert message.endswith(f"Write it out, or {key}=null for none")


def test_minutes_are_no_number_of_steps(tmp_path: Path) -> None:
    """0.5.0: 90 steps."""
    message = "train.steps='1:30': it should be a valid integer. Write a whole number, such as 8"
    assert message in refused(tmp_path, MINIMAL, "train.steps=1:30")
    assert message in refused(tmp_path, MINIMAL + "train: {steps: 1:30}\n")


# ---- A fuzzer of overrides

TEXTS = (
    "1:30", "1e3", "0o17", "017", "1_000", "yes", "off", "~", "", "[", "{a: 1, a: 2}", "!!int x", "*a", "\t",
    "a: b", "&a [*a]", "'", '"', "- a", "=", "a=b", "<<", "!", "@", "`", "%", "? a", "|", ">", "#", "{", "}}",
    "[1, 2", "\udcff", "1 2", "!!python/object:os.system x", "{name: muon}", "{path: x}", "bytes",
    "[{path: x, weight: 2}]",
)  # fmt: skip


def leaves(tree: dict[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield f"{name}{key}", value
        if isinstance(value, dict):
            yield from leaves(value, f"{name}{key}.")


def put(tree: dict[str, Any], key: str, value: Any) -> bool:
    """Put a value over a tree; whether its key leads somewhere."""
    *sections, last = key.split(".")
    if not all((*sections, last)) or (not sections and not (value is None or isinstance(value, dict))):
        return False
    inner: Any = tree
    for section in sections:
        if inner.get(section) is None:
            inner[section] = {}
        inner = inner[section]
        if not isinstance(inner, dict):
            return False
    inner[last] = value
    return True


def outcome(file: Path, overrides: list[str]) -> TrainConfig | None:
    try:
        return load_config(file, overrides)
    except ConfigError:
        return None


# _names: all keys of a config
@pytest.mark.parametrize("cases", CASES)
def test_overrides_are_the_values_that_they_show(tmp_path: Path, cases: range) -> None:
    """A config equals the one that pydantic makes of the same values; or both are refused, ours by name."""
    file, accepted = tmp_path / "config.yaml", 0
    file.write_text(MINIMAL)
    keys, good = list(dict.fromkeys(load._names(TrainConfig))), list(leaves(load_config(file).model_dump()))
    for number in cases:
        with seeded(number) as choices:
            pairs = [pair(choices, keys, good) for _ in range(choices.choice((1, 1, 2, 3)))]
            tree, leads = yaml.safe_load(MINIMAL), True
            for key, value in pairs:
                leads &= put(tree, key, copy.deepcopy(value))
            found = outcome(file, [f"{key}={in_yaml(value)}" for key, value in pairs])
            try:
                expected = TrainConfig.model_validate(tree) if leads else None
            except (ValidationError, RecursionError, UnicodeEncodeError):  # as of half a surrogate pair
                expected = None
            if re.search("u0000|ud800", json.dumps(pairs)):
                assert found is None or found == expected
            else:
                assert repr(found) == repr(expected)  # NaN is not equal to itself
            accepted += found is not None
            outcome(file, [f"{choices.choice(keys)}={choices.choice(TEXTS)}" for _ in range(2)])
    assert accepted > len(cases) / 5


def in_yaml(value: Any) -> str:
    plain = json.loads(json.dumps(value))
    return yaml.dump(plain, Dumper=_Dumper, default_flow_style=True, width=10**6, sort_keys=False)


def test_a_config_is_read_without_torch_and_numpy(tmp_path: Path) -> None:
    """They take seconds to import: an error in a config is raised at once. And they read their number of
    threads once, which `penstock train` sets before it imports them, as its ranks are forks of it."""
    file = tmp_path / "config.yaml"
    file.write_text(MINIMAL)
    code = (
        "import sys; import penstock.cli.main; from penstock.train.config.load import load_config\n"
        f"load_config({str(file)!r}); print({{'torch', 'numpy'}} & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert ran.stdout.strip() == "set()"


def test_keys_of_a_loss_are_named_without_its_kind(tmp_path: Path) -> None:
    tree = {"model": {"path": "m"}, "data": {"path": "x", "kind": "preference"}}
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump({**tree, "train": {"loss": {"kind": "dpo", "betta": 1}}}))
    with refuses(ConfigError, "train.loss.betta=1", rule="section train.loss"):
        load_config(file)
