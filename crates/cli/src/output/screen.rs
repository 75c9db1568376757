//! The facts about standard output.

use std::io::{IsTerminal, stdout};

/// The width of an answer that goes to a file.
const USUAL_WIDTH: usize = 100;

/// The facts about standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Screen {
    /// The number of columns.
    pub(crate) width: usize,
    /// True if colours are wanted: on a terminal, unless `NO_COLOR` is set (<https://no-color.org>).
    pub(crate) colours: bool,
}

impl Screen {
    /// Standard output as it is now.
    pub(crate) fn of_stdout() -> Self {
        let columns = rustix::termios::tcgetwinsize(stdout()).map(|size| usize::from(size.ws_col));
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self {
            width: columns.ok().filter(|columns| *columns > 0).unwrap_or(USUAL_WIDTH),
            colours: stdout().is_terminal() && !plain && !dumb,
        }
    }
}
