//! The plan for the store at a URL: how cases may use it, and so which cases run.

use std::fmt;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use conformance::{Beside, BoxError, Fixture, Found, Harness, InPlace};
use datastore::{Location, Place};
use kv::{Content, ErrorKind, Range, RangeRequest};

use super::args::Conformance;
use super::site::{AtUrl, Folder, NewStores};
use crate::error::{Failure, Result};

/// The prefix below which cases write that share a store; each run has its own prefix in it.
pub(super) const PREFIX: &str = "/margay-conformance/";

/// The longest time for the first read of a store.
const FIRST_READ: Duration = Duration::from_secs(15);

/// The permitted work on a store.
#[derive(Debug)]
pub(super) enum Plan {
    /// Each case gets a new store, which is removed afterwards.
    New(Arc<NewStores>),
    /// The store is empty: all cases run in it.
    Empty(Arc<InPlace<AtUrl>>),
    /// Everything in the store is deleted: all cases run in it.
    Erase(Arc<InPlace<AtUrl>>),
    /// The store has keys: only cases that can share it run, below this prefix.
    Beside(Arc<Beside<AtUrl>>, String),
}

impl Plan {
    /// Reads whether the store has keys, and decides. Nothing is deleted yet.
    pub(super) async fn of(location: &Location, args: &Conformance) -> Result<Self> {
        let erase = args.erase_everything.as_deref();
        let host = host(location);
        if let Some(typed) = erase {
            check_host(typed, host.as_deref(), location)?;
        }
        if *location.place() == Place::Memory {
            return Ok(Self::New(Arc::new(NewStores::Memory(location.clone()))));
        }
        let site = AtUrl(location.clone());
        let in_place = |found| Arc::new(InPlace::new(site.clone(), found));
        match first_read(&site).await? {
            Contents::NoStore => {
                let folder = make(location)?.ok_or_else(|| Failure::new(format!("there is no store at {location}")))?;
                Ok(Self::New(Arc::new(NewStores::Below(folder))))
            }
            _ if erase.is_some() => Ok(Self::Erase(in_place(Found::Erase))),
            Contents::Nothing => Ok(Self::Empty(in_place(Found::Leave))),
            Contents::Keys => {
                let prefix = format!("{PREFIX}{:016x}/", fastrand::u64(..));
                Ok(Self::Beside(Arc::new(Beside::new(site, prefix.as_str())), prefix))
            }
        }
    }

    /// The environment for the cases.
    pub(super) fn harness(&self) -> Arc<dyn Harness> {
        match self {
            Self::New(stores) => stores.clone(),
            Self::Empty(in_place) | Self::Erase(in_place) => in_place.clone(),
            Self::Beside(beside, _) => beside.clone(),
        }
    }

    /// Removes the leftovers of all cases, also of cases that were given up.
    pub(super) async fn clear_up(&self) -> Result<(), BoxError> {
        match self {
            Self::New(stores) => Ok(stores.clear_up()?),
            Self::Empty(in_place) | Self::Erase(in_place) => in_place.clear_up().await,
            Self::Beside(beside, _) => beside.clear_up().await,
        }
    }
}

impl fmt::Display for Plan {
    /// The fate of the store, in one sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::New(stores) => match &**stores {
                NewStores::Memory(_) => f.write_str("each case gets a new store"),
                NewStores::Below(_) => {
                    f.write_str("there is no store yet: each case gets a new one there, and all are removed")
                }
            },
            Self::Empty(_) => {
                f.write_str("it holds no key: all cases run in it that a URL allows, and it is emptied after each")
            }
            Self::Erase(_) => f.write_str("every key in it is deleted, before each case and at the end"),
            Self::Beside(_, prefix) => {
                write!(f, "it holds keys: only cases that can share it run, below {prefix}, and that is deleted")
            }
        }
    }
}

/// The state at a URL.
enum Contents {
    NoStore,
    Nothing,
    Keys,
}

async fn first_read(site: &AtUrl) -> Result<Contents> {
    let read = async {
        let mut opened = site.open().await?;
        let one = RangeRequest::new(Range::All).with_limit(1).with_content(Content::KeysOnly);
        let found = opened.store().range(one).await;
        let closed = opened.shut().await;
        let found = found?;
        closed?;
        Ok(if found.count == 0 { Contents::Nothing } else { Contents::Keys })
    };
    match tokio::time::timeout(FIRST_READ, read).await {
        Ok(Err(error)) => reported(error),
        Ok(Ok(contents)) => Ok(contents),
        Err(_) => Err(Failure::new(format!("{} did not answer within {} s", site.0, FIRST_READ.as_secs()))
            .hint("see whether it is running, and whether its address and port are right")),
    }
}

/// The meaning of an error of the first read.
fn reported(error: kv::Error) -> Result<Contents> {
    let hint = match error.kind() {
        ErrorKind::Missing => return Ok(Contents::NoStore),
        ErrorKind::Locked => "some other command or program has the store open; end it, or try again",
        // The error has advice of its own.
        _ if error.detail().is_some() => return Err(error.into()),
        ErrorKind::NotSent | ErrorKind::Timeout | ErrorKind::Disconnected { .. } => {
            "see whether it is running, and whether its address and port are right"
        }
        _ => return Err(error.into()),
    };
    Err(Failure::from(error).hint(hint))
}

/// The folder for new stores, which must be empty.
fn make(location: &Location) -> Result<Option<Folder>> {
    let Some(path) = location.path() else { return Ok(None) };
    let occupied = match fs::read_dir(path) {
        Ok(mut entries) => entries.next().is_some(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
        Err(error) => return Err(Failure::new(format!("{}: {error}", path.display()))),
    };
    if occupied {
        return Err(Failure::new(format!("there is no store at {location}, but the folder is not empty"))
            .hint("name a folder that is empty or does not exist"));
    }
    Folder::make(location).map_err(|error| {
        let failure = Failure::new(format!("cannot make {}: {error}", path.display()));
        match error.kind() {
            std::io::ErrorKind::NotFound => failure.hint("the folder above it has to be there"),
            _ => failure,
        }
    })
}

/// The name of the store that a person has to type: hosts and ports, or the path.
fn host(location: &Location) -> Option<String> {
    match location.cluster() {
        Some(cluster) if cluster.endpoints.is_empty() => Some(cluster.discovery_srv.clone()),
        Some(_) => location.to_string().split_once("://").map(|(_, hosts)| hosts.to_owned()),
        None => location.path().map(|path| path.display().to_string()),
    }
}

/// Refuses to erase a store unless its place was typed out.
fn check_host(typed: &str, host: Option<&str>, location: &Location) -> Result<()> {
    match host {
        Some(host) if host == typed => Ok(()),
        Some(host) => Err(Failure::new(format!(
            "--erase-everything names {typed:?}, which is not where the store at {location} is; nothing was deleted"
        ))
        .hint(format!("to delete every key in that store, type: --erase-everything {host}"))),
        None => Err(Failure::new(format!("{location} has nothing to erase")).hint("leave --erase-everything out")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_typed_out_in_full() {
        let host = |url: &str| host(&stores::at(url).unwrap());
        assert_eq!(host("etcd://10.0.0.1:2379").as_deref(), Some("10.0.0.1:2379"));
        assert_eq!(host("etcd+https://a:1,[fd00::1]:2").as_deref(), Some("a:1,[fd00::1]:2"));
        assert_eq!(host("redb:///srv/x").as_deref(), Some("/srv/x"));
        assert_eq!(host("memory:"), None);
    }
}
