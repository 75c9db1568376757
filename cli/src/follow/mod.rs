//! Reading what has happened in a store, and what happens.
//!
//! A store tells of it in parts: first a state, then everything that came after it. Where its history was given up
//! before it was read, that is reported, and the state at which it goes on.

mod embedded;
mod watched;

use std::time::SystemTime;

use datastore::{Location, served};
use kv::{Batch, Key, Kv, Range, Revision};

use crate::error::Result;
use embedded::Embedded;
use watched::Watched;

/// Where to begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// With the oldest state that there is, up to what is the newest one now.
    Oldest,
    /// With the newest state.
    Newest,
    /// After the newest state.
    Next,
}

/// A part of what a store tells.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    /// It begins here; what there was at this revision follows, unless only what comes next was asked for.
    Begins(Revision, Option<SystemTime>),
    /// Keys as they were at this revision.
    Listed(Revision, Vec<Kv>),
    /// The happenings, one revision each. It is known of each key what was there before.
    Happened(Vec<Batch>),
    /// The history after the first revision, up to the second one, was removed unread. The state at the second one
    /// follows.
    GivenUp(Revision, Revision),
    /// The store cannot be reached, because of this. It goes on from here as soon as it can; ask again a little later.
    Interrupted(String),
    /// All was reported up to this revision.
    Reached(Revision),
}

/// The reader.
pub(crate) enum Follower {
    /// It opens the files in turns.
    Embedded(Box<Embedded>),
    /// It watches a store that others keep open.
    Watched(Box<Watched>),
}

impl Follower {
    /// A reader of this range of a store.
    pub(crate) async fn new(location: &Location, range: Range, start: Start) -> Self {
        let is_kept_open = match location {
            Location::Etcd(_) => true,
            _ => served::connect(location, crate::store::wait()).await.is_some(),
        };
        if is_kept_open {
            Self::Watched(Box::new(Watched::new(location.clone(), range, start)))
        } else {
            Self::Embedded(Box::new(Embedded::new(location.clone(), range, start)))
        }
    }

    /// The next parts; possibly none. An embedded store is released when this returns, and is held no longer than a few
    /// milliseconds if another process waits for it. A watch takes a quarter of a second at most where nothing is new.
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) async fn read(&mut self) -> Result<Vec<Part>> {
        match self {
            Self::Embedded(one) => one.read().await,
            Self::Watched(one) => one.read().await,
        }
    }

    /// Whether there is anything new, or nobody knows. To be asked before reading on after [`Part::Reached`].
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) async fn is_worth_reading(&self) -> Result<bool> {
        match self {
            Self::Embedded(one) => one.is_worth_reading().await,
            Self::Watched(_) => Ok(true),
        }
    }

    /// Ends it.
    pub(crate) async fn close(self) -> Result<()> {
        match self {
            Self::Embedded(_) => Ok(()),
            Self::Watched(one) => one.close().await,
        }
    }
}

/// Where a reader has come to.
#[derive(Clone, Debug)]
enum Place {
    /// Nothing was read.
    Before(Start),
    /// The state at this revision, from this key on.
    State(Revision, Key),
    /// The happenings from this revision on.
    Log(Revision),
}

impl Place {
    /// The last revision of which something was read; unset at the beginning.
    fn read(&self) -> Revision {
        match *self {
            Self::Before(_) => Revision::UNSET,
            Self::State(at, _) => at,
            Self::Log(next) => Revision::new(next.get() - 1),
        }
    }
}
