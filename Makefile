# README's two commands: `make train` and `make test`; on a machine with a GPU also `make test_gpu`. Each first makes the
# environment that it needs, in the folder VENV. FLAGS are train.py's, as in `make train FLAGS="--data notes/"`.
VENV ?= .venv
# Processes of tests: one more than cores, since some wait for others' ends; each takes 1 to 2 GB of memory.
JOBS ?= $(shell cores=$$(nproc); echo $$((cores < 7 ? cores + 1 : 8)))
.PHONY: train test test_gpu environment test_environment

train: environment
	$(VENV)/bin/python train.py $(FLAGS)

# Tests without the mark gpu, as on a machine without a GPU.
test: test_environment
	@echo "tests: $(JOBS) processes look for them first, silent for a minute or two, longer on a busy machine"
	$(VENV)/bin/python -m pytest -q -n $(JOBS) --dist worksteal --durations=10

# Tests with the mark gpu. What the GPU cannot hold is skipped by name, see tests/gpu.py.
SEES_A_GPU = import torch, sys; sys.exit(not torch.cuda.is_available())
NO_GPU = error: PyTorch sees no CUDA GPU here; check nvidia-smi. make test needs none
test_gpu: test_environment
	@$(VENV)/bin/python -c "$(SEES_A_GPU)" || { echo "$(NO_GPU)" >&2; exit 1; }
	@echo "tests of a GPU: the processes look for them first, silent for a minute or two"
	$(VENV)/bin/python -m pytest -m gpu -n auto --dist worksteal --durations=10 -rs

environment: $(VENV)/has_requirements
test_environment: $(VENV)/has_requirements-dev

# Triton compiles its kernels' launchers, with a C compiler and Python's headers.
APT = build-essential python3-venv python3-dev
IS_NEW = import sys; assert sys.version_info >= (3, 11)
HAS_HEADERS = import sysconfig; open(sysconfig.get_path('include') + '/Python.h')
$(VENV)/bin/pip:
	@missing=; lacks() { missing="$$missing$${missing:+, }$$1"; }; \
	python3 -c "$(IS_NEW)" 2>/dev/null || lacks "Python 3.11 or newer"; \
	python3 -c "import ensurepip" 2>/dev/null || lacks "Python's venv"; \
	python3 -c "$(HAS_HEADERS)" 2>/dev/null || lacks "Python's headers"; \
	command -v cc >/dev/null || lacks "a C compiler"; \
	if [ "$$(id -u)" = 0 ]; then how="run "; sudo=; \
	elif command -v sudo >/dev/null; then how="run "; sudo="sudo "; \
	else how="have root run "; sudo=; fi; \
	command -v apt-get >/dev/null && how="$$how$${sudo}apt-get update && $${sudo}apt-get install -y $(APT)" || \
	how="install what your system has in place of Debian's $(APT)"; \
	[ -z "$$missing" ] || { echo "error: missing: $$missing; $$how" >&2; exit 1; }
	python3 -m venv $(VENV)

$(VENV)/has_requirements: requirements.txt | $(VENV)/bin/pip
	@echo "pip: downloads 3 GB, then installs them without a word for about two minutes"
	$(VENV)/bin/pip install -r requirements.txt
	touch $@

$(VENV)/has_requirements-dev: requirements.txt requirements-dev.txt | $(VENV)/bin/pip
	@echo "pip: downloads 3 GB, then installs them without a word for about two minutes"
	$(VENV)/bin/pip install -r requirements.txt -r requirements-dev.txt
	touch $@
