//! The progress of a run, on a terminal.

use std::io::{self, IsTerminal};
use std::time::Duration;

use conformance::{Report, Verdict};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar on stderr; nothing is shown if stderr is not a terminal.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    failed: std::cell::Cell<usize>,
}

impl Progress {
    pub(super) fn new(cases: usize) -> Self {
        let target =
            if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(cases as u64), target);
        let template = "{pos}/{len} [{bar:24}] {prefix}{wide_msg} {elapsed}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar, failed: std::cell::Cell::new(0) }
    }

    /// Shows the name of the case that runs now.
    pub(super) fn working_on(&self, case: &'static str) {
        self.bar.set_message(case);
    }

    /// Counts a case that has ended.
    pub(super) fn done(&self, report: &Report) {
        if matches!(report.verdict, Verdict::Failed(_)) {
            self.failed.set(self.failed.get() + 1);
            self.bar.set_prefix(format!("{} failed, ", self.failed.get()));
        }
        self.bar.inc(1);
    }

    /// Does something while the bar is hidden.
    pub(super) fn aside<T>(&self, work: impl FnOnce() -> T) -> T {
        self.bar.suspend(work)
    }

    /// Removes the bar.
    pub(super) fn over(&self) {
        self.bar.finish_and_clear();
    }
}
