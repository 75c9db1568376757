//! The form of answers. Nothing here depends on a store.

use std::fmt::Display;
use std::time::SystemTime;

use serde::Serializer;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

mod aligned;
mod file;
mod number;
mod ordered;
mod progress;
mod screen;
mod table;
mod yaml;

pub(crate) use aligned::aligned;
pub(crate) use file::whole_file;
pub(crate) use number::{five_digits, part};
pub(crate) use ordered::Ordered;
pub(crate) use progress::{Progress, patiently};
pub(crate) use screen::Screen;
pub(crate) use table::{Column, Columns, Row, render, table};
pub(crate) use yaml::yaml;

/// Serialises a value as the string that it is printed as.
pub(crate) fn as_text<S: Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// A time for people and programs, in UTC and whole seconds.
pub(crate) fn rfc3339(time: SystemTime) -> String {
    let time = OffsetDateTime::from(time);
    time.replace_nanosecond(0).unwrap_or(time).format(&Rfc3339).unwrap_or_else(|_| "an unknown time".to_owned())
}

/// A text from the store, made safe for a terminal: control characters are escaped.
pub(crate) fn printable(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut safe, c| {
        if c.is_control() {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
        safe
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n'\u{e9}"), "a\\u{1b}[2Jb\\n'\u{e9}");
    }
}
