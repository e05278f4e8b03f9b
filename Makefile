# SPDX-License-Identifier: Apache-2.0
# Run `make help` for the targets. `sudo ./bootstrap TARGET` first installs the
# packages of a target.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := build

GO ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
TESTFLAGS ?=
BENCHTIME ?= 1s

# No cgo: one static binary for every machine. -trimpath makes builds of one
# commit identical to the bit on all machines.
export CGO_ENABLED = 0
BUILD := $(GO) build -trimpath -buildvcs=false -ldflags '-s -w -X main.version=$(VERSION)'

# Objects are compared to the bit, so use one compiler.
export BPF2GO_CC = clang-14
export BPF2GO_STRIP = llvm-strip-14
GENERATED := *_bpfe[lb].go *_bpfe[lb].o *_bpfe[lb].image *_x86_bpfel.go *_x86_bpfel.o

# The product, then the lab, a module with its own libraries. (lab/peers/goflow2 is built separately.)
MODULES := . lab lint

# each COMMAND: runs it in every module, even after a failure.
each = @status=0; for m in $(MODULES); do (set -x; cd "$$m"; $(1)) || status=1; done; exit $$status

# files PATTERNS: existing files tracked by git, and new ones not ignored.
files = $(sort $(wildcard $(shell git ls-files --cached --others --exclude-standard -- $(1))))

.PHONY: help
help: ## show the targets
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

.PHONY: build
build: ## bin/weir and bin/weir-lab, static
	@mkdir -p bin
	$(BUILD) -o bin/ ./cmd/...
	cd lab && $(BUILD) -o ../bin/ ./cmd/...

# WAITING packages mostly wait and measure nothing: four at once on two CPUs. Of the others only two run at once, because
# more would disturb measurements. The longest start first, in parallel with others.
WAITING := ./host ./feature/steer ./feature/handoff/backend ./clients/go/handoff ./cmd/weir ./feature/handoff/lb
LONGEST := ./feature/reroute/bfd/engine ./feature/reroute/liveness ./feature/reroute/protect

.PHONY: test
test: build bin/goflow2 ## all tests; without root, tests needing the kernel skip
	@waiting=$$($(GO) list $(WAITING)); others=$$($(GO) list ./... | grep -vxF "$$waiting"); status=0; \
	run() { $(GO) test -timeout 20m $(TESTFLAGS) "$$@" || status=1; }; \
	run -p 4 $(WAITING); run -p 2 $(LONGEST) $$others; (cd lab; run -p 2 ./replay ./...; exit $$status) || status=1; cd lint; run ./...; exit $$status

# Packages for the race detector: the ones with most shared state, above all sessions and their agents. Others are omitted
# for time (CI allows four minutes, and the detector makes Go three to five times as slow). Tests of steer, guard, filter,
# table, kernel, host, cmd and lab wait for the kernel and for other programs, and so does handoff itself. Tests of reroute
# measure milliseconds. Run them with RACE=./feature/steer or RACE=./lab/rig after a change. For the backend, tests waiting
# 45 s for timers of keepalived and BIRD are omitted, too.
RACE := $(addprefix ./feature/handoff/,backend keeper lb move packetbuf peer quarantine repair sock wire) ./service ./workload \
	$(addprefix ./internal/,accept awake bounded fdstore netns pidfd ratelog safefile scrape sockdiag units users)

lab := ./lab/%

.PHONY: test-race
test-race: ## tests under the race detector (needs gcc); RACE names packages
	@reports=$$(mktemp -d) status=0; chmod 1777 "$$reports"; \
	race() { [ $$# = 1 ] || CGO_ENABLED=1 GORACE=log_path=$$reports/race \
		$(GO) -C "$$1" test -race -short -count 1 -p 2 -timeout 10m -skip '^Test(Keepalived|BGP)$$' $(TESTFLAGS) "$${@:2}" || status=$$?; }; \
	race . $(filter-out $(lab),$(RACE)); race lab $(patsubst ./lab/%,./%,$(filter $(lab),$(RACE))); \
	if [ -n "$$(ls "$$reports")" ]; then cat "$$reports"/*; echo "races were found, perhaps in processes that tests start"; status=1; fi; \
	rm -rf "$$reports"; exit $$status

.PHONY: test-every-step
test-every-step: ## all tests, with a kill at every step of a change
	WEIR_EVERY_STEP=1 $(MAKE) test

.PHONY: hammer
hammer: build bin/goflow2 bin/standstill ## all tests, four packages at once, and all experiments, during repeated stalls of the host (an hour)
	failed=; for m in $(MODULES); do \
		bin/standstill $(GO) -C "$$m" test -count 1 -p 4 -timeout 60m $(TESTFLAGS) ./... || failed+=" tests of $$m"; \
	done; \
	for name in $$(bin/weir-lab list --names); do bin/standstill bin/weir-lab run "$$name" --smoke || failed+=" $$name"; done; \
	[ -z "$$failed" ] || { echo "FAIL: $$failed"; exit 1; }

.PHONY: bin/standstill
bin/standstill:
	@mkdir -p bin
	cd lab && $(GO) build -buildvcs=false -o ../$@ ./standstill

# A collector for tests, from a separate module to keep its dependencies out of weir.
bin/goflow2: lab/peers/goflow2/go.mod lab/peers/goflow2/go.sum
	@mkdir -p bin
	cd lab/peers/goflow2 && $(GO) build -buildvcs=false -trimpath -o ../../../bin/goflow2 github.com/netsampler/goflow2/v2/cmd/goflow2

.PHONY: bin/testlog
bin/testlog: # prints go test's events, and checks skips
	@mkdir -p bin
	$(GO) build -buildvcs=false -o $@ ./vm/testlog

.PHONY: bench
bench: ## all benchmarks (BENCHTIME=1s)
	$(call each,$(GO) test -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) $(TESTFLAGS) ./...)

.PHONY: bench-once
bench-once: ## every benchmark for one iteration, to keep them working
	$(call each,$(GO) test -run '^$$' -bench . -benchtime 1x $(TESTFLAGS) ./...)

.PHONY: results
results: build ## run every experiment of the lab and write docs/RESULTS.md
	bin/weir-lab results --out docs/RESULTS.md

.PHONY: recordings
recordings: build ## as root: record every demonstration for docs/demo
	for name in $$(bin/weir-lab demo --names); do bin/weir-lab demo "$$name" --record docs/demo; done

.PHONY: generate
generate: ## compile the BPF programs and write their Go
	$(call each,$(GO) generate ./...)

.PHONY: check-generated
check-generated: generate ## fail if the committed objects do not match the sources
	git diff --exit-code --stat -- $(foreach g,$(GENERATED),'$(g)')
	@new=$$(git ls-files --others --exclude-standard -- $(foreach g,$(GENERATED),'$(g)')); \
	if [ -n "$$new" ]; then echo "generated, but not committed:"; echo "$$new"; exit 1; fi

.PHONY: lint
lint: lint-go lint-shell lint-c prose release-check ## formatting, vet, staticcheck, shellcheck, clang-format, go.mod, prose, CHANGELOG and released fixtures

.PHONY: lint-go
lint-go:
	@bad=$$(gofmt -l $(call files,'*.go')); \
	if [ -n "$$bad" ]; then echo "not formatted, run gofmt -w:"; echo "$$bad"; exit 1; fi
	$(call each,$(GO) vet ./...)
	$(call each,$(GO) tool staticcheck ./...)
	$(call each,$(GO) mod tidy -diff)
	cd release && $(GO) mod tidy -diff

.PHONY: lint-shell
lint-shell:
	shellcheck -x $(shell grep -lE '^#!/.*[ /](ba)?sh$$|^# shellcheck shell=' $(call files,bootstrap '.ci/*' 'vm/*' 'release/*' '*.sh'))

.PHONY: lint-c
lint-c:
	clang-format-14 --dry-run -Werror $(call files,'*.bpf.c' '*.h')

# The linter of the pages and of the golden texts. Its build compiles C grammars for a minute or two: it is kept.
bin/vale: lint/go.mod lint/go.sum
	@mkdir -p bin
	cd lint && CGO_ENABLED=1 $(GO) build -buildvcs=false -o ../$@ github.com/vale-cli/vale/v3/cmd/vale

.PHONY: prose
prose: bin/vale ## measure comments, pages and commit subjects, lint pages, help texts and log messages (docs/STYLE.md)
	@status=0; (cd lint && $(GO) run ./prose) || status=1; \
	bin/vale --config lint/vale/vale.ini --no-wrap $(PAGES) lint/texts || status=1; exit $$status

# Pages for readers. RESULTS.md is the lab's output.
PAGES = $(filter-out docs/RESULTS.md LICENSES/%,$(call files,'*.md'))

.PHONY: docs-test
docs-test: ## as root: run or parse every command and configuration of the pages, check their links
	$(GO) test -count 1 -run '^TestDocs' ./cmd/weir
	cd lint && $(GO) test -count 1 ./links

.PHONY: texts
texts: build ## write the golden files of help texts and log messages again (lint/texts)
	cd lint && $(GO) test ./texts -count 1 -update

.PHONY: package
package: ## dist/: .deb and .rpm, tarballs, SBOMs and checksums, for amd64 and arm64
	rm -rf dist
	release/build "$(patsubst v%,%,$(VERSION))" dist

.PHONY: package-test
package-test: build package ## as root: install, upgrade under traffic, remove and purge dist/'s packages, in a chroot and a VM with systemd
	release/test dist

# A version must be given: git describe is no release.
GIVEN := $(if $(filter command environment,$(word 1,$(origin VERSION))),$(VERSION))

.PHONY: release
release: ## as root: run every check, build dist/ twice, print the command of the tag (VERSION=0.1.0; TAG=yes tags; hours)
	release/release "$(GIVEN)"

.PHONY: release-check
release-check: ## headings of the CHANGELOG, fixtures of released versions; with VERSION=0.1.0 the cheap conditions of a release
	release/release --check "$(GIVEN)"

.PHONY: release-fixtures
release-fixtures: ## as root: write the fixtures of a version (VERSION=0.1.0): pins, records, configurations, messages
	@[ -n "$(GIVEN)" ] || { echo "name the version: make release-fixtures VERSION=0.1.0"; exit 1; }
	[ -d host/testdata/$(GIVEN)/config ] || { mkdir -p host/testdata/$(GIVEN); cp -r "$$(ls -d host/testdata/*.*.*/config | sort -V | tail -1)" host/testdata/$(GIVEN)/; }
	WEIR_RELEASE_FIXTURES=$(GIVEN) $(GO) test -count 1 -run 'OfReleases$$' ./host ./feature/handoff/wire ./feature/handoff/peer ./feature/handoff/backend ./feature/handoff/repair

.PHONY: vm
vm: ## the tests of vm/packages on Debian's kernels 5.10, 6.1, 6.12 and newest, under QEMU
	WEIR_VM_BESIDE=$(BESIDE) WEIR_VM_BUDGET=$(BUDGET) vm/run

.PHONY: vm-arm64
vm-arm64: ## the tests of vm/packages on Debian's arm64 kernel, under QEMU
	vm/run arm64

# All kernels. The order starts the slowest ones first. A failed test fails the target after the page is written.
KERNELS ?= arm64 newest 6.1 6.12 ubuntu-24.04 ubuntu-22.04 5.10
KERNELFLAGS ?=

.PHONY: kernels
kernels: ## the tests of vm/packages on all kernels, without a time limit; write docs/KERNELS.md (an hour; KERNELFLAGS=-complete fails on untested)
	status=0; WEIR_VM_SECONDS=$(or $(WEIR_VM_SECONDS),7200) WEIR_VM_RESULTS=bin/kernels vm/run $(KERNELS) || status=$$?; \
	$(GO) run ./vm/kerneltable write $(KERNELFLAGS) bin/kernels docs/KERNELS.md; exit $$status

.PHONY: vm-systemd
vm-systemd: build ## the tests with systemd as PID 1, under QEMU
	vm/systemd

.PHONY: bare
bare: ## bootstrap test and demo in a Debian 12 with only git and sudo (half an hour)
	vm/bare

.PHONY: clean
clean: ## remove build results
	rm -rf bin
