# SPDX-License-Identifier: Apache-2.0
# Every command a person needs. `make` alone lists them; each line after ## is that list.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# tests/all.sh says what runs side by side: several phases measure time through real doors.
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
BIN := $(abspath $(TARGET))/release
# Tests that need a built program, root or a Debian package skip aloud when started by hand; here
# nothing may be skipped, so that a pass means that everything ran.
export RUSHES_TEST_ALL ?= 1

.PHONY: help
help: ## List these commands
	@awk -F ':.*## ' '/^[a-z0-9%-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 } \
		/^## / { printf "\n%s\n", substr($$0, 4) }' $(MAKEFILE_LIST)

## The everyday ones

.PHONY: setup server build install uninstall demo clean
setup: ## Install the Debian packages that are missing (asks the network only then)
	@packaging/install-packages.sh
	@packaging/check-rust.sh

server: ## Compile what an installation needs: rushes and the Samba module, without lab, simulator and tests
	@echo "== server: rushes"
	$(CARGO) build --release --locked -p rushes
	@echo "== server: Samba module"
	doors/smb/build.sh

build: ## Compile all programs and the Samba module
	@echo "== build: programs"
	$(CARGO) build --release --locked --workspace
	@echo "== build: Samba module"
	doors/smb/build.sh

install: ## Install programs, module, service and sample configuration (after make server or make build, as root)
	packaging/install.sh "$(BIN)"

uninstall: ## Take away what make install has put in place; configuration stays (as root)
	packaging/uninstall.sh

demo: setup build ## Real footage from a slow disk to many SMB clients: who drops frames?
	"$(BIN)/rushes" lab demo

clean: ## Remove what was built
	$(CARGO) clean
	rm -rf build

## Testing

# Phases of `make test`; what comes after what, and what runs beside what, is told to tests/all.sh.
PHASES := setup build check-format check-tidy check-lints check-licences build-tests test-crates \
	test-sim test-smb test-mount test-doors-together test-doors-alone test-kills

# Cheap and certain first: a formatting mistake should not cost a quarter of an hour. The programs
# are compiled beside what the tests are compiled of: neither has work for two cores all the time.
# Only what keeps time runs alone.
test: ## Everything: setup, build, checks, all tests. Needs root (mounts, smbd)
	@if [ "$$(id -u)" -ne 0 ]; then \
		echo "make test: needs root, because it mounts disks and runs smbd: sudo -E make test" >&2; exit 1; fi
	@MAKE="$(MAKE)" tests/all.sh setup check-format:setup build:setup check-tidy:check-format \
		check-lints:check-tidy check-licences:check-lints build-tests:check-lints \
		test-crates:build-tests,build test-smb+:build test-doors-together:build,test-crates \
		test-mount:build test-sim:build test-kills:build,test-crates --alone test-doors-alone

# Hours of the same: all that `make test` has a sample of.
test-long: setup build ## What make test has a sample of, at full length; before an issue is resolved. Some hours
	@$(MAKE) sim-thousand
	@$(MAKE) sim-admission
	@$(MAKE) sim-torture
	@RUSHES_TEST_KILLS=500 $(MAKE) test-kills
	tests/smb/torture.sh --all

.PHONY: test test-long sim-swarm sim-admission sim-thousand sim-torture test-doors $(PHASES)
check-format: ## Is the source formatted?
	$(CARGO) fmt --all --check

check-tidy: ## Map and code agree, every file keeps to the house rules (tests/tests/architecture.rs, tidy.rs)
	tests/programs.sh architecture tidy reference

check-lints: ## Clippy, warnings are errors; shell scripts too (shellcheck)
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	@if command -v shellcheck >/dev/null; then git ls-files '*.sh' .ci/run | xargs -r shellcheck -x -S error; \
	elif [ "$$RUSHES_TEST_ALL" = 1 ]; then \
		echo "check-lints: shellcheck is missing (make setup); it may not be skipped under RUSHES_TEST_ALL=1" >&2; exit 1; \
	else echo "check-lints: no shellcheck here, shell scripts only parsed"; fi
	@git ls-files '*.sh' | xargs -r -n1 bash -n

check-licences: ## Licences and sources of all libraries (deny.toml)
	@$(CARGO) deny --version >/dev/null 2>&1 || { \
		echo "check-licences: installing cargo-deny, once"; \
		$(CARGO) install --locked --debug cargo-deny@0.20.2; }
	$(CARGO) deny --locked check bans licenses sources

build-tests: ## Compile all tests
	tests/programs.sh --build

# Examples in the documentation are tests, too.
test-crates: ## Unit and crate tests
	RUSHES_TEST_JOBS=$${RUSHES_TEST_JOBS:-2} tests/programs.sh --crates
	$(CARGO) test --quiet --locked --workspace --doc

test-sim: ## The simulator: every scenario, kept seeds, samples of a thousand disks, of its questions of admission and of its torture
	"$(BIN)/rushes-sim" run all
	@for seed in sim/seeds/*.toml; do [ -e "$$seed" ] || continue; \
		echo "rushes-sim replay $$seed"; "$(BIN)/rushes-sim" replay "$$seed"; done
	"$(BIN)/rushes-sim" run thousand_disks --seconds 30
	@$(MAKE) sim-admission QUESTIONS=500
	"$(BIN)/rushes-sim" torture --hours 0.2

sim-swarm: ## Random worlds; what they still find is open work (sim/open-seeds), so no part of make test
	"$(BIN)/rushes-sim" run swarm --count 100

QUESTIONS ?= 10000
sim-admission: ## 10,000 admission questions (QUESTIONS=) beside an oracle: nobody late, nine tenths of what can be kept
	"$(BIN)/rushes-sim" admission --count $(QUESTIONS)

HOURS ?= 24
SEED ?= 1
sim-torture: ## 24 virtual hours (HOURS=) of everything at once that may go wrong, with every byte followed, from SEED=
	"$(BIN)/rushes-sim" torture --hours $(HOURS) --seed $(SEED)

sim-thousand: ## A thousand disks, ten thousand streams, ten virtual minutes
	"$(BIN)/rushes-sim" run thousand_disks

test-smb: ## Samba-specific tests: every VFS entry accounted for, smbtorture as stock
	@found=0; for script in tests/smb/*.sh; do \
		[ -e "$$script" ] || continue; found=1; echo "-- $$script"; "$$script"; done; \
	[ $$found = 1 ] || { echo "test-smb: no script in tests/smb" >&2; exit 1; }

test-mount: ## The mount of a pool: pjdfstest and fsx, beside the same on a bare ext4
	tests/fuse/posix.sh

.PHONY: test-trixie
test-trixie: build ## The module for Debian 13's Samba, built and tested in a Debian 13 in build/trixie (a gigabyte of packages, once)
	@packaging/install-packages.sh debootstrap
	@tests/trixie/smb.sh

.PHONY: mixed-kills
mixed-kills: build ## The daemon killed under all kinds of load at once. RUSHES_TEST_KILLS=500 says how often
	"$(BIN)/smb-mixed-kills"

.PHONY: same-file-kills
same-file-kills: build ## Daemons and smbds killed while clients write over one another in one file. RUSHES_TEST_KILLS=60 says how many rounds, RUSHES_TEST_SHARE=plain without a pool
	"$(BIN)/same-file-kills"

.PHONY: pool-kills
pool-kills: build ## The same under a pool in use by SMB, NFS, iSCSI and programs on its mount
	"$(BIN)/pool-kills"

.PHONY: torture
torture: build ## Clients of every kind, programs that are killed, disks that fail, hang and fill, beside a model. TORTURE="--seed 7 --seconds 7200 --stand plain|pool|any --only 12" says it otherwise (TORTURE=--help)
	"$(BIN)/torture" $(TORTURE)

.PHONY: fsx
fsx: build ## A million random operations over SMB, beside a model. FSX="--seed 7 --operations 5000" says it otherwise
	"$(BIN)/smb-fsx" $(FSX)

.PHONY: hunt-stale
hunt-stale: build ## Files changed by local programs in every way, read over SMB. HUNT="--seconds 3600 --seed 7" says it otherwise
	"$(BIN)/smb-stale" --fs ext4 $(HUNT)
	"$(BIN)/smb-stale" --fs xfs $(HUNT)
	"$(BIN)/smb-stale" --fs ext4 --analyser 1 $(HUNT)
	"$(BIN)/smb-stale" --fs xfs --buffer 64MiB $(HUNT)

test-doors: test-doors-together test-doors-alone test-kills ## End to end through the real doors

test-doors-together: ## Those that keep no time, and runs of the lab, four programs at a time
	tests/programs.sh --together

test-doors-alone: ## Those that keep time, and the lab's slow disk, one at a time
	tests/programs.sh --alone

test-kills: ## A daemon killed under all kinds of load; a pool's mount killed
	"$(BIN)/smb-mixed-kills"
	"$(BIN)/pool-kills"

## Measuring (bench/PROMISES.md; raw data goes to bench/runs/DATE-MACHINE)

.PHONY: figures
figures: ## List the figures that can be measured; each is a target, for instance make figure-12
	@bench/figures.py --list

figure-%: build ## Measure one figure and say whether the promise is kept
	@bench/figures.py $*
