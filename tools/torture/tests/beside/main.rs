//! Runs Margay and models of Calico's programs on one store. One model is Calico's IPAM client, which writes one key at
//! a time and may halt between any two store calls. Another model reads the store like Calico's watchers.
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
