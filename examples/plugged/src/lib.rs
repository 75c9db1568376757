#![doc = include_str!("../README.md")]

use driver::Drivers;

/// The drivers of the stores in Margay's own programs, and of the plugged stores.
pub fn drivers() -> Drivers {
    stores::drivers().with(&sqlite_store::DRIVER).with(&fjall_store::DRIVER)
}
