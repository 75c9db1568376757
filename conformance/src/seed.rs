//! The seed of the random cases.

use std::sync::LazyLock;

use crate::expect::Checked;

/// The environment variable that says which seed to take.
pub(crate) const SEED: &str = "CONFORMANCE_SEED";

static CHOSEN: LazyLock<u64> = LazyLock::new(|| given().ok().flatten().unwrap_or_else(|| fastrand::u64(..)));

/// The seed of all random cases of this process: the number in the environment variable `CONFORMANCE_SEED`, or else one
/// that was drawn. A report of a run shows this, too, so that the run can be repeated.
pub fn seed() -> u64 {
    *CHOSEN
}

/// The outcome of a run that took its randomness from the [`seed`]; a failure says how to have it again.
pub(crate) async fn seeded<T>(work: impl Future<Output = Checked<T>>) -> Checked<T> {
    work.await.map_err(|failure| failure.with_note(&format!("{SEED}={} makes the same calls", seed())))
}

/// The seed in the environment, if there is one.
///
/// # Errors
/// The advice for a seed that is not a number.
pub(crate) fn given() -> Result<Option<u64>, String> {
    let Some(text) = std::env::var_os(SEED) else { return Ok(None) };
    let number = text.to_str().and_then(|text| text.parse().ok());
    number.map(Some).ok_or_else(|| format!("{SEED} has to be a number below 2^64, not {}", text.display()))
}
