#![doc = include_str!("../README.md")]

use std::path::PathBuf;

use driver::{ConfigResult, Drivers, Location};

/// The drivers of all kinds of stores that Margay supports, in the order in which help and error messages list them.
pub fn drivers() -> Drivers {
    Drivers::new([
        &backend_sled::DRIVER as _,
        &backend_redb::DRIVER as _,
        &backend_etcd::DRIVER as _,
        &driver::MEMORY as _,
    ])
}

/// Parses a store URL with the list of Margay's [drivers](drivers()).
///
/// # Errors
/// See [`Drivers::parse`].
pub fn at(url: &str) -> ConfigResult<Location> {
    drivers().parse(url)
}

/// Returns the location of the store in a folder, for the driver of the engine `engine`.
///
/// # Errors
/// See [`Drivers::of_engine`].
pub fn of_engine(engine: &str, folder: impl Into<PathBuf>) -> ConfigResult<Location> {
    drivers().of_engine(engine, folder)
}
