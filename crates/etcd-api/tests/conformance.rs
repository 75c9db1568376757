//! Runs the conformance cases on Margay's etcd adapter, connected to this API over a store in memory.

mod support;

use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use backend_etcd::{EtcdStore, Options};
use conformance::{Ability, BoxError, Fixture, Harness};
use kv::Store;
use kv_mvcc::MemoryTable;
use support::Server;

struct Site;

#[derive(Debug)]
struct Fresh {
    table: MemoryTable,
    server: Server,
    client: Arc<EtcdStore>,
}

impl Fresh {
    async fn on(table: MemoryTable) -> Result<Self, BoxError> {
        let server = Server::start(&table).await?;
        let client = connect(&server)?;
        Ok(Self { table, server, client })
    }
}

fn connect(server: &Server) -> Result<Arc<EtcdStore>, BoxError> {
    Ok(Arc::new(EtcdStore::open(&Options::new([server.url()]))?))
}

#[async_trait]
impl Harness for Site {
    fn abilities(&self) -> &[Ability] {
        &[Ability::New, Ability::Reopen, Ability::Progress]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        Ok(Box::new(Fresh::on(MemoryTable::new()).await?))
    }
}

#[async_trait]
impl Fixture for Fresh {
    fn store(&self) -> Arc<dyn Store> {
        self.client.clone()
    }

    async fn another(&self) -> Result<Arc<dyn Store>, BoxError> {
        Ok(connect(&self.server)?)
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.server.stop().await?;
        *self = Self::on(self.table.clone()).await?;
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), BoxError> {
        self.server.stop().await
    }
}

fn main() -> ExitCode {
    // The conformance cases in the ignore list need a separate server process or a store on disk; this test has
    // neither.
    let here = ["H16_bounded_room", "X10_use_after_close", "D10_power_cuts", "D14_closed_under_writers"];
    let elsewhere = ["M02_take_turns_and_count", "M05_watched_from_elsewhere"];
    let ignored = [conformance::WITHOUT_SERVERS, conformance::WITHOUT_FILES, &here, &elsewhere].concat();
    conformance::main(Site, &ignored)
}
