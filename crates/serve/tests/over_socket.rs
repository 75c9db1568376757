//! Runs all conformance cases on a store that is reached through the daemon's socket.

mod support;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness};
use datastore::served::{self, ServedStore};
use kv::Store;
use serve::daemon::Daemon;
use serve::socket::ServeLock;
use tokio::net::UnixListener;
use tokio::task::JoinSet;

struct Site;

/// A daemon in this process and a client that is connected to it.
#[derive(Debug)]
struct Fresh {
    client: ServedStore,
    daemon: Arc<Daemon>,
    place: ServeLock,
    tasks: JoinSet<()>,
    folder: support::Folder,
}

#[async_trait]
impl Harness for Site {
    fn abilities(&self) -> &[Ability] {
        &[Ability::New, Ability::Reopen, Ability::Measure, Ability::Progress]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let folder = support::Folder::with_store("redb").await?;
        let location = folder.location();
        let place = ServeLock::take(&served::instance(&location).ok_or("no name")?, |_| true)?;
        let listener = UnixListener::from_std(place.listen()?)?;
        let mut tasks = JoinSet::new();
        let daemon = Daemon::start(location.clone(), None, &mut tasks);
        tasks.spawn(Arc::clone(&daemon).listen(listener));
        let client = served::connect(&location, Duration::from_secs(60)).await.ok_or("no daemon")?;
        Ok(Box::new(Fresh { client, daemon, place, tasks, folder }))
    }
}

#[async_trait]
impl Fixture for Fresh {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.client.clone())
    }

    async fn another(&self) -> Result<Arc<dyn Store>, BoxError> {
        let another = served::connect(&self.folder.location(), Duration::from_secs(60)).await;
        Ok(Arc::new(another.ok_or("no daemon")?))
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.daemon.shared_store.close().await?;
        Ok(())
    }

    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        Ok(self.folder.bytes()?)
    }

    async fn finish(&mut self) -> Result<(), BoxError> {
        self.place.remove_socket();
        self.tasks.shutdown().await;
        self.daemon.shared_store.close().await?;
        Ok(())
    }
}

fn main() -> ExitCode {
    conformance::main(Site, &support::IGNORED)
}
