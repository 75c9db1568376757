//! Provides the random seed of the random test cases.

use std::sync::LazyLock;

use crate::expect::Checked;

/// The environment variable that sets the random seed of the random test cases.
pub(crate) const SEED: &str = "CONFORMANCE_SEED";

static CHOSEN: LazyLock<u64> = LazyLock::new(|| given().ok().flatten().unwrap_or_else(|| fastrand::u64(..)));

/// The random seed of all random cases of this process: the number in the environment variable `CONFORMANCE_SEED`, or
/// else a random number. A report of a test run should show the random seed, with which the run can be repeated.
pub fn seed() -> u64 {
    *CHOSEN
}

/// Runs `work`, which uses the random [`seed`]. If the seeded `work` fails, the failure says how to repeat the run with
/// the same seed.
pub(crate) async fn seeded<T>(work: impl Future<Output = Checked<T>>) -> Checked<T> {
    work.await.map_err(|failure| failure.with_note(&format!("{SEED}={} makes the same calls", seed())))
}

/// The random seed from the environment, if the variable is set.
///
/// # Errors
/// The error text for a random seed that is not a number.
pub(crate) fn given() -> Result<Option<u64>, String> {
    let Some(text) = std::env::var_os(SEED) else { return Ok(None) };
    let number = text.to_str().and_then(|text| text.parse().ok());
    number.map(Some).ok_or_else(|| format!("{SEED} has to be a number below 2^64, not {}", text.display()))
}
