//! Calico's selector language: it selects nodes, or namespaces, for a pool by their labels.
//!
//! ```text
//! all()   global()   has(k)   !x   x && y   x || y   (x)
//! k == 'v'   k != 'v'   k in {'a', 'b'}   k not in {'a'}   k contains 'v'   k starts with 'v'   k ends with 'v'
//! ```
//! `&&` binds tighter than `||`, `!` tighter than both. A label that is missing makes `!=` and `not in` true, and every
//! other comparison false. An empty selector matches everything.

mod parse;
mod token;

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use crate::model::Labels;

pub use parse::{MAX_DEPTH, MAX_LENGTH};
pub use token::{SelectorError, SelectorErrorKind};

/// A selector that has been read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    root: Node,
}

/// A part of a selector.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    All,
    Global,
    Has(String),
    Compare(String, Comparison, String),
    In(String, BTreeSet<String>),
    NotIn(String, BTreeSet<String>),
    Not(Box<Node>),
    // Two or more.
    And(Vec<Node>),
    // Two or more.
    Or(Vec<Node>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    Equal,
    NotEqual,
    Contains,
    StartsWith,
    EndsWith,
}

impl Selector {
    /// The selector that matches everything.
    pub fn all() -> Self {
        Self { root: Node::All }
    }

    /// True if something with these labels is selected.
    pub fn matches(&self, labels: &Labels) -> bool {
        self.root.matches(labels)
    }

    /// True if `global()` stands somewhere in it.
    pub fn uses_global(&self) -> bool {
        self.root.uses_global()
    }
}

impl FromStr for Selector {
    type Err = SelectorError;

    /// Reads a selector.
    ///
    /// # Errors
    /// [`SelectorError`] if it is not one, or is longer or nested deeper than this allows.
    fn from_str(text: &str) -> Result<Self, SelectorError> {
        Ok(Self { root: parse::parse(text)? })
    }
}

impl Node {
    fn matches(&self, labels: &Labels) -> bool {
        let value = |key: &String| labels.get(key);
        match self {
            Self::All | Self::Global => true,
            Self::Has(key) => labels.contains_key(key),
            Self::Compare(key, Comparison::NotEqual, text) => value(key) != Some(text),
            Self::Compare(key, comparison, text) => value(key).is_some_and(|value| comparison.holds(value, text)),
            Self::In(key, texts) => value(key).is_some_and(|value| texts.contains(value)),
            Self::NotIn(key, texts) => value(key).is_none_or(|value| !texts.contains(value)),
            Self::Not(inner) => !inner.matches(labels),
            Self::And(parts) => parts.iter().all(|part| part.matches(labels)),
            Self::Or(parts) => parts.iter().any(|part| part.matches(labels)),
        }
    }

    fn uses_global(&self) -> bool {
        match self {
            Self::Global => true,
            Self::Not(inner) => inner.uses_global(),
            Self::And(parts) | Self::Or(parts) => parts.iter().any(Self::uses_global),
            _ => false,
        }
    }

    /// How tightly it binds. A part is shown in parentheses unless it binds tighter than the selector that it is a part
    /// of: with more parentheses, the shown text could be nested too deep to be read.
    fn tightness(&self) -> u8 {
        match self {
            Self::Or(_) => 0,
            Self::And(_) => 1,
            Self::Not(_) => 2,
            _ => 3,
        }
    }

    fn fmt_part(&self, f: &mut fmt::Formatter<'_>, part: &Self) -> fmt::Result {
        if part.tightness() > self.tightness() { write!(f, "{part}") } else { write!(f, "({part})") }
    }

    fn fmt_joined(&self, f: &mut fmt::Formatter<'_>, operator: &str, parts: &[Self]) -> fmt::Result {
        for (place, part) in parts.iter().enumerate() {
            if place > 0 {
                write!(f, " {operator} ")?;
            }
            self.fmt_part(f, part)?;
        }
        Ok(())
    }
}

impl Comparison {
    fn holds(self, value: &str, text: &str) -> bool {
        match self {
            Self::Equal => value == text,
            Self::NotEqual => value != text,
            Self::Contains => value.contains(text),
            Self::StartsWith => value.starts_with(text),
            Self::EndsWith => value.ends_with(text),
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Equal => "==",
            Self::NotEqual => "!=",
            Self::Contains => "contains",
            Self::StartsWith => "starts with",
            Self::EndsWith => "ends with",
        }
    }
}

/// A text in quotes. It never holds both kinds of quote, since it was read between two of one kind.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quote = if self.0.contains('\'') { '"' } else { '\'' };
        write!(f, "{quote}{}{quote}", self.0)
    }
}

fn fmt_set(f: &mut fmt::Formatter<'_>, key: &str, operator: &str, texts: &BTreeSet<String>) -> fmt::Result {
    write!(f, "{key} {operator} {{")?;
    for (place, text) in texts.iter().enumerate() {
        write!(f, "{}{}", if place == 0 { "" } else { ", " }, Quoted(text))?;
    }
    f.write_str("}")
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all()"),
            Self::Global => f.write_str("global()"),
            Self::Has(key) => write!(f, "has({key})"),
            Self::Compare(key, comparison, text) => write!(f, "{key} {} {}", comparison.as_str(), Quoted(text)),
            Self::In(key, texts) => fmt_set(f, key, "in", texts),
            Self::NotIn(key, texts) => fmt_set(f, key, "not in", texts),
            Self::Not(inner) => {
                f.write_str("!")?;
                self.fmt_part(f, inner)
            }
            Self::And(parts) => self.fmt_joined(f, "&&", parts),
            Self::Or(parts) => self.fmt_joined(f, "||", parts),
        }
    }
}

impl fmt::Display for Selector {
    /// The selector in one fixed form that reads back as the same selector, unless it is longer than [`MAX_LENGTH`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.root.fmt(f)
    }
}

#[cfg(test)]
mod tests;
