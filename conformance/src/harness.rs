//! What the author of a store implements to have it judged.

use std::error::Error;
use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use kv::Store;

use crate::case::Tenancy;

/// Whatever went wrong in an environment.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Something that a case may need and that not every environment can do.
///
/// An ability says what the surroundings of a store allow, never which rules the store follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Ability {
    /// Hand out a store to which nothing was ever written, rather than one that was merely emptied.
    New,
    /// Close the store and open it again ([`Fixture::reopen`]).
    Reopen,
    /// Close the store under handles that are still held ([`Fixture::close`]).
    Close,
    /// Say how much room the store takes ([`Fixture::stored_bytes`]).
    Measure,
}

impl Ability {
    /// Why a case that needs this does not run where it is missing.
    pub fn missing(self) -> &'static str {
        match self {
            Self::New => "this environment has no new stores",
            Self::Reopen => "this environment cannot open a store again",
            Self::Close => "this environment cannot close a store",
            Self::Measure => "this environment cannot measure a store",
        }
    }
}

/// Makes stores for cases.
///
/// Cases run in parallel, so `fresh` is called from several tasks at once. It runs on a tokio runtime and must not block
/// its thread.
#[async_trait]
pub trait Harness: Send + Sync + 'static {
    /// What this environment can do. A case that needs anything else is ignored, with the reason shown, and has to stand
    /// in the list that the caller of [`main`](crate::main) gives.
    fn abilities(&self) -> &[Ability];

    /// Whether others use the stores as well. Cases that need a store of their own are then ignored.
    ///
    /// Nobody does unless told; [`Beside`](crate::Beside) makes an environment in which others do.
    fn tenancy(&self) -> Tenancy {
        Tenancy::Exclusive
    }

    /// An empty store that nobody else uses.
    ///
    /// # Errors
    /// Whatever kept it from being made; the case that asked fails.
    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError>;
}

/// One store for one case, with all that has to live as long as it does: a temporary folder, a server.
///
/// Dropping it takes the store down; what cannot be done while dropping is for [`finish`](Self::finish). A method whose [`Ability`] the harness does not list is never called.
#[async_trait]
pub trait Fixture: Debug + Send + Sync {
    /// The store.
    fn store(&self) -> Arc<dyn Store>;

    /// Another handle on the same store, as far from the first one as the environment allows: another client of a server,
    /// or else a clone.
    ///
    /// # Errors
    /// Whatever kept it from being made.
    async fn another(&self) -> Result<Arc<dyn Store>, BoxError> {
        Ok(self.store())
    }

    /// Closes the store and opens it again; afterwards [`store`](Self::store) hands out the new one. All handles and
    /// streams that a case had have been dropped before. [`Ability::Reopen`].
    ///
    /// # Errors
    /// Whatever kept it from closing or opening.
    async fn reopen(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Reopen but its fixture cannot do it".into())
    }

    /// Closes the store while handles are held. [`Ability::Close`].
    ///
    /// # Errors
    /// Whatever kept it from closing.
    async fn close(&mut self) -> Result<(), BoxError> {
        Err("the harness lists Close but its fixture cannot do it".into())
    }

    /// How many bytes the store takes where it is kept. [`Ability::Measure`].
    ///
    /// # Errors
    /// Whatever kept it from being measured.
    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        Err("the harness lists Measure but its fixture cannot do it".into())
    }

    /// Clears up after the case, whether it passed, failed or panicked. All its handles have been dropped before; only
    /// calls that it gave up may still be on their way.
    ///
    /// # Errors
    /// Whatever could not be cleared up; the case fails.
    async fn finish(&mut self) -> Result<(), BoxError> {
        Ok(())
    }
}
