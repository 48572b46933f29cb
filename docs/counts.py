"""Count what a reader of the source meets, for the table in docs/architecture.md.

    python docs/counts.py                    write the column "now" of the table
    python docs/counts.py --check            exit 1 where the column is not the code's
    python docs/counts.py --check-source     the same, without a build and a step, which take seconds
    python docs/counts.py --of CHECKOUT      print the counts of another checkout, as for the column "before"

Lines are rounded to hundreds, so that a small change does not change the page.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- counts -->\n", "<!-- end of counts -->\n"
WIDEST = ("pipeline/auto_pipeline", "train/run")
# every way in which one rank's error has come to the others
AGREEMENT = re.compile(
    r"\b(shared_errors|first_error|in_words|RefusedBatch|_agreed|_all_or_none|_first_alone|first_problem|together"
    r"|shake_hands|compare_values|_longest|_told_to_all|same_call)\(|\.(agree|settle)\(|@collective"
    r"|\branks\.(same|attempt)\("
)
_TYPE = re.compile(r"[A-Z](?=\w*[a-z])[A-Za-z0-9]*")
# run in a process of its own, as the source of another checkout is to be imported
TRACE = """
import json, sys, torch, transformers
from pathlib import Path
import penstock
from penstock import AutoPipeline

LAYER = transformers.models.llama.modeling_llama.LlamaDecoderLayer.forward.__code__
package, names = Path(penstock.__file__).parent, {}

def name(code):
    file = code.co_filename
    if file not in names:
        inside = package in Path(file).parents and Path(file).stem != "__init__"
        names[file] = str(Path(file).relative_to(package)) if inside else ""
    return names[file]

def counted(work):
    files, frames = set(), []
    def see(frame, event, argument):
        if event != "call":
            return
        if file := name(frame.f_code):
            files.add(file)
        elif not frames and frame.f_code is LAYER:
            while frame is not None:
                if file := name(frame.f_code):
                    frames.append(file)
                frame = frame.f_back
    sys.settrace(see)
    try:
        result = work()
    finally:
        sys.settrace(None)
    return result, files, frames

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=2)
ids = torch.arange(32).reshape(4, 8)
batch = {"input_ids": ids, "labels": ids}
make = AutoPipeline(ranks=2, schedule="1f1b", microbatches=4)
pipe, build, _ = counted(lambda: make.build(transformers.LlamaForCausalLM(config)))
pipe.step(batch)
_, step, frames = counted(lambda: pipe.step(batch))
print(json.dumps([len(build), len(step), len(frames), len(set(frames))]))
"""
ROWS = (
    "lines of Python",
    "files",
    "type names with two meanings",
    "`found`, `each`, `number` bound",
    "lines by which one rank's error reaches the others",
    "names that `pipeline/auto_pipeline.py` imports, from files",
    "names that `train/run.py` imports, from files",
    "functions with more than 8 parameters",
    "stack frames from `pipe.step` to the first layer, in files",
    "files that a build passes through",
    "files that a step passes through",
)
RUN = ROWS[-3:]  # of a build and a step


def counts(checkout: Path, traced: Sequence[str] = ()) -> dict[str, str]:
    """Each row of the table, in words.

    checkout: a folder with ``src/penstock``
    traced: the values of the rows `RUN`, where they are not to be measured
    """
    package = checkout / "src" / "penstock"
    sources = {
        str(path.relative_to(package).with_suffix("")): path.read_text(encoding="utf-8")
        for path in sorted(package.rglob("*.py"))
    }
    trees = {file: ast.parse(text) for file, text in sources.items()}
    bound = Counter(name for tree in trees.values() for name in _bound(tree))
    values = (
        f"{round(sum(len(text.splitlines()) for text in sources.values()), -2):,}",
        str(len(sources)),
        str(_two_meanings(trees)),
        ", ".join(str(bound[name]) for name in ("found", "each", "number")),
        str(sum(bool(AGREEMENT.search(line)) for text in sources.values() for line in text.splitlines())),
        *(f"{names} from {homes}" for names, homes in (_imports(trees[file]) for file in WIDEST)),
        str(sum(_parameters(node) > 8 for tree in trees.values() for node in ast.walk(tree))),
        *(traced or _traced(package.parent)),
    )
    folders: Counter[str] = Counter()
    for file, text in sources.items():
        folders[file.split("/")[0] if "/" in file else "files beside the folders"] += len(text.splitlines())
    lines = {f"lines in `{name}`": f"{round(lines, -2):,}" for name, lines in folders.most_common()}
    return dict(zip(ROWS, values, strict=True)) | lines


def _bound(tree: ast.AST) -> Iterator[str]:
    """The names of variables and parameters that a file gives something, once for each time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def _two_meanings(trees: Mapping[str, ast.Module]) -> int:
    """Public classes and CapWord aliases that two files define."""
    homes: dict[str, set[str]] = defaultdict(set)
    for file, tree in trees.items():
        for node in tree.body:
            names: list[str] = []
            if isinstance(node, ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            for name in filter(_TYPE.fullmatch, names):
                homes[name].add(file)
    return sum(len(files) > 1 for files in homes.values())


def _imports(tree: ast.AST) -> tuple[int, int]:
    """The names of penstock that a file imports, and the number of files that they come from."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    own = [node for node in nodes if (node.module or "").startswith("penstock")]
    return sum(len(node.names) for node in own), len({node.module for node in own})


def _parameters(node: ast.AST) -> int:
    if not isinstance(node, ast.FunctionDef):
        return 0
    return len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])


def _traced(source: Path) -> list[str]:
    """The values of the rows `RUN`.

    source: the folder to import penstock from; two ranks in one process run 1F1B
    """
    ran = subprocess.run(
        [sys.executable, "-c", TRACE],
        env=os.environ | {"PYTHONPATH": str(source)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    build, step, frames, files = json.loads(ran.stdout.splitlines()[-1])
    return [f"{frames} in {files}", str(build), str(step)]


def _now(text: str, row: str) -> str:
    """What the page has in its last column of a row."""
    (value,) = re.findall(rf"^\| {re.escape(row)} \| .* \| (.*) \|$", text, re.MULTILINE)
    return str(value)


def page(text: str, now: Mapping[str, str]) -> str:
    """The page with `now` in its last column. A row's columns before it are kept; a new row has none."""
    head, _, rest = text.partition(BEGIN)
    table, _, tail = rest.partition(END)
    title, rule, *rows = table.splitlines()
    before = {}
    for row in rows:
        name, then, _ = (cell.strip() for cell in row.strip("|").split(" | "))
        before[name.strip()] = then
    lines = [f"| {name} | {before.get(name, 'new')} | {value} |" for name, value in now.items()]
    return head + BEGIN + "\n".join([title, rule, *lines, ""]) + END + tail


if __name__ == "__main__":
    if "--of" in sys.argv[1:]:
        for row, value in counts(Path(sys.argv[-1])).items():
            print(f"| {row} | {value} |")
        sys.exit()
    old = PAGE.read_text(encoding="utf-8")
    known = [_now(old, row) for row in RUN] if "--check-source" in sys.argv[1:] else []
    new = page(old, counts(ROOT, known))
    if {"--check", "--check-source"} & {*sys.argv[1:]}:
        sys.exit("the counts are not the code's: run python docs/counts.py" if old != new else 0)
    PAGE.write_text(new, encoding="utf-8")
