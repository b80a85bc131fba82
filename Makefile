# Targets are described in CONTRIBUTING.md; what they need is installed into .venv on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
EDITABLE := -e . -e core -e packs $(addprefix -e ,$(PLUGINS))
PROJECTS := pyproject.toml core/pyproject.toml packs/pyproject.toml $(wildcard plugins/*/pyproject.toml)

.PHONY: run quick test test-all test-long test-bounds test-memory test-numba test-examples fuzz lint docs clean dist \
        test-ray test-browser soak mix mutants day

run: $(VENV)/.installed
	$(BIN)/llamacli run < /dev/null

# Bytecode of tests is kept: pytest rewrites their asserts, which is most of the time of collecting them.
unexport PYTHONDONTWRITEBYTECODE

# WORKERS=0 runs in one process. Workers share compiled kernels: see tests/support/suite.py.
WORKERS ?= 2
PYTEST  := $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

# The inner loop: one case of each test that starts no process and no server.
quick: $(VENV)/.installed-test
	LLAMACLI_TEST_PROFILE=quick $(PYTEST)

test: $(VENV)/.installed-test
	$(PYTEST) -m "not slow and not browser"

# Random requests of every kind under load, each compared with it alone: see tests/support/mix.py. ARGS: --seed.
MIX_SECONDS ?= 1800
MIX := PYTHONPATH=tests:tests/support $(BIN)/python -m mix
mix: $(VENV)/.installed-test
	$(MIX) --seconds $(MIX_SECONDS) $(ARGS)

# The rest: what is slow, and what tries more examples in the full profile. Tests of clients that cannot be installed skip.
test-all: test-bounds docs test-examples test-ray test-browser
	-$(BIN)/python -m pip install --quiet -e '.[clients]'
	rm -f $(VENV)/.installed-test  # litellm holds huggingface_hub back: the next make test installs it again
	$(FUZZ) --minutes 0.03
	$(MIX) --seconds 30
	LLAMACLI_TEST_PROFILE=full $(PYTEST) -m "slow or deep or hypothesis" -k "not (test_architecture and memory)"

# The web page in Chromium, which is installed where it is missing and apt-get can do so; else the tests skip.
CHROMIUM := chromium chromium-driver
test-browser: $(VENV)/.installed-test
	-{ command -v chromium && command -v chromedriver; } > /dev/null || { test "$$(id -u)" = 0 && apt-get install -y -q $(CHROMIUM); } || \
	{ test "$$(id -u)" = 0 && apt-get update -q && apt-get install -y -q $(CHROMIUM); }
	-$(BIN)/python -m pip install --quiet -e '.[browser]'
	$(BIN)/python -m pytest -q -rs -n 0 -m browser tests/browser

# Longer runs against the server: 100,000 mutated bodies, 1,000 disconnects and schemas, more schemathesis cases; and
# examples of Hypothesis that no other run has drawn.
test-long: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet -e '.[clients]'
	rm -f $(VENV)/.installed-test
	LLAMACLI_TEST_PROFILE=long $(PYTEST) -m slow tests/serve tests/cli/test_serve.py
	LLAMACLI_TEST_PROFILE=long $(PYTEST) -m hypothesis

# An hour of requests, three in ten of them cut off: memory, threads and open files must not grow.
SOAK_SECONDS ?= 3600
soak: $(VENV)/.installed-test
	$(BIN)/python benchmarks/soak.py --seconds $(SOAK_SECONDS)

# A day of a server with many models in 20 minutes: loads, batches, kills, replaced files; nothing may grow.
DAY_SECONDS ?= 1200
day: $(VENV)/.installed-test
	$(BIN)/python benchmarks/day.py --seconds $(DAY_SECONDS)

# Every kernel's memory between forbidden pages, and in front of it in the tests of the kernels themselves; functions of
# arrays with Numba's own checks.
KERNELS := tests/ops tests/engine tests/kernels/test_attention.py tests/kernels/test_cached.py tests/kernels/test_linear.py \
           tests/kernels/test_tiles.py tests/kernels/test_encoding.py tests/kernels/test_sampling_kernels.py tests/kernels/kv_types tests/kv \
           tests/sampling tests/tools/test_embedding.py
GUARDED := $(KERNELS) tests/branches tests/media tests/session plugins
# In the place of the checks "memory", which start two processes for each architecture; and every type of tensors.
ALL := -k "(test_architecture and (mode_auto or pieces) and not others) or of_random_shapes" plugins tests/kernels/test_linear.py
test-bounds: $(VENV)/.installed-test
	$(PYTEST) -p llamacli.testing.guarded --guard=end -m "not slow" -k "not reference and not conformance" $(GUARDED)
	$(PYTEST) -p llamacli.testing.guarded --guard=start -m "not slow" -k "not reference and not conformance" $(KERNELS)
	$(PYTEST) -p llamacli.testing.guarded --guard=end $(ALL)
	$(PYTEST) -p llamacli.testing.guarded --guard=end -k "not reference" tests/test_goldens.py
	$(PYTEST) -p llamacli.testing.guarded --guard=start $(ALL)
	NUMBA_BOUNDSCHECK=1 $(PYTEST) -m "not slow" tests/sampling tests/kernels/test_sampling_kernels.py

# Objects and memory with marks before and behind them, what is freed or new filled with bytes that no one wrote; then
# the same tests without Python's collector of cycles.
MEMORY := tests/ops tests/kv tests/engine tests/branches tests/session tests/kernels/test_attention.py tests/tokenizer
test-memory: $(VENV)/.installed-test
	PYTHONMALLOC=debug MALLOC_PERTURB_=128 MALLOC_MMAP_THRESHOLD_=1073741824 PYTHONFAULTHANDLER=1 \
	    $(PYTEST) -m "not slow" -k "not reference" $(MEMORY)
	$(PYTEST) -p no_collector -m "not slow" -k "not reference" tests/kv tests/branches tests/session tests/chat tests/test_model.py

# The oldest and the newest release of Numba that pyproject.toml allows, and the newest pre-release, whose failures are
# warnings: each in an environment of its own, with an empty kernel cache.
NUMBA := $(shell sed -n 's/.*"numba>=\(.*\),<.*/\1/p' core/pyproject.toml)
NUMBA_TESTS := tests/kernels tests/session/test_fork.py
test-numba:
	for numba in "numba==$(NUMBA).*" "" "--pre --upgrade numba"; do \
		rm -rf $(VENV)-numba && $(PYTHON) -m venv $(VENV)-numba && \
		$(VENV)-numba/bin/python -m pip install --quiet $(subst -e . ,-e '.[test]' ,$(EDITABLE)) && \
		{ test -z "$$numba" || $(VENV)-numba/bin/python -m pip install --quiet $$numba; } && \
		$(VENV)-numba/bin/python -c 'import numba; print("Numba", numba.__version__)' && \
		LLAMACLI_CACHE=$(VENV)-numba/cache $(VENV)-numba/bin/python -m pytest -q -n $(WORKERS) -m "not slow" $(NUMBA_TESTS) || \
		case "$$numba" in --pre*) echo "WARNING: the newest pre-release of Numba fails" >&2;; *) exit 1;; esac; \
	done

# Mutated and generated input in child processes: see tests/fuzz/__init__.py. ARGS: --target, --cases, --seed, --minutes.
FUZZ := PYTHONPATH=tests:tests/support $(BIN)/python -m fuzz
fuzz: $(VENV)/.installed-test
	-$(BIN)/python -m pip install --quiet -e '.[fuzz]'
	$(FUZZ) $(ARGS)

# Changed operators, numbers and conditions of modules, each tried by the tests that mirror it: tests/support/mutate.py.
mutants: $(VENV)/.installed-test
	PYTHONPATH=tests:tests/support $(BIN)/python -m mutate $(ARGS)

# Replicas on a Ray cluster, in an environment of its own: Ray brings other servers for uvicorn, and much else.
RAY := .[ray,test]
test-ray:
	$(PYTHON) -m venv $(VENV)-ray
	if $(VENV)-ray/bin/python -m pip install --quiet $(subst -e . ,-e '$(RAY)' ,$(EDITABLE)); then \
		$(VENV)-ray/bin/python -m pytest -q -n 0 -m ray tests/serve/ray; \
	else \
		echo "SKIPPED: Ray cannot be installed here, its tests do not run" >&2; \
	fi

# The plugins of examples/ in an environment of their own, as an outside author installs them.
test-examples:
	rm -rf $(VENV)-examples $(wildcard */build examples/*/build plugins/*/build)
	$(PYTHON) -m venv $(VENV)-examples
	$(VENV)-examples/bin/python -m pip install --quiet './core[testing]' ./packs ./plugins/llama $(wildcard examples/*/)
	$(VENV)-examples/bin/llamacli plugins
	for folder in $(wildcard examples/*/); do (cd $$folder && ../../$(VENV)-examples/bin/python -m pytest -q) || exit 1; done

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site of the documentation, in site/. Broken links are errors.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
# Wheels and sdists of all distributions, checked. URL=https://... is the repository's address, by default that of origin.
# Kernels are compiled for all instruction sets, some minutes of CPU time for each; PACKS=DIR has them already.
dist: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e '.[dist]'
	rm -rf dist
	$(BIN)/python tools/dist.py $(if $(URL),--url $(URL)) $(if $(PACKS),--packs $(PACKS))

clean:
	rm -rf $(VENV) $(VENV)-examples site
	rm -rf $(VENV) $(VENV)-ray $(VENV)-numba

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# uv is quicker where it is there and can reach the package index; pip shows what it collects.
$(VENV)/.installed: $(PROJECTS) | $(BIN)/python
	@echo "installing llamacli, all families and what they need into $(VENV)"
	{ command -v uv > /dev/null && uv pip install --python $(BIN)/python $(EDITABLE); } || \
	$(BIN)/python -m pip install $(EDITABLE)
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e '.[lint]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	touch $@
