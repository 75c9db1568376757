//! The answer of a command: text for people, JSON for programs, and notes beside it.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::Serialize;

use crate::error::{Failure, Result};
use crate::options::Format;
use crate::output::{Row, table, yaml};

/// The answer of a command. It is printed after the store is closed, so that a slow reader delays nobody.
#[derive(Debug)]
pub(crate) struct Answer {
    text: String,
    /// The text for `-o wide`, if it has more than the other one.
    wide: Option<String>,
    layout: Layout,
    json: String,
    notes: Vec<String>,
    failure: Option<Failure>,
    stdout_is_taken: bool,
}

/// The end of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// One line break, however many the text has.
    Trimmed,
    /// The end that the text has.
    Exact,
}

impl Answer {
    /// An answer in both forms.
    pub(crate) fn new(text: impl Into<String>, json: &impl Serialize) -> Result<Self> {
        let json = serde_json::to_string_pretty(json).map_err(|error| Failure::new(format!("JSON: {error}")))?;
        Ok(Self {
            text: text.into(),
            wide: None,
            layout: Layout::Trimmed,
            json,
            notes: Vec::new(),
            failure: None,
            stdout_is_taken: false,
        })
    }

    /// An answer that is a list, which JSON has under this name.
    pub(crate) fn rows<R: Row>(name: &'static str, rows: &[R]) -> Result<Self> {
        Self::new(table(rows), &BTreeMap::from([(name, rows)]))
    }

    /// Sets a short text, which replaces the other one, and a wide one. Both are printed to the last line break.
    pub(crate) fn laid_out(mut self, text: String, wide: String) -> Self {
        (self.text, self.wide, self.layout) = (text, Some(wide), Layout::Exact);
        self
    }

    /// Adds notes.
    pub(crate) fn notes(self, notes: impl IntoIterator<Item = String>) -> Self {
        notes.into_iter().fold(self, Self::note)
    }

    /// Adds a note that a person should read beside the answer.
    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    /// Makes the answer incomplete: it is printed, and then the command fails with this failure.
    pub(crate) fn incomplete(mut self, failure: Failure) -> Self {
        self.failure = Some(failure);
        self
    }

    /// Prints the answer on stderr, because the requested data is on stdout.
    pub(crate) fn on_stderr(mut self) -> Self {
        self.stdout_is_taken = true;
        self
    }

    /// Makes it the answer of a dry run: "Successfully ..." becomes "Dry run: would have ...".
    pub(crate) fn of_a_dry_run(mut self) -> Self {
        let reported = |line: &str| match line.strip_prefix("Successfully ") {
            Some(done) => format!("Dry run: would have {done}"),
            None => line.to_owned(),
        };
        self.text = self.text.lines().map(reported).collect::<Vec<_>>().join("\n");
        let says_so = ["\n  \"dry_run\":", "\n  \"would_"].iter().any(|member| self.json.contains(member));
        if !says_so && let Some(members) = self.json.strip_suffix("\n}") {
            self.json = format!("{members},\n  \"dry_run\": true\n}}");
        }
        self
    }

    /// Prints the answer on `out` and the notes on `err`.
    pub(crate) fn print(self, format: Format, out: &mut dyn Write, err: &mut dyn Write) -> Result<()> {
        for note in &self.notes {
            _ = writeln!(err, "note: {note}");
        }
        let out: &mut dyn Write = if self.stdout_is_taken { &mut *err } else { &mut *out };
        match format {
            Format::Table => self.layout.print(&self.text, out)?,
            Format::Wide => self.layout.print(self.wide.as_ref().unwrap_or(&self.text), out)?,
            Format::Yaml => {
                let value = serde_json::from_str(&self.json).map_err(|error| Failure::new(format!("JSON: {error}")))?;
                write!(out, "{}", yaml(&value))?;
            }
            Format::Json => writeln!(out, "{}", self.json)?,
        }
        out.flush()?;
        self.failure.map_or(Ok(()), Err)
    }
}

impl Layout {
    fn print(self, text: &str, out: &mut dyn Write) -> io::Result<()> {
        match self {
            Self::Trimmed => writeln!(out, "{}", text.trim_end_matches('\n')),
            Self::Exact => write!(out, "{text}"),
        }
    }
}
