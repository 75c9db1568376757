//! The reasons why a request to the Kubernetes API has no usable answer.

use std::fmt;
use std::io;
use std::time::Duration;

use agent::Code;

/// A problem, and the advice about it. No secret is kept in it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) code: Code,
    pub(super) what: String,
    pub(super) advice: String,
}

impl Problem {
    /// A problem that somebody must mend.
    pub(super) fn new(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { code: Code::Internal, what: what.into(), advice: advice.into() }
    }

    /// A problem that may be gone a little later.
    pub(super) fn passing(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { code: Code::TryAgain, ..Self::new(what, advice) }
    }
}

/// The reason why a request has no answer. The plugins report the first two in different words.
#[derive(Debug)]
pub(super) enum Failure {
    /// There is no connection.
    Unreachable(io::Error),
    /// There was no answer in that time.
    Late(Duration),
    /// Everything else.
    Reported(Problem),
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self::Reported(problem)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(error) => error.fmt(f),
            Self::Late(left) => write!(f, "there was no answer in {:.1} s", left.as_secs_f32()),
            Self::Reported(problem) => f.write_str(&problem.what),
        }
    }
}
