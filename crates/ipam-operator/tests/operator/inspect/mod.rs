//! Tests inspections and repairs of a store.

mod damages;
mod endpoints;
mod own;
mod workloads;
