//! Compares Margay on etcd with a bare client of etcd: whole processes, many callers, many hosts, and a full store.
//!
//! Each part of the benchmark starts its own etcd, with fsync, and alternates between the contenders.

mod beside;
mod blocks;
mod boots;
pub(crate) mod callers;
mod claims;
mod cold;
mod commands;
mod commits;
mod costs;
mod dead_node;
mod ground;
mod hosts;
mod meter;
mod raw;
mod replay;
mod scale;
pub(crate) mod soak;
mod wire;

use std::path::Path;

use tokio::runtime::Runtime;

use crate::findings::Findings;
use crate::{Outcome, Programs};

pub(crate) use beside::print_puts;
pub(crate) use cold::call as call_on_etcd;

/// A function that runs one part of the benchmark, prints the tables of its measurements and returns them.
pub(crate) type Part = fn(&Programs, &Path) -> Outcome<Findings>;

/// The parts of the benchmark that run on etcd, by name.
pub(crate) const PARTS: [(&str, Part); 11] = [
    ("cold", cold::run),
    ("callers", callers::run),
    ("hosts", hosts::run),
    ("costs", costs::run),
    ("scale", scale::run),
    ("claims", claims::run),
    ("beside", beside::run),
    ("blocks", blocks::run),
    ("boots", boots::run),
    ("dead-node", dead_node::run),
    ("wire", wire::run),
];

/// Creates a tokio runtime with few threads, because the simulated hosts, unlike real ones, share this machine's
/// processors with etcd.
fn runtime() -> Outcome<Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

/// Formats a duration in milliseconds for a table.
fn ms(value: f64) -> String {
    if value < 100.0 { format!("{value:.2}") } else { format!("{value:.0}") }
}

fn ratio(value: f64) -> String {
    format!("{value:.2}")
}

/// Formats a whole number with thousands separators.
fn whole(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_have_commas() {
        assert_eq!([0.0, 999.4, 1000.0, 500_000.0, 1_234_567.0].map(whole).join(" "), "0 999 1,000 500,000 1,234,567");
    }
}
