# The commands of this project. `make` alone lists them.
STORE ?= sled
.DEFAULT_GOAL := help

.PHONY: help
help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

.PHONY: lab
lab: ## Give two network namespaces addresses and ping between them (STORE=sled|redb|etcd, NETWORK=bridge|calico, SERVE=1 with a daemon)
	@scripts/setup lab $(STORE)
	@[ -x "$(or $(CARGO_TARGET_DIR),target)/ci/margay" ] || echo "lab: compiling the plugin and the command with all they depend on: about 3 minutes on two idle cores, the first time only"
	@cargo build --quiet --profile ci -p margay-cni-plugin -p margay-cli
	@NETWORK=$(NETWORK) SERVE=$(SERVE) scripts/lab $(STORE)

# scripts/timed records the time of each part of `make test` here.
TIMES := $(abspath $(or $(CARGO_TARGET_DIR),target))/times
export TIMES

.PHONY: test test-parts
test: ## Set up what is missing, check the code, run every test; the ten slowest parts are printed at the end
	@scripts/setup test
	@scripts/timed --begin
	@$(MAKE) --no-print-directory test-parts; code=$$?; scripts/timed --slowest; exit $$code

test-parts:
	scripts/timed "format" cargo fmt --check
	scripts/timed "layers" scripts/check-layers
	scripts/timed "book" scripts/check-book
	scripts/timed "build of all tests" cargo test --quiet --profile ci --workspace --no-run
	scripts/timed "build of an earlier version" scripts/build-earlier
	scripts/timed --tests scripts/test-programs
	scripts/timed "lab on sled" scripts/lab sled
	scripts/timed "lab on redb" scripts/lab redb
	scripts/timed "lab on etcd" scripts/lab etcd
	SERVE=1 scripts/timed "lab with a daemon" scripts/lab sled
	NETWORK=calico scripts/timed "lab of a routed network on sled" scripts/lab sled
	NETWORK=calico scripts/timed "lab of a routed network on etcd" scripts/lab etcd
	NETWORK=calico SERVE=1 scripts/timed "lab of a routed network with a daemon" scripts/lab redb
	scripts/timed "installation" scripts/check-install

.PHONY: bench
bench: ## Measure against peers and floors in one run, and print ratios (PARTS=cluster for etcd, PARTS="cold callers" for some parts, RESULTS=FILE, BASELINE=PLUGIN of another build)
	@scripts/setup bench
	@CRATES="cni-plugin cli bench/floor-etcd bench/floor-wire" scripts/build-release
	@cargo build --quiet --release -p bench
	@cargo run --quiet --release -p bench -- $(PARTS) $(if $(RESULTS),--json $(RESULTS)) $(if $(BASELINE),--baseline $(BASELINE))

.PHONY: kubernetes
kubernetes: STORE = etcd
kubernetes: ## Run a real Kubernetes on one node with Margay as its network, and play scenarios (NETWORK=calico|bridge|host-local, STORE=etcd|redb|sled, SERVE=1 with a daemon, CONTAINERD=2 for one that asks STATUS, RELEASE=1 for programs as they are installed, SCENARIOS="few-pods ..."); the first time builds Kubernetes
	@scripts/setup kubernetes
	@scripts/build-kubernetes
	@$(if $(filter 2,$(CONTAINERD)),scripts/build-kubernetes containerd)
	@CRATES="pod/pod$(if $(RELEASE), cni-plugin cli)" scripts/build-release
	@cargo build --quiet --profile ci $(if $(RELEASE),,-p margay-cni-plugin -p margay-cli) -p kubernetes-lab
	@NETWORK=$(NETWORK) STORE=$(STORE) SERVE=$(SERVE) KUBERNETES_PROGRAMS=$$(scripts/build-kubernetes --folder) \
		$(if $(filter 2,$(CONTAINERD)),CONTAINERD_PROGRAMS=$$(scripts/build-kubernetes containerd --folder)) \
		$(if $(RELEASE),MARGAY_PROGRAMS=$(abspath $(or $(CARGO_TARGET_DIR),target))/programs/$(shell uname -m)) \
		POD_PROGRAM=$(abspath $(or $(CARGO_TARGET_DIR),target))/programs/$(shell uname -m)/pod \
		$(or $(CARGO_TARGET_DIR),target)/ci/kubernetes-lab $(SCENARIOS)

.PHONY: fuzz
fuzz: ## Feed every parser and damaged stores with invented input, 60 s each (FUZZ_SECONDS, FUZZ_TARGETS)
	@scripts/setup fuzz
	@scripts/fuzz $(FUZZ_TARGETS)

.PHONY: mutants
mutants: ## Change the code of the store and the allocator in one place at a time, and list the changes that no test notices (PARTS="kv kv-mvcc allocator", SHARE=1/8)
	@scripts/setup mutants
	@SHARE=$(SHARE) scripts/mutants $(PARTS)

MODE ?= in-process
OPS ?= $(or $(ROUNDS),$(if $(filter kill late,$(MODE)),1000,$(if $(filter power,$(MODE)),2000,$(if $(filter nospace,$(MODE)),20,$(if $(filter members,$(MODE)),100000,1000000)))))
.PHONY: torture
torture: STORE = memory
torture: ## Torture the allocator (STORE=memory|sled|redb|etcd, MODE=in-process|processes, OPS=, SEED=, SERVE=1 with a daemon, API=1 by its etcd API), kill the plugin (MODE=kill, STORE=sled|redb; MODE=late on etcd; ROUNDS=), use up etcd's quota (MODE=nospace, ROUNDS=), break a cluster of three etcds (MODE=members), or cut its power (MODE=power, STORE=sled|redb)
	@scripts/setup test
ifeq ($(MODE),kill)
	@$(if $(filter sled redb,$(STORE)),,echo "make: MODE=kill takes STORE=sled or STORE=redb" >&2; exit 2)
	@cargo build --quiet --profile ci -p margay-cni-plugin
	@MARGAY_CRASH_ROUNDS=$(OPS) MARGAY_CRASH_SEED=$(or $(SEED),$(shell date +%s)) cargo test --quiet --profile ci -p margay-cni-plugin \
		--test system -- --nocapture --exact crashes::kills_leave_all_or_nothing_on_$(STORE)
else ifeq ($(MODE),power)
	@$(if $(filter sled redb,$(STORE)),,echo "make: MODE=power takes STORE=sled or STORE=redb" >&2; exit 2)
	@scripts/setup install
	@CRATES=cni-plugin scripts/build-release
	@cargo build --quiet --profile ci -p margay-cni-plugin -p margay-cli
	@CI=true MARGAY_RELEASE_PLUGIN=$(abspath $(or $(CARGO_TARGET_DIR),target))/programs/$(shell uname -m)/margay-ipam \
		MARGAY_POWER_ROUNDS=$(OPS) MARGAY_POWER_SEED=$(or $(SEED),$(shell date +%s)) cargo test --quiet --profile ci -p margay-cni-plugin \
		--test power -- --nocapture --exact power_cuts_lose_nothing_on_$(STORE)
else ifeq ($(MODE),late)
	@$(if $(filter memory etcd,$(STORE)),,echo "make: MODE=late is about etcd: leave STORE out" >&2; exit 2)
	@cargo build --quiet --profile ci -p margay-cni-plugin
	@MARGAY_LATE_ROUNDS=$(OPS) MARGAY_LATE_SEED=$(or $(SEED),$(shell date +%s)) cargo test --quiet --profile ci -p margay-cni-plugin \
		--test etcd -- --nocapture --exact late::late_add_leaves_nothing_behind
else ifeq ($(MODE),nospace)
	@$(if $(filter memory etcd,$(STORE)),,echo "make: MODE=nospace is about etcd: leave STORE out" >&2; exit 2)
	@cargo build --quiet --profile ci -p margay-cni-plugin
	@MARGAY_NOSPACE_ROUNDS=$(OPS) cargo test --quiet --profile ci -p margay-cni-plugin \
		--test etcd -- --nocapture --exact nospace::nospace_is_left_without_a_lost_address
else ifeq ($(MODE),members)
	@$(if $(filter memory etcd,$(STORE)),,echo "make: MODE=members is about etcd: leave STORE out" >&2; exit 2)
	@cargo run --quiet --profile ci -p torture -- run --store etcd --three --ops $(OPS) $(if $(SEED),--seed $(SEED))
else
	@cargo build --quiet --profile ci -p torture $(if $(SERVE)$(API),-p margay-cli)
	@cargo run --quiet --profile ci -p torture -- run --store $(STORE) --mode $(MODE) --ops $(OPS) $(if $(SEED),--seed $(SEED)) $(if $(SERVE),--serve) $(if $(API),--api)
endif

HOURS ?= 2
.PHONY: soak
soak: STORE = sled
soak: ## Have the daemon of a store work for hours: churn, watches, compaction (HOURS=2, STORE=sled|redb), or an etcd with compaction (STORE=etcd, RESULTS=FILE)
ifeq ($(STORE),etcd)
	@scripts/setup bench
	@cargo run --quiet --release -p bench -- soak $(shell expr $(HOURS) '*' 60) $(RESULTS)
else
	@scripts/setup test
	@cargo build --quiet --profile ci -p margay-cli -p torture
	@$(or $(CARGO_TARGET_DIR),target)/ci/torture soak --margay $(abspath $(or $(CARGO_TARGET_DIR),target))/ci/margay --store $(STORE) --hours $(HOURS)
endif

.PHONY: scoreboard
scoreboard: ## Judge, measure and torture all stores, and write the results into docs/scoreboard.md (STORES="sqlite fjall" for some, which are printed alone)
	@scripts/setup test
	@cargo bench --quiet --profile ci -p plugged --bench scoreboard -- $(STORES) >$(or $(CARGO_TARGET_DIR),target)/scoreboard
ifeq ($(STORES),)
	@sed -i '/^<!-- make scoreboard/q' docs/scoreboard.md
	@cat $(or $(CARGO_TARGET_DIR),target)/scoreboard >>docs/scoreboard.md
endif
	@cat $(or $(CARGO_TARGET_DIR),target)/scoreboard

.PHONY: install uninstall deb
install: ## Build the programs, install all that belongs to them, make a .deb (CNI_BIN_DIR, BIN_DIR, PREFIX, DESTDIR, SERVE=no)
	@scripts/setup install
	@scripts/build-release
	@scripts/install
	@scripts/package

uninstall: ## Say what is still in use, and remove what `make install` has put in place (PREFIX, DESTDIR, FORCE=1)
	@scripts/uninstall

ARCHS ?= amd64 arm64
deb: ## Make Debian packages, in target/deb (ARCHS="amd64 arm64")
	@scripts/setup deb
	@scripts/build-release
	@set -e; for arch in $(ARCHS); do scripts/build-release $$arch; scripts/package $$arch; done

.PHONY: book
book: ## Make the book from docs/, in target/book
	@scripts/setup book
	@scripts/book

.PHONY: deny
deny: ## Check licences, advisories and duplicates of what we depend on (needs cargo-deny and the advisory database)
	cargo deny check
