//! Runs Margay and models of Calico's programs on one store. Calico's IPAM client is modelled as a caller that writes
//! one key at a time and may halt between any two store calls. One of the model clients reads the store as Calico's
//! watchers do.
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
