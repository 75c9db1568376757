//! Checks for conformance cases, and the failures that the checks report.

use std::fmt::{self, Debug};
use std::panic::Location;
use std::time::Duration;

use kv::ErrorKind;

/// Maximum time that a store may take to recover after a fault, or to notice a silent connection.
pub(crate) const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum length of an expected or actual value in a failure report, in characters.
const MAX_SHOWN_CHARS: usize = 700;

pub(crate) type Checked<T = ()> = Result<T, Failure>;

/// A violation of a rule by a store.
#[derive(Clone, Debug)]
pub struct Failure {
    rule: Option<&'static str>,
    checked: String,
    expected: String,
    got: String,
    at: &'static Location<'static>,
}

impl Failure {
    #[track_caller]
    pub(crate) fn new(checked: impl Into<String>, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self { rule: None, checked: checked.into(), expected: expected.into(), got: got.into(), at: Location::caller() }
    }

    /// The number of the broken rule, for example `R2`.
    pub fn rule(&self) -> &'static str {
        self.rule.unwrap_or("?")
    }

    /// A description of what was checked.
    pub fn checked(&self) -> &str {
        &self.checked
    }

    /// The expected result.
    pub fn expected(&self) -> &str {
        &self.expected
    }

    /// The actual result.
    pub fn got(&self) -> &str {
        &self.got
    }

    /// Adds a note to the description of what was checked.
    pub(crate) fn with_note(mut self, note: &str) -> Self {
        self.checked = format!("{} ({note})", self.checked);
        self
    }

    /// Sets the number of the broken rule, unless the failure already has one.
    pub(crate) fn or_rule(mut self, rule: Option<&'static str>) -> Self {
        self.rule = self.rule.or(rule);
        self
    }
}

impl fmt::Display for Failure {
    /// Writes the broken rule, what was checked, the expected and the actual result, and the location in the source.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "breaks rule {}: {}", self.rule(), crate::rules::text_of(self.rule()))?;
        writeln!(f, "  checked:  {}", self.checked)?;
        writeln!(f, "  expected: {}", self.expected)?;
        writeln!(f, "  got:      {}", self.got)?;
        write!(f, "  at:       {}", self.at)
    }
}

impl std::error::Error for Failure {}

impl From<kv::Error> for Failure {
    /// Turns the error of a store call that had to succeed into a failure of the test case.
    #[track_caller]
    fn from(error: kv::Error) -> Self {
        Self::new(format!("a {} that has to succeed", error.operation()), "an answer", error.to_string())
    }
}

impl From<tokio::task::JoinError> for Failure {
    /// Turns a panic of a task, in the store or in the test case, into a failure of the case.
    #[track_caller]
    fn from(error: tokio::task::JoinError) -> Self {
        Self::new("a task of the case", "no panic", error.to_string())
    }
}

/// Assigns a failed check to a rule that is not the first rule of the test case.
pub(crate) trait JudgedByRule {
    /// Sets the broken rule of the failure to `rule`.
    fn of(self, rule: &'static str) -> Self;
}

impl<T> JudgedByRule for Checked<T> {
    fn of(self, rule: &'static str) -> Self {
        self.map_err(|failure| failure.or_rule(Some(rule)))
    }
}

/// Formats a value for a failure report, and truncates the text after [`MAX_SHOWN_CHARS`] characters.
pub(crate) fn shown(thing: &impl Debug) -> String {
    let text = format!("{thing:?}");
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((cut, _)) => format!("{}... ({} characters)", &text[..cut], text.len()),
        None => text,
    }
}

/// Checks that `got` equals `expected`.
#[track_caller]
pub(crate) fn same<A: PartialEq<B> + Debug, B: Debug>(checked: &str, got: A, expected: B) -> Checked {
    if got == expected {
        return Ok(());
    }
    Err(Failure::new(checked, shown(&expected), shown(&got)))
}

/// Checks that `condition` holds; if not, the failure report shows `got`.
#[track_caller]
pub(crate) fn holds(expected: &str, condition: bool, got: &impl Debug) -> Checked {
    if condition {
        return Ok(());
    }
    Err(Failure::new("a condition", expected, shown(got)))
}

/// Checks that `got` is present and returns it.
#[track_caller]
pub(crate) fn some<T>(checked: &str, got: Option<T>) -> Checked<T> {
    got.ok_or_else(|| Failure::new(checked, "something", "nothing"))
}

/// Checks that a store call failed with an error of exactly this kind.
#[track_caller]
pub(crate) fn refused<T: Debug>(checked: &str, got: kv::Result<T>, kind: impl Into<ErrorKind>) -> Checked {
    let kind = kind.into();
    match got {
        Err(error) if *error.kind() == kind => Ok(()),
        Err(error) => Err(Failure::new(checked, format!("the error {kind:?}"), format!("the error {error:?}"))),
        Ok(answer) => Err(Failure::new(checked, format!("the error {kind:?}"), shown(&answer))),
    }
}

/// Checks that a store call failed with `Compacted`, and that the error has the correct compaction mark or none.
#[track_caller]
pub(crate) fn compacted<T: Debug>(checked: &str, got: kv::Result<T>, mark: kv::Revision) -> Checked {
    match got {
        Err(error) => is_compacted(checked, error.kind(), mark),
        Ok(answer) => Err(Failure::new(checked, "the error Compacted", shown(&answer))),
    }
}

/// Checks that an error kind is `Compacted` with the correct compaction mark, or with none.
#[track_caller]
pub(crate) fn is_compacted(checked: &str, kind: &ErrorKind, mark: kv::Revision) -> Checked {
    match kind {
        ErrorKind::Compacted { compact_revision } if !compact_revision.is_set() || *compact_revision == mark => Ok(()),
        other => Err(Failure::new(checked, format!("the error Compacted with mark {mark}"), shown(other))),
    }
}

/// Checks that a store call failed with `TooLarge`, whatever size the error states.
#[track_caller]
pub(crate) fn too_large<T: Debug>(checked: &str, got: kv::Result<T>) -> Checked {
    match got {
        Err(error) if matches!(error.kind(), ErrorKind::TooLarge { .. }) => Ok(()),
        Err(error) => Err(Failure::new(checked, "the error TooLarge", format!("the error {error:?}"))),
        Ok(answer) => Err(Failure::new(checked, "the error TooLarge", shown(&answer))),
    }
}

/// Awaits `work` with a time limit.
pub(crate) async fn within<T>(patience: Duration, checked: &str, work: impl Future<Output = T>) -> Checked<T> {
    tokio::time::timeout(patience, work)
        .await
        .map_err(|_| Failure::new(checked, "an end", format!("nothing within {patience:?}")))
}
