//! The one place that opens engines.

use std::path::Path;
use std::sync::Arc;

use kv::{Error, ErrorKind, Operation, Result, Store};
use kv_local::Engine;
use kv_mvcc::{Blocking, MvccStore};

use crate::location::{Etcd, Location};
use crate::open::Opening;
use crate::served::ServedStore;

/// An open store, and the handle that closes it.
#[derive(Debug)]
pub(crate) enum Opened {
    Mvcc(MvccStore),
    #[cfg(feature = "etcd")]
    Etcd(backend_etcd::EtcdStore),
    /// A daemon has it.
    Served(ServedStore),
}

impl Opened {
    pub(crate) fn store(&self) -> Arc<dyn Store> {
        match self {
            Self::Mvcc(store) => Arc::new(store.clone()),
            #[cfg(feature = "etcd")]
            Self::Etcd(store) => Arc::new(store.clone()),
            Self::Served(store) => Arc::new(store.clone()),
        }
    }

    pub(crate) async fn check_room(&self) -> Result<()> {
        match self {
            Self::Mvcc(store) => store.check_room().await,
            #[cfg(feature = "etcd")]
            Self::Etcd(store) => store.check_alarms().await,
            Self::Served(_) => Ok(()),
        }
    }

    pub(crate) async fn close(self) -> Result<()> {
        match self {
            Self::Mvcc(store) => store.close().await,
            #[cfg(feature = "etcd")]
            Self::Etcd(store) => {
                store.close();
                Ok(())
            }
            Self::Served(_) => Ok(()),
        }
    }
}

/// The engine of an embedded store.
pub(crate) fn engine(location: &Location) -> Result<Box<dyn Engine>> {
    match location {
        #[cfg(feature = "sled")]
        Location::Sled(_) => Ok(Box::new(backend_sled::Sled)),
        #[cfg(feature = "redb")]
        Location::Redb(_) => Ok(Box::new(backend_redb::Redb)),
        #[cfg(not(feature = "sled"))]
        Location::Sled(_) => Err(left_out("sled")),
        #[cfg(not(feature = "redb"))]
        Location::Redb(_) => Err(left_out("redb")),
        Location::Memory | Location::Etcd(_) => {
            Err(Error::new(ErrorKind::Unsupported, Operation::Open, location.to_string())
                .with_detail("it has no files on this host"))
        }
    }
}

/// Adds the command that makes a store to the error of an embedded store that is not there.
pub(crate) fn with_command(error: Error) -> Error {
    match (error.kind(), error.detail()) {
        (ErrorKind::Missing, Some(detail)) => {
            let detail = format!("{detail}; `margay --store {} pool create NAME CIDR` makes it", error.store());
            error.with_detail(detail)
        }
        _ => error,
    }
}

/// A new, empty store in memory.
pub(crate) fn memory() -> Opened {
    Opened::Mvcc(kv_mvcc::memory())
}

#[cfg(feature = "sled")]
pub(crate) async fn sled(path: &Path, opening: Opening) -> Result<Opened> {
    backend_sled::open(path, &options(opening)).await.map(Opened::Mvcc).map_err(with_command)
}

#[cfg(feature = "redb")]
pub(crate) async fn redb(path: &Path, opening: Opening) -> Result<Opened> {
    backend_redb::open(path, &options(opening)).await.map(Opened::Mvcc).map_err(with_command)
}

#[cfg(not(feature = "sled"))]
pub(crate) async fn sled(_path: &Path, _opening: Opening) -> Result<Opened> {
    Err(left_out("sled"))
}

#[cfg(not(feature = "redb"))]
pub(crate) async fn redb(_path: &Path, _opening: Opening) -> Result<Opened> {
    Err(left_out("redb"))
}

#[cfg(feature = "etcd")]
pub(crate) async fn etcd(etcd: &Etcd, opening: Opening) -> Result<Opened> {
    match opening.blocking {
        Blocking::InPlace => crate::etcd::open(etcd, Some(std::time::Instant::now() + opening.wait)).map(Opened::Etcd),
        Blocking::OnThreads => {
            let etcd = etcd.clone();
            // Certificates are read from files.
            let opening = tokio::task::spawn_blocking(move || crate::etcd::open(&etcd, None));
            let opened =
                opening.await.map_err(|panic| Error::new(ErrorKind::Io, Operation::Open, "etcd").with_source(panic));
            let store = opened??;
            // Boxed: every call that opens a store has room for this future, and a plugin never runs it.
            Box::pin(store.check()).await?;
            Ok(Opened::Etcd(store))
        }
    }
}

#[cfg(not(feature = "etcd"))]
pub(crate) async fn etcd(_etcd: &Etcd, _opening: Opening) -> Result<Opened> {
    Err(left_out("etcd"))
}

#[cfg(not(all(feature = "sled", feature = "redb", feature = "etcd")))]
fn left_out(store: &'static str) -> Error {
    Error::new(ErrorKind::Unsupported, Operation::Open, store)
        .with_detail(format!("this build was made without {store}"))
}

#[cfg(any(feature = "sled", feature = "redb"))]
fn options(opening: Opening) -> kv_local::OpenOptions {
    use crate::open::Create;

    let Opening { create, purpose, wait, blocking } = opening;
    let create = match create {
        Create::Never => kv_local::Create::Never,
        Create::IfMissing => kv_local::Create::IfMissing,
    };
    kv_local::OpenOptions::default().with_create(create).with_purpose(purpose).with_wait(wait).with_blocking(blocking)
}
