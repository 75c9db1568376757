//! Runs Margay side by side with models of Calico on one store: with its IPAM client, which changes one key at a time
//! and may halt anywhere, and with a reader like its watchers.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by panicking and prints its steps")]

mod calico;
mod documents;
mod halting;
mod judge;
mod kube_controllers;
mod multus;
mod random;
mod reader;
mod scene;
mod steps;
mod turns;
