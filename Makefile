# Plain `make` lists the targets. Everything happens in .venv; nothing else is touched.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# The stamp holds the path of the checkout, because the scripts in .venv hold it too: a checkout
# that was moved or copied, or whose Python is gone, is installed anew.
ifneq ($(shell [ -x $(BIN)/python ] && cat $(STAMP) 2>/dev/null),$(shell pwd -P))
$(shell rm -f $(STAMP))
endif

.PHONY: help install lab test browser lesson notebooks bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

install: $(STAMP)  ## make the environment .venv and install the kit into it
	@echo "ddp_kit is installed in .venv. Next: make lab"

# A .venv whose pip does not run, or says that it lives elsewhere, is made again.
$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/pip --version 2>/dev/null | grep -qF "$$(pwd -P)/.venv/" && exit; \
	if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	    found=$$($(PYTHON) --version 2>&1) || found="not there"; \
	    echo "ddp_kit needs Python 3.10 or newer, and $(PYTHON) is $$found;" \
	        "name another, as in: make install PYTHON=python3.12" >&2; exit 1; fi; \
	if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "$(PYTHON) cannot make environments;" \
	        "on Debian and Ubuntu this mends it: apt install python3-venv" >&2; exit 1; fi; \
	rm -rf .venv && $(PYTHON) -m venv .venv
	@rm -f $(STAMP)
	@echo "Installing PyTorch, JupyterLab and ddp_kit into .venv. The first time takes minutes."
	@[ -t 1 ] || quiet=--quiet; \
	$(BIN)/python -m pip install $$quiet -c constraints.txt -e ".[test]"
	@pwd -P > $(STAMP)

# The PATH is for JupyterLab's terminals, where a learner calls torchrun.
lab: $(STAMP)  ## open JupyterLab on notebooks/
	@[ "$$(id -u)" != 0 ] || root=--allow-root; \
	PATH="$$(pwd -P)/$(BIN):$$PATH" \
	exec $(BIN)/python -m jupyterlab --ServerApp.root_dir=notebooks $$root

test: $(STAMP)  ## check style, imports, tests and every cell of every notebook
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports
	@$(BIN)/python -m compileall -q ddp_kit  # else every rank does, where Python writes no bytecode
	@$(BIN)/python -m pytest -n 2 --dist loadfile

browser: $(STAMP)  ## the tests in a real JupyterLab, every notebook included; they need Chromium
	@$(BIN)/python -m pytest -m "long or not long" -n 2 --dist load tests/browser

lesson: $(if $(wildcard ddp_kit/lessons/$(NAME).py),$(STAMP))  ## run one: NAME=ring_allreduce ARGS="--world-size 2"
	@if [ -f "ddp_kit/lessons/$(NAME).py" ]; then \
	    exec $(BIN)/python -m ddp_kit.lessons.$(NAME) $(ARGS); fi; \
	[ -z "$(NAME)" ] || echo "There is no lesson $(NAME)." >&2; \
	echo "Run a lesson with make lesson NAME=..., where NAME is one of"; \
	for file in ddp_kit/lessons/[!_]*.py; do [ ! -f "$$file" ] || \
	    printf '  %-16s %s\n' "$$(basename "$$file" .py)" \
	        "$$(sed -n '1{s/^"""//; s/"""$$//; p;}' "$$file")"; done; \
	[ -z "$(NAME)" ]

notebooks: $(STAMP)  ## execute every notebook again, in place
	@$(BIN)/python tests/notebooks/regenerate.py

bench: $(STAMP) $(if $(PEERS),.venv-peers/.installed)  ## measure the speed; PEERS=1 beside others, ARGS=--record keeps it
	@$(BIN)/python tests/benchmarks/bench.py $(if $(PEERS),--peers .venv-peers/bin/python) $(ARGS)

# It sees the packages of .venv, so that torch is there once. A peer that does not install is
# left out; the table says so.
.venv-peers/.installed: $(STAMP) tests/benchmarks/requirements.txt
	@rm -rf .venv-peers && $(BIN)/python -m venv .venv-peers
	@packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(BIN)/python -c "$$packages" > "$$(.venv-peers/bin/python -c "$$packages")/kit.pth"
	@grep -v '^#' tests/benchmarks/requirements.txt | while read -r peer; do \
	    .venv-peers/bin/python -m pip install --quiet "$$peer" || echo "$$peer is left out" >&2; done
	@touch $@

clean:  ## remove .venv and every cache
	@rm -rf .venv .venv-peers .ruff_cache .pytest_cache .mypy_cache .import_linter_cache build dist *.egg-info
	@find ddp_kit tests notebooks \( -name __pycache__ -o -name .ipynb_checkpoints \) \
	    -prune -exec rm -rf {} +
