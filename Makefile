# Plain `make` lists the targets. Everything is installed into .venv, and nothing outside the
# checkout changes. With TORCH=2.x.y every target works in an environment of its own,
# .venv-torch-2.x.y, which has that PyTorch instead of the pinned one.

PYTHON ?= python3
VENV := .venv$(TORCH:%=-torch-%)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Each rank and each test is a Python of its own, and would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
# Processes in which `make test` runs tests: two for each of two cores, because tests also wait.
# Four need up to 11 GB of memory; with less, take three.
WORKERS ?= 4

# The stamp holds the path of the checkout, because the scripts in the environment hold it too:
# after the checkout is moved or copied, or its Python is removed, everything is installed again.
ifneq ($(shell [ -x $(BIN)/python ] && cat $(STAMP) 2>/dev/null),$(shell pwd -P))
$(shell rm -f $(STAMP))
endif

.PHONY: help install lab check test style spawned long browser recording lesson editions notebooks book bench gpu verdicts clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

install: $(STAMP)  ## create the environment .venv and install the kit into it
	@echo "ddp_kit is installed in $(VENV). Next: make lab"

# An environment whose pip does not run, or that was moved here, is created again.
$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/pip --version 2>/dev/null | grep -qF "$$(pwd -P)/$(VENV)/" && exit; \
	if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	    found="$(PYTHON) is $$($(PYTHON) --version 2>&1)" || found="$(PYTHON) was not found"; \
	    echo "ddp_kit needs Python 3.10 or newer, but $$found." \
	        "To use another Python: make install PYTHON=python3.12" >&2; exit 1; fi; \
	if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "$(PYTHON) cannot create virtual environments." \
	        "To fix it on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; fi; \
	echo "Creating $(VENV)."; \
	rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
	@rm -f $(STAMP)
	@echo "Installing PyTorch$(TORCH:%= %), JupyterLab and ddp_kit into $(VENV)." \
	    "The first time takes minutes."
	@[ -t 1 ] || quiet=--quiet; \
	[ -z "$(TORCH)" ] || grep -v '^torch' constraints.txt > $(VENV)/constraints.txt; \
	$(BIN)/python -m pip install $$quiet $(TORCH:%=torch==%) -e ".[test]" \
	    -c $(if $(TORCH),$(VENV)/)constraints.txt && exit; \
	[ -z "$(TORCH)" ] || echo "PyTorch $(TORCH) could not be installed with ddp_kit." \
	    "pip's error above says why, and which versions exist." >&2; \
	exit 1
	@pwd -P > $(STAMP)

# The PATH is for JupyterLab's terminals, in which a learner calls torchrun.
lab: $(STAMP)  ## open JupyterLab on your copy of the course, in course/; DIR=notebooks: on the solved one
	@[ -n "$(DIR)" ] || $(BIN)/python -m ddp_kit.course copy course
	@echo "Opening JupyterLab on $(or $(DIR),course)/, which takes some seconds. Ctrl-C ends it."
	@[ "$$(id -u)" != 0 ] || root=--allow-root; \
	PATH="$$(pwd -P)/$(BIN):$$PATH" \
	exec $(BIN)/python -m jupyterlab --ServerApp.root_dir="$(or $(DIR),course)" \
	    --LabApp.default_url=/lab/tree/00_start_here.ipynb $$root

# A lesson under each launcher: spawn, torchrun, mpiexec; and what needs no ranks.
QUICK := notebooks/00_start_here.ipynb tests/test_verdict.py tests/test_errors.py \
    'tests/lessons/test_every_lesson.py::test_main_prints_its_one_line_and_writes_its_traces[ring_allreduce-4]' \
    tests/lessons/test_every_lesson.py::test_a_lesson_runs_under_torchrun_as_the_readme_says \
    tests/lessons/test_under_mpiexec.py::test_a_lesson_runs_as_the_readme_says

style: $(STAMP)  ## check style, imports and the types of the public names
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports
	@$(BIN)/mypy

check: style  ## the quick checks: style, public types, one notebook, a lesson under each launcher
	@$(BIN)/python -m pytest -n 2 --dist load $(QUICK)

# Only ALL=1 runs these. They need Chromium or network namespaces, look at what a kill leaves of many
# real processes, run the lessons' modules and scripts once more, which the notebooks do too, run the
# examples of the guide, run the kit on other launchers and backends, give the graders of exercises
# wrong answers, do a project, judge 10,000 random programs, look at the display, the doctor, the data
# or the site, or are about PyTorch itself.
ONLY_ALL := $(addprefix tests/, benchmarks browser check cluster course faults lessons projects \
    wrong_programs notebooks/test_scripts.py test_backend_pools.py test_book.py test_controls.py \
    test_data.py test_debugger.py test_doctor.py test_hosting.py test_live_view.py test_mpi.py \
    test_random_verdicts.py test_readme.py test_rich_output.py test_shm.py test_status.py \
    test_torch_internals.py test_torchrun.py test_warm_start.py)

test: style $(if $(ALL),$(VENV)-graders/.installed)  ## check style, types, tests and every lesson; ALL=1: as CI does; TORCH=2.x.y: with that PyTorch
	@echo "$(if $(ALL),Running all tests and lessons: about 40,Running the tests and lessons: about 10) minutes on two idle cores."
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	    $(patsubst %,--ignore=%,$(if $(ALL),$(SPAWNED),$(ONLY_ALL)))
	@[ -z "$(ALL)" ] || $(MAKE) --no-print-directory spawned

# Learners' ranks are spawned; most tests fork theirs, because that is faster. With ALL=1 these run
# with spawned ranks alone.
SPAWNED := tests/test_pool.py tests/test_magics.py tests/test_live_view.py \
    $(addprefix notebooks/, 00_start_here.ipynb 01_point_to_point.ipynb 08_ddp.ipynb)

spawned: $(STAMP)  ## run the pool's tests and three notebooks with ranks that are spawned, as a learner's are
	@DDP_KIT_SPAWNED=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(SPAWNED)

long: $(STAMP) $(VENV)-graders/.installed  ## run the tests that repeat others: more notebooks, scripts and world sizes
	@$(BIN)/python -m pytest -m long -n 2 --dist load

browser: $(STAMP)  ## run the tests in a real JupyterLab, with every notebook; needs Chromium
	@$(BIN)/python -m pytest -m "long or not long" -n 2 --dist load tests/browser

recording: $(STAMP)  ## record the README's moving picture in JupyterLab; needs Chromium
	@PYTHONPATH=tests:tests/notebooks $(BIN)/python tests/browser/record.py

lesson: $(if $(wildcard ddp_kit/lessons/$(NAME).py),$(STAMP))  ## run one lesson: NAME=ring_allreduce ARGS="--world-size 2"
	@if [ -f "ddp_kit/lessons/$(NAME).py" ]; then \
	    echo "Running the lesson $(NAME): 10 to 30 s on two idle cores." >&2; \
	    exec $(BIN)/python -m ddp_kit.lessons.$(NAME) $(ARGS); fi; \
	[ -z "$(NAME)" ] || echo "There is no lesson named $(NAME)." >&2; \
	echo "Run a lesson with make lesson NAME=..., where NAME is one of"; \
	for file in ddp_kit/lessons/[!_]*.py; do [ ! -f "$$file" ] || \
	    printf '  %-20s %s\n' "$$(basename "$$file" .py)" \
	        "$$(sed -n '2{s/^"""//; s/"""$$//; p;}' "$$file")"; done; \
	[ -z "$(NAME)" ]

editions: $(STAMP)  ## make the modules, scripts and exercises again from the notebooks
	@$(BIN)/python -m ddp_kit.course.editions

notebooks: $(STAMP)  ## execute every notebook again and save it
	@$(BIN)/python tests/notebooks/regenerate.py

book: .venv-book/.installed  ## build the course as a site in build/book; SOLUTIONS=no leaves the solutions out
	@echo "Building the site, which takes some minutes."
	@.venv-book/bin/python docs/build.py $(if $(filter no,$(SOLUTIONS)),--without-solutions)
	@echo "The site is in build/book. Open build/book/index.html."

# The site needs neither PyTorch nor the kit: it shows the outputs that the notebooks hold.
.venv-book/.installed: docs/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "The site needs" \
	    "Python 3.11 or newer. To use another Python: make book PYTHON=python3.12" >&2; exit 1; }
	@rm -rf .venv-book && $(PYTHON) -m venv .venv-book
	@.venv-book/bin/python -m pip install --quiet -r docs/requirements.txt
	@touch $@

bench: $(STAMP) $(if $(PEERS),$(VENV)-peers/.installed)  ## measure the speed; PEERS=1 compares with other tools, ARGS=--record saves the result
	@$(BIN)/python tests/benchmarks/bench.py $(if $(PEERS),--peers $(VENV)-peers/bin/python) $(ARGS)

gpu: $(STAMP)  ## run every lesson on the GPUs of this machine; writes tests/benchmarks/GPU.md
	@$(BIN)/python tests/benchmarks/gpu.py

verdicts: $(STAMP)  ## run the wrong programs under each tool, and PyTorch's own tests under the kit; ARGS=--record saves the result
	@$(BIN)/python tests/wrong_programs/score.py $(ARGS)
	@[ -n "$(filter-out --record,$(ARGS))" ] || $(BIN)/python tests/wrong_programs/torch_suite.py $(ARGS)

# It sees the packages of the kit's environment, so that torch is installed only once. A peer that
# cannot be installed is left out, and the table says so.
$(VENV)-peers/.installed: $(STAMP) tests/benchmarks/requirements.txt
	@rm -rf $(VENV)-peers && $(BIN)/python -m venv $(VENV)-peers
	@packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(BIN)/python -c "$$packages" > "$$($(VENV)-peers/bin/python -c "$$packages")/kit.pth"
	@grep -v '^#' tests/benchmarks/requirements.txt | while read -r peer; do \
	    $(VENV)-peers/bin/python -m pip install --quiet "$$peer" || echo "$$peer is left out" >&2; done
	@touch $@

# nbgrader and Otter-Grader, whose extensions would change the JupyterLab of .venv. If they cannot be
# installed, their tests are skipped, and pytest says so.
$(VENV)-graders/.installed: $(STAMP) tests/course/requirements.txt
	@echo "Installing nbgrader and Otter-Grader into $(VENV)-graders, for the tests."
	@rm -rf $(VENV)-graders && $(BIN)/python -m venv $(VENV)-graders
	@packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(BIN)/python -c "$$packages" > "$$($(VENV)-graders/bin/python -c "$$packages")/kit.pth"
	@$(VENV)-graders/bin/python -m pip install --quiet -r tests/course/requirements.txt \
	    -c constraints.txt && touch $@ || echo "The grading tools are left out." >&2

clean:  ## remove every environment and every cache
	@rm -rf .venv .venv-peers .venv-graders .venv-book .venv-torch-* .ruff_cache .pytest_cache .mypy_cache .import_linter_cache build dist *.egg-info
	@find ddp_kit tests notebooks \( -name __pycache__ -o -name .ipynb_checkpoints \) \
	    -prune -exec rm -rf {} +
