//! A program that does nothing, to measure the cost of starting any process.

fn main() {}
