#![doc = include_str!("../README.md")]

use std::path::PathBuf;

use driver::{Drivers, Location, Result};

/// The stores of Margay's programs, in the order in which help and errors name them.
pub fn drivers() -> Drivers {
    Drivers::new([
        &backend_sled::DRIVER as _,
        &backend_redb::DRIVER as _,
        &backend_etcd::DRIVER as _,
        &driver::MEMORY as _,
    ])
}

/// The store at a URL, in the care of one of these drivers.
///
/// # Errors
/// Every error of [`Drivers::parse`].
pub fn at(url: &str) -> Result<Location> {
    drivers().parse(url)
}

/// The store of an engine in a folder.
///
/// # Errors
/// Every error of [`Drivers::of_engine`].
pub fn of_engine(engine: &str, folder: impl Into<PathBuf>) -> Result<Location> {
    drivers().of_engine(engine, folder)
}
