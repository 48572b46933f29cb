# Two commands do everything on a fresh machine: `make train` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
STDLIB = $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('stdlib'))")

# keep the bytecode of the source, whatever the environment says: the tests start many processes
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help env train test lint types tests test-fast oldest mutants coverage sweep parallel faults soak bench validate gpu docs docs-pages pictures clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

env: .venv/ready  ## Make .venv with everything that the other targets need

# torch first and alone: with it in place no other package's open range pulls in another build of it
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs]"
# apart: transformers imports it wherever it is installed, .8 s of each process; tests of it put this folder on their path
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target .venv/torchao torchao
	touch $@

train: env  ## Train a small Qwen3 on the Python standard library's source, over two ranks
	$(BIN)/penstock train configs/stdlib.yaml data.path="$(STDLIB)"

test: env  ## All checks; mypy beside the tests, as it keeps one core busy
	$(MAKE) lint
	$(MAKE) --jobs 2 types tests

lint: env  ## Style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env  ## Static types, strict
	$(BIN)/mypy

tests: env  ## The test suite: three processes keep two cores busy, as many tests wait for others
	$(BIN)/pytest --numprocesses 3 --dist loadgroup

test-fast: env  ## The inner loop: a case of each test that starts no process and was short when it last ran
	$(BIN)/pytest --fast --numprocesses 2

# PyPI's ordinary torch: with CUDA's libraries, 6 GB on the disk; it runs on a CPU. torchao apart, as above
.oldest/ready: pyproject.toml tests/oldest.py
	$(PYTHON) -m venv .oldest
	$(PYTHON) tests/oldest.py dependencies dev > .oldest/requirements.txt
	$(PYTHON) tests/oldest.py low-bits > .oldest/apart.txt
	.oldest/bin/python -m pip install --quiet --requirement .oldest/requirements.txt --editable .
	.oldest/bin/python -m pip install --quiet --no-deps --target .oldest/torchao --requirement .oldest/apart.txt
	touch $@

oldest: .oldest/ready  ## The test suite on the oldest versions that pyproject.toml promises; once a release
	.oldest/bin/pytest --numprocesses 3 --dist loadgroup

mutants: env  ## Break the code in one place at a time: a test must notice each; about an hour
	$(BIN)/python tests/mutants.py

coverage: env  ## Branch coverage of the test suite, in all its processes
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --numprocesses 3 --dist loadgroup
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# a gigabyte, for one test, which runs Liger's kernels in Triton's interpreter
.venv/liger: .venv/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $@ liger-kernel triton

sweep: env .venv/liger  ## The whole equivalence matrix over real processes: two hours on two cores
	$(BIN)/pytest -m sweep --timeout 900 --numprocesses 2 --dist loadgroup

parallel: env  ## The pipeline beside every other axis, on eight processes: twenty minutes on two cores
	$(BIN)/pytest -m parallel --timeout 600

faults: env  ## Strike runs at set places and write docs/faults.md; five minutes on two quiet cores
	$(BIN)/pytest -m fault --faults tests/faults/results.json --numprocesses 2 --dist loadgroup
	$(BIN)/python docs/faults.py

soak: env  ## 5,000 steps with a rank killed every 200, compared with an undisturbed run; three minutes
	$(BIN)/python tests/soak.py

bench: env  ## Measure penstock and others into benchmarks/results/; two hours, quiet
	$(BIN)/python -m benchmarks

validate: env  ## Predict published runs and print what was measured beside it; some minutes
	$(BIN)/python -m benchmarks.validate

gpu: env  ## Measure on one GPU, each bar in a table: four parts of 9 minutes at most; nothing without one
	$(BIN)/python -m benchmarks.gpu

docs: env  ## Write the pages that come from the source, then build the site into site/, strictly
	$(BIN)/python docs/config.py
	$(BIN)/python docs/schedules.py
	$(BIN)/python docs/architecture.py
	$(BIN)/python docs/counts.py
	$(BIN)/python docs/api.py
	$(BIN)/python docs/faults.py
	$(BIN)/python -m benchmarks.page
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-pages: env  ## Write docs/models.md by cutting every model of the installed transformers
	PYTHONPATH=tests $(BIN)/python docs/models.py

pictures: env  ## Draw the README's pictures and check the HTML page in Chromium; `make train` draws the first
	$(BIN)/python examples/afab.py --ranks 4 --out docs/pictures
	$(BIN)/python examples/one_f_one_b.py --ranks 4 --out docs/pictures
	rm docs/pictures/*.txt
	cp runs/stdlib/timeline.svg docs/pictures/train.svg
	PYTHONPATH=examples $(BIN)/python docs/measure.py runs/measured.html
	$(BIN)/python docs/draw.py docs/pictures --measured runs/measured.html --run runs/stdlib

clean:  ## Remove what the other targets made
	rm -rf .venv .oldest runs site build .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis
