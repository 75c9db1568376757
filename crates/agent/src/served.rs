//! The daemon `margay serve` does the verbs, if there is one for the store. Otherwise, and whatever is wrong with it, the plugin
//! does them by itself.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use datastore::Location;
use datastore::served::{is_meant, is_trusted, socket};
use ipam_core::assign::Repeated;
use wire::{Connection, FROZEN_AFTER, Kind};

use crate::allocator::Allocator;
use crate::alone::{Alone, STATUS_BUDGET};
use crate::error::Result;
use crate::session::Session;
use crate::store_at::StoreAt;
use crate::verb::{Answer, Asked, Verb};

/// Sends verbs to the daemon of a store, if there is one. Otherwise, and whenever the daemon does not do it, the
/// plugin does it by itself.
#[derive(Clone, Debug, Default)]
pub struct Served {
    alone: Alone,
}

/// The fate of a request to the daemon.
#[derive(Debug)]
enum Came {
    /// The daemon has answered.
    Answer(Answer),
    /// No daemon has the request.
    Nowhere,
    /// The daemon had the request, and what became of it is not known.
    Lost,
}

impl Served {
    /// An allocator for a call that has the store open already: what the daemon leaves to the plugin is done in the session.
    pub fn within(session: Arc<Session>) -> Self {
        Self { alone: Alone::within(session) }
    }
}

impl Allocator for Served {
    fn call(&self, at: &StoreAt, verb: &Verb) -> Result<Answer> {
        if verb.is_for_the_plugin_alone() {
            return self.alone.call(at, verb);
        }
        let begun = Instant::now();
        // The connection on which the daemon was asked to make way must stay until the store is open.
        let (repeated, _announced) = match ask(at, verb) {
            Came::Answer(Answer::Refused(error)) => return Err(error),
            Came::Answer(answer) if verb.is_answered_by(&answer) => return Ok(answer),
            Came::Answer(answer) => {
                tracing::debug!(?answer, "the daemon margay serve leaves it to the plugin");
                (verb.repeated(), announce(&at.location))
            }
            Came::Lost | Came::Nowhere
                if matches!(verb, Verb::Status(_))
                    && at.location.path().is_some()
                    && begun.elapsed() >= STATUS_BUDGET =>
            {
                tracing::info!("the daemon has the store all the time, which says that it works");
                return Ok(Answer::Ready);
            }
            Came::Lost => (verb.repeated(), None),
            Came::Nowhere => (None, None),
        };
        self.alone.call(&at.with_time_left(begun), repeated.as_ref().unwrap_or(verb))
    }
}

impl Verb {
    /// The verb after the daemon had it: what the daemon may have assigned is the answer.
    fn repeated(&self) -> Option<Self> {
        let Self::Add(add) = self else { return None };
        let mut add = add.clone();
        add.request.repeated = Repeated::SameAnswer;
        Some(Self::Add(add))
    }
}

/// Sends a verb to the daemon, and waits for the answer as long as the daemon is alive, within the verb's time.
fn ask(at: &StoreAt, verb: &Verb) -> Came {
    let within = verb.budget(at);
    let end = Instant::now() + within;
    let location = &at.location;
    let Some(socket) = socket(location) else { return Came::Nowhere };
    let connection = match Connection::open(&socket, within, |uid| is_trusted(location, uid)) {
        Ok(connection) => connection,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
            return Came::Nowhere;
        }
        Err(error) => {
            tracing::warn!(%error, socket = %socket.display(), "the daemon margay serve is of no use; going on without it");
            return Came::Nowhere;
        }
    };
    if !is_meant(location, &connection.hello) {
        tracing::debug!(hello = ?connection.hello, "the daemon has another store, none, or is of another version");
        return Came::Nowhere;
    }
    let within: Duration = end.saturating_duration_since(Instant::now());
    let asked = Asked { within, lock_file: at.lock_file.clone(), verb: verb.clone() };
    match connection.ask(Kind::Verb, &asked, within) {
        Ok(answer) => Came::Answer(answer),
        Err(error) => {
            tracing::warn!(%error, "the daemon margay serve has not answered; going on without it");
            Came::Lost
        }
    }
}

/// Asks the daemon to make way, where it has the store. The connection must stay until the store is open.
fn announce(location: &Location) -> Option<Connection> {
    let socket = socket(location).filter(|_| location.path().is_some())?;
    let mut connection = Connection::open(&socket, FROZEN_AFTER, |uid| is_trusted(location, uid)).ok()?;
    connection.ask_to_yield().ok()?;
    Some(connection)
}
