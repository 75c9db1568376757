//! A program that does nothing: what starting any process costs.

fn main() {}
