#![doc = include_str!("../README.md")]

use driver::{Driver, Drivers};

/// The plugged stores, each with the file that a commit is written to, below the store's folder.
pub static PLUGGED: [(&dyn Driver, &str); 1] = [(&sqlite_store::DRIVER, "sqlite/db-wal")];

/// The stores of Margay's programs, and the plugged ones.
pub fn drivers() -> Drivers {
    PLUGGED.iter().fold(stores::drivers(), |drivers, (driver, _)| drivers.with(*driver))
}
