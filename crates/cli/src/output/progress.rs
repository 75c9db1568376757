//! The progress of a command, on a terminal, if it takes longer than a moment.

use std::cell::Cell;
use std::future::Future;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The time after which a person sees that the command goes on.
const SILENCE: Duration = Duration::from_secs(1);

/// A bar on stderr that appears after a second; nothing is shown if stderr is not a terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    began: Instant,
    /// True if it will still appear.
    hidden: Cell<bool>,
}

impl Progress {
    /// The progress of `what`, with its number of keys if that is known.
    pub(crate) fn new(what: &'static str, keys: Option<u64>) -> Self {
        let bar = ProgressBar::with_draw_target(keys, ProgressDrawTarget::hidden()).with_message(what);
        let template = match keys {
            Some(_) => "{msg} {human_pos}/{human_len} keys [{bar:24}] {per_sec} {elapsed}",
            None => "{spinner} {msg} {human_pos} keys {per_sec} {elapsed}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { bar, began: Instant::now(), hidden: Cell::new(io::stderr().is_terminal()) }
    }

    /// Shows the number of keys that are done.
    pub(crate) fn at(&self, keys: u64) {
        if self.hidden.get() && self.began.elapsed() >= SILENCE {
            self.hidden.set(false);
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
            self.bar.enable_steady_tick(Duration::from_millis(200));
        }
        self.bar.set_position(keys);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Waits for `work`. If it takes longer than a moment, a terminal shows that it goes on.
pub(crate) async fn patiently<T>(what: &str, work: impl Future<Output = T>) -> T {
    if !io::stderr().is_terminal() {
        return work.await;
    }
    let mut work = std::pin::pin!(work);
    if let Ok(done) = tokio::time::timeout(SILENCE, &mut work).await {
        return done;
    }
    let spinner = ProgressBar::new_spinner().with_message(what.to_owned()).with_elapsed(SILENCE);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg} {elapsed}") {
        spinner.set_style(style);
    }
    spinner.enable_steady_tick(Duration::from_millis(200));
    let done = work.await;
    spinner.finish_and_clear();
    done
}
