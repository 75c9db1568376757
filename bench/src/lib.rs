//! Benchmarks that print ratios against a peer or a floor, in one run.
