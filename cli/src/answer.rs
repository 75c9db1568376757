//! The answer of a command: text for people, JSON for programs, and notes beside it.

use std::io::{self, Write};

use serde::Serialize;

use crate::args::Format;
use crate::error::{Failure, Result};
use crate::output::yaml;

/// The answer of a command. It is printed when the store is closed already, so that a slow reader holds up nobody.
#[derive(Debug)]
pub(crate) struct Answer {
    text: String,
    /// The text with more in it, for a caller that asks for that.
    wide: Option<String>,
    layout: Layout,
    json: String,
    notes: Vec<String>,
    failure: Option<Failure>,
    stdout_is_taken: bool,
}

/// How a text ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// With one line break, whatever it has.
    Trimmed,
    /// As it is.
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

    /// With texts that are printed to the last line break: a short one that replaces the text, and a wide one.
    pub(crate) fn laid_out(mut self, text: String, wide: String) -> Self {
        (self.text, self.wide, self.layout) = (text, Some(wide), Layout::Exact);
        self
    }

    /// With something that a person should know beside the answer.
    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    /// An answer that is not whole, because of this: it is printed, and then the command fails.
    pub(crate) fn incomplete(mut self, failure: Failure) -> Self {
        self.failure = Some(failure);
        self
    }

    /// Printed on stderr, because stdout is taken by what was asked for.
    pub(crate) fn on_stderr(mut self) -> Self {
        self.stdout_is_taken = true;
        self
    }

    /// The same answer, of a command that has written nothing: it tells what would have been done.
    pub(crate) fn of_a_dry_run(mut self) -> Self {
        let told = |line: &str| match line.strip_prefix("Successfully ") {
            Some(done) => format!("Dry run: would have {done}"),
            None => line.to_owned(),
        };
        self.text = self.text.lines().map(told).collect::<Vec<_>>().join("\n");
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
