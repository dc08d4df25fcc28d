# README's two commands: `make train` and `make test`. Each first makes the environment that it needs, in the folder VENV.
# FLAGS are train.py's, as in `make train FLAGS="--data notes/"`.
VENV ?= .venv
.PHONY: train test environment test_environment

train: environment
	$(VENV)/bin/python train.py $(FLAGS)

test: test_environment
	$(VENV)/bin/python -m pytest -q -n 4 --dist worksteal --durations=10

environment: $(VENV)/has_requirements
test_environment: $(VENV)/has_requirements-dev

# Triton compiles its kernels' launchers, with a C compiler and Python's headers.
IS_ENOUGH = import ensurepip, sys, sysconfig; open(sysconfig.get_path('include') + '/Python.h'); assert sys.version_info >= (3, 11)
MISSING = Python 3.11 or newer with venv and headers, or a C compiler, is missing
APT = build-essential python3-venv python3-dev
$(VENV)/bin/pip:
	@command -v cc >/dev/null && python3 -c "$(IS_ENOUGH)" 2>/dev/null || \
	{ echo "error: $(MISSING): sudo apt-get install -y $(APT)" >&2; exit 1; }
	python3 -m venv $(VENV)

$(VENV)/has_requirements: requirements.txt | $(VENV)/bin/pip
	$(VENV)/bin/pip install -r requirements.txt
	touch $@

$(VENV)/has_requirements-dev: requirements.txt requirements-dev.txt | $(VENV)/bin/pip
	$(VENV)/bin/pip install -r requirements.txt -r requirements-dev.txt
	touch $@
