# Two commands on a fresh machine: `make report` and `make test`. Both set up .venv by themselves.
# make turns every failure into exit code 2; ask `.venv/bin/python -m rlkernel` where codes matter.

PYTHON ?= python3
TARGET ?=
FORCE  ?=
ARGS   ?=
NB     ?=
FILE   ?=
RUN    ?=
ALL    ?=

RL = .venv/bin/python -m rlkernel
PYTEST = .venv/bin/python -m pytest
# One process measures for these: what a test of an experiment has launched, the report reads.
REPORTED = tests/audit tests/experiments tests/pages
SYNCED = $(if $(filter output-sync,$(.FEATURES)),-Otarget)

# Hundreds of processes import the package: it is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup report test preflight lab notebook sweep readme publish refresh counters submission clean

help:  ## this list
	@echo "rlkernel: make WHAT [NAME=VALUE ...]"
	@echo
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1|\2/p' Makefile | \
	  while IFS='|' read -r name text; do printf '  %-10s %s\n' $$name "$$text"; done
	@echo
	@echo "  PYTHON=python3.12       the Python to build .venv with (3.10 to 3.13; default python3)"
	@echo "  TARGET=cpu|cuda|rocm    the requirements to install; default: what the machine has"

setup:  ## build .venv from the pinned requirements, if it is not exactly that already
	@$(PYTHON) env/build_venv.py --target "$(TARGET)"

report: setup  ## run every notebook, render results/report/index.html; FORCE=1 measures all again
	@$(RL) report $(if $(filter-out 0,$(FORCE)),--force) $(ARGS)

# Launches wait for their ranks: two halves beside each other keep two cores busy. Each is printed
# when it ends.
test: setup .venv/triton36/triton  ## the whole suite; ARGS="-k grid -x" goes to pytest
	@$(if $(ARGS),$(PYTEST) $(ARGS),$(MAKE) -j2 $(SYNCED) --no-print-directory .reported .others)

.PHONY: .reported .others
.reported:
	@$(PYTEST) $(REPORTED)

.others:
	@$(PYTEST) $(addprefix --ignore=,$(REPORTED))

# The kernels are compiled by this Triton too; a platform that has no wheel of it skips those tests.
.venv/triton36/triton: env/requirements-triton36.txt | setup
	@.venv/bin/python -m pip install --quiet --no-deps --upgrade --target .venv/triton36 -r $< || true
	@touch -c $@

preflight: setup  ## what can this machine measure? ARGS="--json"
	@$(RL) preflight $(ARGS)

# A container's only user is often root, whom Jupyter refuses unless told.
lab: setup  ## JupyterLab on the notebooks; ARGS go to it
	@.venv/bin/python -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) --notebook-dir . $(ARGS) notebooks

notebook: setup  ## one notebook through papermill: NB=01_tp_swiglu ARGS="-p nproc 2"
	@test -n "$(NB)" || { echo 'which one? make notebook NB=01_tp_swiglu ARGS="-p nproc 2"'; exit 2; }
	@$(RL) notebook "$(if $(filter %.ipynb,$(NB)),$(NB),notebooks/$(NB).ipynb)" $(ARGS)

sweep: setup  ## a grid of parameters, resumable, one index table: FILE=notebooks/sweeps/tp_swiglu.yaml
	@test -n "$(FILE)" || { echo 'which one? make sweep FILE=notebooks/sweeps/tp_swiglu.yaml'; exit 2; }
	@$(RL) sweep "$(FILE)" $(ARGS)

readme: setup  ## write the README's block of numbers anew from results/published
	@$(RL) readme $(ARGS)

publish: setup  ## copy a finished run into results/published, scrubbed: RUN=results/tp-swiglu/...
	@test -n "$(RUN)" || { echo 'which one? make publish RUN=results/tp-swiglu/...'; exit 2; }
	@$(RL) publish "$(RUN)" $(ARGS)

refresh: setup  ## measure published records anew by their own commands: ARGS="--stale 'ws2/*'"
	@$(RL) refresh $(ARGS)

# Its CUPTI is newer than the one that torch pins, so it stands beside the packages, not among them.
# Where it cannot be had, pip says why, and the command below what it measures without: nothing.
.venv/counters/cupti: env/requirements-counters.txt | setup
	@.venv/bin/python -m pip install --quiet --no-deps --upgrade --target .venv/counters -r $< && touch -c $@ || true

counters: setup .venv/counters/cupti  ## hardware counters of a GPU: ARGS="--what sharing"
	@$(RL) counters $(ARGS)

submission: setup  ## proposal, report and code ZIP of the overlap question, from fresh records
	@$(RL) submission $(ARGS)

clean:  ## remove .venv, caches and results/report; your runs stay (ALL=1 removes them as well)
	rm -rf .venv results/report build rlkernel.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name .git -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
ifeq ($(ALL),1)
	find results -mindepth 1 -maxdepth 1 ! -name README.md ! -name published -exec rm -rf {} +
endif
