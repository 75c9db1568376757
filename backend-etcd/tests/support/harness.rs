//! Starts etcd servers for the conformance cases. Each conformance case gets its own etcd server or cluster, of the
//! kind that the case needs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use backend_etcd::{Credentials, EtcdStore, Options, Tls};
use conformance::{Ability, BoxError, Fixture, Harness, RefusedUser, Scene, Server};
use etcd_client::Client;
use kv::Store;
use tempfile::TempDir;
use testkit::certificates::Certificates;
use tokio::task::spawn_blocking;

use super::tls::AsOptions;
use super::users::{PASSWORD, as_user, guarded};
use super::{Etcd, bytes_of, copy};

/// The etcd option for a database quota that is small enough for a test to fill.
const QUOTA: &str = "--quota-backend-bytes=8388608";
/// The test store is no longer full when its database uses fewer bytes than `ROOMY` (half of the quota).
const ROOMY: i64 = 4_194_304;

pub(crate) struct OnEtcd;

#[derive(Debug)]
struct Held {
    store: EtcdStore,
    // The servers are declared after the store: fields are dropped in declaration order, and no client may be open when
    // the servers stop.
    etcds: Vec<Etcd>,
    certificates: Option<Certificates>,
    copy: Option<TempDir>,
}

/// A store on an etcd server that another process has started.
#[derive(Debug)]
struct Joined(EtcdStore);

impl Fixture for Joined {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.0.clone())
    }
}

/// Creates store options with short timeouts, for tests that inject faults.
fn impatient(urls: impl IntoIterator<Item = String>) -> Options {
    Options::new(urls)
        .with_call_timeout(Duration::from_secs(5))
        .with_connect_timeout(Duration::from_secs(1))
        .with_keepalive(Duration::from_secs(1), Duration::from_secs(2))
        .with_watch_patience(Duration::from_secs(5))
}

impl Held {
    fn on(etcds: Vec<Etcd>, options: &Options) -> Result<Box<dyn Fixture>, BoxError> {
        Self::with(etcds, options, None)
    }

    fn with(etcds: Vec<Etcd>, options: &Options, tls: Option<Certificates>) -> Result<Box<dyn Fixture>, BoxError> {
        Ok(Box::new(Self { store: EtcdStore::open(options)?, etcds, certificates: tls, copy: None }))
    }

    /// The fixture's only etcd server, or the first one of its cluster.
    fn etcd(&self) -> Result<&Etcd, BoxError> {
        self.etcds.first().ok_or_else(|| "etcd did not come back".into())
    }

    /// Runs `work` while the fixture's only etcd server is stopped; `work` gets the stopped server and may change its
    /// folders.
    async fn while_down(
        &mut self,
        work: impl FnOnce(&Etcd) -> std::io::Result<()> + Send + 'static,
    ) -> Result<(), BoxError> {
        let mut etcd = self.etcds.pop().ok_or("etcd did not come back")?;
        let etcd = spawn_blocking(move || {
            etcd.shut_down()?;
            work(&etcd)?;
            etcd.run().map(|()| etcd)
        });
        self.etcds.push(etcd.await??);
        Ok(())
    }

    fn stranger(name: &'static str, options: &Options) -> Result<RefusedUser, BoxError> {
        let store = EtcdStore::open(&options.clone().with_call_timeout(Duration::from_secs(5)))?;
        Ok(RefusedUser { name, store: Arc::new(store), secrets: vec!["hidden".to_owned(), "PRIVATE".to_owned()] })
    }
}

#[async_trait]
impl Harness for OnEtcd {
    fn abilities(&self) -> &[Ability] {
        use Ability::{Close, Cluster, Copies, Logins, Measure, Network, New, Processes, Quota, Reopen, Servers, Tls};
        &[New, Reopen, Close, Measure, Processes, Network, Servers, Cluster, Copies, Quota, Logins, Tls]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let etcd = spawn_blocking(Etcd::start).await??;
        let options = Options::new([etcd.url()]);
        Held::on(vec![etcd], &options)
    }

    async fn fresh_in(&self, scene: Scene) -> Result<Box<dyn Fixture>, BoxError> {
        match scene {
            Scene::Cluster => {
                let etcds = Vec::from(spawn_blocking(Etcd::start_three).await??);
                let options = impatient(etcds.iter().map(Etcd::url));
                Held::on(etcds, &options)
            }
            Scene::Quota => {
                let etcd = spawn_blocking(|| Etcd::start_with("http", &[QUOTA.to_owned()])).await??;
                let options = Options::new([etcd.url()]);
                Held::on(vec![etcd], &options)
            }
            Scene::Logins => {
                let etcd = guarded().await?;
                let options = Options::new([etcd.url()]).with_credentials(Credentials::new("root", PASSWORD));
                Held::on(vec![etcd], &options)
            }
            Scene::Tls => {
                let certificates = Certificates::make()?;
                let etcd = certificates.etcd_for_known()?;
                let options = Options::new([etcd.url()]).with_tls(certificates.known());
                Held::with(vec![etcd], &options, Some(certificates))
            }
            other => Err(format!("there is no {other:?}").into()),
        }
    }

    /// Opens the store without waiting for the store lock, because etcd accepts many clients at a time.
    async fn join(&self, address: &str, _: Duration) -> kv::Result<Box<dyn Fixture>> {
        Ok(Box::new(Joined(EtcdStore::open(&Options::new([address]))?)))
    }
}

#[async_trait]
impl Fixture for Held {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    async fn another(&self) -> Result<Arc<dyn Store>, BoxError> {
        Ok(Arc::new(EtcdStore::open(&Options::new([self.etcd()?.url()]))?))
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.store.close();
        self.while_down(|_| Ok(())).await?;
        self.store = EtcdStore::open(&Options::new([self.etcd()?.url()]))?;
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        self.store.close();
        Ok(())
    }

    /// Returns the size of etcd's database file in bytes. The size of etcd's write-ahead log does not count, because
    /// etcd limits its number of segments.
    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        Ok(bytes_of(&self.etcd()?.data().join("member/snap/db"))?)
    }

    fn address(&self) -> Result<String, BoxError> {
        Ok(self.etcd()?.url())
    }

    fn servers(&self) -> Vec<Server> {
        self.etcds.iter().map(|etcd| Server { address: etcd.address(), process: etcd.process() }).collect()
    }

    async fn connect(&self, addresses: &[SocketAddr]) -> Result<Arc<dyn Store>, BoxError> {
        let urls = addresses.iter().map(|address| format!("http://{address}"));
        Ok(Arc::new(EtcdStore::open(&impatient(urls))?))
    }

    async fn restart(&mut self, server: usize) -> Result<(), BoxError> {
        Ok(self.etcds.get_mut(server).ok_or("unknown server")?.start_again()?)
    }

    async fn leader(&self) -> Result<usize, BoxError> {
        for (place, etcd) in self.etcds.iter().enumerate() {
            let mut client = Client::connect([etcd.url()], None).await?;
            let status = client.status().await?;
            if status.header().is_some_and(|header| header.member_id() == status.leader()) {
                return Ok(place);
            }
        }
        Err("no member leads".into())
    }

    async fn take_copy(&mut self) -> Result<(), BoxError> {
        let folder = tempfile::tempdir()?;
        let to = folder.path().join("data");
        self.while_down(move |etcd| copy(&etcd.data(), &to)).await?;
        self.copy = Some(folder);
        Ok(())
    }

    async fn put_back(&mut self) -> Result<(), BoxError> {
        let from = self.copy.as_ref().ok_or("there is no copy")?.path().join("data");
        self.while_down(move |etcd| {
            std::fs::remove_dir_all(etcd.data())?;
            copy(&from, &etcd.data())
        })
        .await
    }

    async fn make_room(&self) -> Result<(), BoxError> {
        let mut client = Client::connect([self.etcd()?.url()], None).await?;
        testkit::room::make_room(&mut client, ROOMY).await?;
        Ok(())
    }

    async fn strangers(&self) -> Result<Vec<RefusedUser>, BoxError> {
        let url = self.etcd()?.url();
        let Some(certificates) = &self.certificates else {
            let wrong = Credentials::new("root", "hidden-other");
            let unknown = Credentials::new("unknown", "hidden-other");
            return Ok(vec![
                Self::stranger("a client without a login", &Options::new([url.as_str()]))?,
                Self::stranger("root with a wrong password", &Options::new([url.as_str()]).with_credentials(wrong))?,
                Self::stranger("a user who does not exist", &Options::new([url.as_str()]).with_credentials(unknown))?,
            ]);
        };
        let with = |tls: Tls| Options::new([url.as_str()]).with_tls(tls);
        let other = Tls::new().with_authority(certificates.file("stranger.pem"));
        Ok(vec![
            Self::stranger("a client without a certificate", &with(certificates.trusting()))?,
            Self::stranger("a client that trusts another authority", &with(other))?,
            Self::stranger("a client that trusts the system's authorities", &Options::new([url.as_str()]))?,
            Self::stranger(
                "a client that expects another name",
                &with(certificates.known().with_server_name("other.example")),
            )?,
            Self::stranger("a client without TLS", &Options::new([url.replace("https", "http")]))?,
        ])
    }

    async fn guest(&self) -> Result<Arc<dyn Store>, BoxError> {
        Ok(Arc::new(as_user(self.etcd()?, "guest", PASSWORD)?))
    }
}
