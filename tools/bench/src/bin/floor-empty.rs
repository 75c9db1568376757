//! A program that does nothing, which measures the cost of starting any process.

fn main() {}
