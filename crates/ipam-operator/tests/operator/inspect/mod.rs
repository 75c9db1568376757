//! Comparing the documents of a store, and mending them.

mod damages;
mod endpoints;
mod own;
mod workloads;
