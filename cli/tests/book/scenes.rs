//! What there is where a page begins.

use crate::machine::Machine;

/// Prepares what a part of a page begins with, if it begins with anything; the page itself has the heading "".
pub(crate) fn set(_page: &str, _heading: &str, _machine: &mut Machine) {}
