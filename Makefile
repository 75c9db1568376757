# The commands of this project. `make` alone lists them.
STORE ?= sled
.DEFAULT_GOAL := help

.PHONY: help
help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

.PHONY: lab
lab: ## Give two network namespaces addresses from an embedded store and ping between them (STORE=sled|redb)
	@scripts/setup lab
	@cargo build --quiet --profile ci -p cni-plugin -p cli
	@scripts/lab $(STORE)

.PHONY: test
test: ## Set up what is missing, check the code, run every test
	@scripts/setup test
	cargo fmt --check
	scripts/check-layers
	cargo clippy --quiet --workspace --all-targets --profile ci -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --no-deps --profile ci
	cargo build --quiet --release -p cni-plugin
	cargo test --quiet --profile ci --workspace --no-run
	MARGAY_RELEASE_PLUGIN=$(abspath $(or $(CARGO_TARGET_DIR),target))/release/margay-ipam \
		cargo test --profile ci --workspace
	cargo build --quiet --profile ci -p cni-plugin -p cli
	scripts/lab sled
	scripts/lab redb

.PHONY: bench
bench: ## Measure against peers and floors in one run, and print ratios
	@scripts/setup bench
	@cargo build --quiet --release -p cni-plugin -p bench
	@cargo run --quiet --release -p bench

.PHONY: fuzz
fuzz: ## Feed every parser and damaged stores with invented input, 60 s each (FUZZ_SECONDS, FUZZ_TARGETS)
	@scripts/setup fuzz
	@scripts/fuzz $(FUZZ_TARGETS)

OPS ?= 1000000
MODE ?= in-process
.PHONY: torture
torture: STORE = memory
torture: ## Torture the allocator (STORE=memory|sled|redb|etcd, MODE=in-process|processes, OPS=, SEED=)
	@scripts/setup test
	@cargo build --quiet --profile ci -p torture
	@cargo run --quiet --profile ci -p torture -- run --store $(STORE) --mode $(MODE) --ops $(OPS) $(if $(SEED),--seed $(SEED))

.PHONY: install
install: ## Build and install the plugin and the command (CNI_BIN_DIR, BIN_DIR, DESTDIR)
	@scripts/setup install
	@# One after the other: together the plugin would get what only the command needs.
	@cargo build --quiet --release -p cni-plugin
	@cargo build --quiet --release -p cli
	@scripts/install

.PHONY: deny
deny: ## Check licences, advisories and duplicates of what we depend on (needs cargo-deny and the advisory database)
	cargo deny check
