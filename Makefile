# `make demo` shows the product, `make test` proves it. All they need lands in .venv and is installed once.

VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-quick test-long test-fresh lint format bench chaos soak docs docs-serve docs-table screenshots sbom hashes clean distclean

help:
	@echo "make demo        install and run the demo on the embedded server"
	@echo "make test        install what is missing, then run all checks and tests, minutes"
	@echo "make test-quick  the checks, and the tests of the units and of the queue on one server, in 90 s"
	@echo "make test-long   what is slower: three-node clusters, installations into empty environments, the long chaos"
	@echo "make test-fresh  demo and test on minimal Debian systems (root, debootstrap); FRESH=user: one of them"
	@echo "make lint        the checks that need no server"
	@echo "make format      rewrite the code as the format check wants it"
	@echo "make docs        build the documentation site: build/site; make docs-serve shows it and follows changes"
	@echo "make docs-table  rewrite what is generated: pages of requirements, command line, licences; blocking classes"
	@echo "make screenshots take the pictures of the dashboard anew: docs/images"
	@echo "make sbom        write a bill of materials of what is installed here: build/sbom.cdx.json"
	@echo "make hashes      rewrite the hashes of what the commands install, after a version or a dependency has changed"
	@echo "make chaos       the long form of every test that has one; CHAOS=\"-k kafka\": some of them"
	@echo "make soak        an hour of mixed load with a fault every minute; what grows or is lost; SOAK=180: seconds"
	@echo "make bench       measure bullpen and its peers, more than an hour; make bench BENCH=--quick: minutes"
	@echo "make clean       remove results and caches; make distclean: the environments too"

demo: $(VENV)/.demo-installed
	$(BIN)/bullpen demo

test: $(VENV)/.dev-installed
	$(BIN)/python -m tools.setup_test_machine
	$(BIN)/python -m tools.check

test-quick: $(VENV)/.dev-installed
	$(BIN)/python -m tools.check --quick

test-long: $(VENV)/.dev-installed
	$(BIN)/python -m tools.setup_test_machine
	$(BIN)/python -m tools.check --long
	$(MAKE) chaos

test-fresh: | $(BIN)/python
	$(BIN)/python -m tools.fresh_machine $(FRESH)

lint: $(VENV)/.dev-installed
	$(BIN)/python -m tools.check --static

format: $(VENV)/.dev-installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The variable silences an advertisement of the theme, which would be printed at each build.
docs: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-serve: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

docs-table: $(VENV)/.dev-installed
	$(BIN)/python -m tools.blocking_faces
	$(BIN)/python -m tools.requirements_table
	$(BIN)/python -m tools.cli_reference
	$(BIN)/python -m tools.licences

screenshots: $(VENV)/.dev-installed
	$(BIN)/python -m tools.setup_test_machine
	$(BIN)/python -m tools.screenshots

sbom: $(VENV)/.dev-installed
	$(BIN)/python -m tools.licences --sbom build/sbom.cdx.json

# What is installed here says what needs what: after a new dependency, pip install it here first.
hashes: | $(BIN)/python
	$(BIN)/python -m tools.hashes

chaos: $(VENV)/.dev-installed
	$(BIN)/python -m tools.setup_test_machine
	$(BIN)/python -m tools.chaos $(CHAOS)

# An hour, or SOAK=180: three minutes, to see that it runs.
soak: $(VENV)/.dev-installed
	$(BIN)/python -m tools.setup_test_machine
	$(BIN)/python -m tests.chaos.soak $(SOAK)

bench: $(VENV)/.dev-installed
	$(BIN)/python -m tools.setup_test_machine
	$(BIN)/python -m benchmarks $(BENCH)

clean:
	rm -rf build dist coverage.json .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .venvs tests/interop/node/node_modules

# The stamps are touched last: an installation that was interrupted is repeated.
$(VENV)/.demo-installed: pyproject.toml constraints.txt hashes/demo.txt | $(BIN)/python
	@echo "installing what the demo needs into $(VENV); the first time this takes a minute or two"
	$(BIN)/python -m tools.install demo
	@touch $@

$(VENV)/.docs-installed: pyproject.toml constraints.txt hashes/docs.txt | $(BIN)/python
	@echo "installing what the documentation site needs into $(VENV); the first time this takes a minute or two"
	$(BIN)/python -m tools.install docs
	@touch $@

$(VENV)/.dev-installed: pyproject.toml constraints.txt hashes/test.txt | $(BIN)/python
	@echo "installing what the tests need into $(VENV); the first time this takes some minutes"
	$(BIN)/python -m tools.install test
	@touch $@

$(BIN)/python:
	@sh tools/make_venv.sh $(VENV)
