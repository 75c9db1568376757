//! A program that does nothing, for measuring the cost of starting a process.

fn main() {}
