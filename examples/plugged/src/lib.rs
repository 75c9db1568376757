#![doc = include_str!("../README.md")]

use driver::Drivers;

/// The stores of Margay's programs, and the plugged stores.
pub fn drivers() -> Drivers {
    stores::drivers().with(&sqlite_store::DRIVER).with(&fjall_store::DRIVER)
}
