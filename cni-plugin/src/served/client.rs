//! The plugin's side.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use datastore::Location;
use datastore::served::{is_meant, is_trusted, socket};
use ipam_core::assign::{AssignRequest, NamespaceLabels, Repeated};
use wire::{Connection, FROZEN_AFTER, Kind};

use super::call::{Answer, Asked, Call};
use crate::allocator::{STATUS_BUDGET, StoreAllocator, answer, assign_request, budget, pools_depend_on_namespace};
use crate::error::Result;
use crate::request::{
    AddRequest, Allocator, Assigned, CheckRequest, Checked, Collected, DelRequest, GcRequest, Quarantine, StoreAt,
};
use crate::session::Session;
use crate::verbs::{Check, Del, Gc};

/// Sends requests to the daemon of a store, if there is one. Otherwise, and whenever the daemon does not do it, the
/// plugin does it by itself.
#[derive(Clone, Debug, Default)]
pub struct Served {
    alone: StoreAllocator,
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

/// Sends a request to the daemon, and waits for the answer as long as the daemon is alive, at most `within`.
fn ask(at: &StoreAt, call: Call, within: Duration) -> Came {
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
    let within = end.saturating_duration_since(Instant::now());
    let asked = Asked { within, lock_file: at.lock_file.clone(), call };
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

/// An answer that does not belong to the request, or none that helps: the plugin goes on by itself.
fn of_no_use(location: &Location, answer: &Answer) -> Option<Connection> {
    tracing::debug!(?answer, "the daemon margay serve leaves it to the plugin");
    announce(location)
}

impl Served {
    /// The same for a call that has the store open already: what the daemon leaves to the plugin is done in the session.
    pub(crate) fn within(session: Arc<Session>) -> Self {
        Self { alone: StoreAllocator::within(session) }
    }

    /// ADD by the plugin itself after the daemon had it: what the daemon may have assigned is the answer.
    fn add_again(&self, request: &AddRequest, begun: Instant, answer: Option<&Answer>) -> Result<Vec<Assigned>> {
        let _announced = answer.and_then(|answer| of_no_use(&request.store.location, answer));
        let request = AddRequest { store: request.store.with_time_left(begun), ..request.clone() };
        self.alone.add_repeated(&request, Repeated::SameAnswer)
    }
}

impl Allocator for Served {
    fn add(&self, request: &AddRequest) -> Result<Vec<Assigned>> {
        if request.vm.is_some() {
            return self.alone.add(request);
        }
        let mut assign: AssignRequest = assign_request(request);
        let begun = Instant::now();
        let ask = |assign: &AssignRequest| {
            let within = budget(&request.store).saturating_sub(begun.elapsed());
            ask(&request.store, Call::Add(Box::new(assign.clone())), within)
        };
        let mut came = ask(&assign);
        if let (Came::Answer(Answer::NamespaceWanted), Some(namespaces)) = (&came, &request.namespaces) {
            let left = request.store.patience.saturating_sub(begun.elapsed());
            assign.namespace_labels = namespaces.labels(&request.namespace, left)?;
            assign.namespace = NamespaceLabels::Known;
            came = ask(&assign);
        }
        match came {
            Came::Answer(Answer::Assigned(assigned)) => Ok(assigned.into_iter().map(answer).collect()),
            Came::Answer(Answer::Refused(error)) => Err(error),
            Came::Answer(other) => self.add_again(request, begun, Some(&other)),
            Came::Lost => self.add_again(request, begun, None),
            Came::Nowhere => {
                self.alone.add(&AddRequest { store: request.store.with_time_left(begun), ..request.clone() })
            }
        }
    }

    fn del(&self, request: &DelRequest) -> Result<()> {
        if request.vm.is_some() {
            return self.alone.del(request);
        }
        let (at, begun) = (&request.store, Instant::now());
        let again = || DelRequest { store: at.with_time_left(begun), ..request.clone() };
        match ask(at, Call::Del(Del::of(request)), budget(at)) {
            Came::Answer(Answer::Released(addresses)) => {
                tracing::debug!(?addresses, "released");
                Ok(())
            }
            Came::Answer(Answer::Refused(error)) => Err(error),
            Came::Answer(other) => {
                let _announced = of_no_use(&at.location, &other);
                self.alone.del(&again())
            }
            Came::Lost | Came::Nowhere => self.alone.del(&again()),
        }
    }

    fn check(&self, request: &CheckRequest) -> Result<Checked> {
        let (at, begun) = (&request.store, Instant::now());
        let again = || CheckRequest { store: at.with_time_left(begun), ..request.clone() };
        match ask(at, Call::Check(Check::of(request)), budget(at)) {
            Came::Answer(Answer::Compared(comparison)) => Ok(Checked::Compared(comparison)),
            Came::Answer(Answer::Unknown(why)) => Ok(Checked::Unknown(why)),
            Came::Answer(Answer::Refused(error)) => Err(error),
            Came::Answer(other) => {
                let _announced = of_no_use(&at.location, &other);
                self.alone.check(&again())
            }
            Came::Lost | Came::Nowhere => self.alone.check(&again()),
        }
    }

    fn status(&self, request: &AddRequest) -> Result<()> {
        let (at, begun) = (&request.store, Instant::now());
        match ask(at, Call::Status(Box::new(assign_request(request))), STATUS_BUDGET) {
            Came::Answer(Answer::Ready) => Ok(()),
            Came::Answer(Answer::NamespaceWanted) => {
                pools_depend_on_namespace();
                Ok(())
            }
            Came::Answer(Answer::Refused(error)) => Err(error),
            Came::Answer(other) => {
                let _announced = of_no_use(&at.location, &other);
                self.alone.status(request)
            }
            Came::Lost | Came::Nowhere if at.location.path().is_some() && begun.elapsed() >= STATUS_BUDGET => {
                tracing::info!("the daemon has the store all the time, which says that it works");
                Ok(())
            }
            Came::Lost | Came::Nowhere => self.alone.status(request),
        }
    }

    fn quarantine(&self, at: &StoreAt, what: &Quarantine) -> Result<()> {
        let begun = Instant::now();
        let again = || at.with_time_left(begun);
        match ask(at, Call::Quarantine(what.clone()), budget(at)) {
            Came::Answer(Answer::Released(_)) => Ok(()),
            Came::Answer(Answer::Refused(error)) => Err(error),
            Came::Answer(other) => {
                let _announced = of_no_use(&at.location, &other);
                self.alone.quarantine(&again(), what)
            }
            Came::Lost | Came::Nowhere => self.alone.quarantine(&again(), what),
        }
    }

    fn gc(&self, request: &GcRequest) -> Result<Collected> {
        let (at, begun) = (&request.store, Instant::now());
        let again = || GcRequest { store: at.with_time_left(begun), ..request.clone() };
        match ask(at, Call::Gc(Gc::of(request)), budget(at)) {
            Came::Answer(Answer::Collected(collected)) => Ok(collected),
            Came::Answer(Answer::Refused(error)) => Err(error),
            Came::Answer(other) => {
                let _announced = of_no_use(&at.location, &other);
                self.alone.gc(&again())
            }
            Came::Lost | Came::Nowhere => self.alone.gc(&again()),
        }
    }
}
