//! Tests the store on tables in memory: intact, failing, slow and damaged tables.

#![allow(clippy::unwrap_used)] // A failed unwrap fails the test.

mod changes;
mod clocks;
mod damage;
mod leases;
mod purposes;
mod recovery;
mod retention;
mod slices;
mod store;
mod wrapped;
