#![doc = include_str!("../README.md")]

use driver::Drivers;

/// The drivers of the stores in Margay's own programs, plus the drivers of the plugged example stores.
pub fn drivers() -> Drivers {
    stores::drivers().with(&sqlite_store::DRIVER).with(&fjall_store::DRIVER)
}
