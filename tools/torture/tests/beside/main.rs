//! Side by side with Calico: its writer, which changes one key at a time and may stop anywhere, and a reader as its
//! watchers are, on the same store as ours.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by panicking, and says what it did")]

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
