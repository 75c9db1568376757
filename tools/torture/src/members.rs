//! Runs an etcd cluster of three members, each in a network namespace of its own, and injects the faults of whole
//! clusters: a leader dies, a member is cut off from the others, a follower is slow, a disk is lost, members are
//! defragmented and restarted, and their certificates are replaced.
//!
//! Each member has two interfaces: one for clients and one for the other members. So a member can be cut off from the
//! others while clients still reach it. Members reach each other through a relay in this process, which delays the
//! bytes from and to a slow member.

use std::io::{Error, Result};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use async_trait::async_trait;
use backend_etcd::{EtcdStore, Options, Pem, Tls};
use fastrand::Rng;
use kv::{RangeRequest, RangeResponse, Revision, Store, Txn, TxnResponse, WatchRequest, WatchStream};
use nix::sched::{CloneFlags, unshare};
use testkit::certificates::Certificates;
use testkit::namespace::{Namespace, ip, run};
use testkit::server::{Etcd, wait_for};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::chaos::Victim;
use crate::ledger::Ledger;

/// Number of etcd members.
const MEMBERS: usize = 3;
/// The delay of every byte from and to a slow member, in milliseconds.
const DELAY_MS: u64 = 200;
/// The interval at which a cluster without a leader is asked for its new leader.
const LEADER_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum time until a cluster has a new leader, or until all clients are served again.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(120);
/// The bridge for the members' clients.
const CLIENTS: &str = "clients";
/// The bridge between the members.
const PEERS: &str = "peers";
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;
const HEALTH_PORT: u16 = 2381;

const LEADER_KILLED: &str = "fault: leader killed (SIGKILL) and started";
const MEMBER_CUT_OFF: &str = "fault: member cut off from the others";
const FOLLOWER_SLOW: &str = "fault: follower slow (200 ms)";
const DISK_LOST: &str = "fault: disk lost, member replaced";
const DEFRAGMENTED: &str = "fault: members defragmented in turn";
const CERTIFICATES_EXCHANGED: &str = "fault: certificates exchanged";

/// The faults that every run on a cluster has at least once.
pub const CLUSTER_FAULTS: [&str; 6] =
    [LEADER_KILLED, MEMBER_CUT_OFF, FOLLOWER_SLOW, DISK_LOST, DEFRAGMENTED, CERTIFICATES_EXCHANGED];

/// Moves this process into a network namespace of its own, in which the clusters of its runs have their bridges. Must
/// be called before the process starts a second thread.
pub(crate) fn enter_namespace() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNET)?;
    ip("link set lo up")?;
    for (bridge, network) in [(CLIENTS, 0), (PEERS, 1)] {
        ip(&format!("link add {bridge} type bridge"))?;
        ip(&format!("address add {}/24 dev {bridge}", address(network, 254)))?;
        ip(&format!("link set {bridge} up"))?;
    }
    (0..MEMBERS).try_for_each(|member| ip(&format!("address add {}/24 dev {PEERS}", relay_address(member))).map(drop))
}

/// Returns an address of the clients' network (0) or of the members' network (1), which are in the range for tests of
/// networks (RFC 2544).
fn address(network: u8, host: usize) -> IpAddr {
    Ipv4Addr::new(198, 18, network, u8::try_from(host).unwrap_or(u8::MAX)).into()
}

fn client_address(member: usize) -> IpAddr {
    address(0, member + 1)
}

fn peer_address(member: usize) -> IpAddr {
    address(1, member + 1)
}

/// Returns the address at which the other members reach this member through the relay.
fn relay_address(member: usize) -> IpAddr {
    address(1, member + 101)
}

/// The name of the bridge port to which the member's interface for other members is connected.
fn peer_port(member: usize) -> String {
    format!("{PEERS}{member}")
}

/// A running etcd cluster of three members.
pub(crate) struct Cluster {
    members: [Etcd; MEMBERS],
    certificates: Certificates,
    relay: Arc<Relay>,
    service: Arc<Service>,
}

impl Cluster {
    /// Starts a new cluster. The process must have entered its own namespace.
    pub(crate) fn start(service: Arc<Service>) -> Result<Self> {
        let relay = Relay::start()?;
        let known =
            (0..MEMBERS).flat_map(|member| [client_address(member), peer_address(member), relay_address(member)]);
        // To a member, the connections of others come from the relay.
        let certificates = Certificates::for_addresses(known.chain([address(1, 254)]))?;
        let names = ["one", "two", "three"];
        let peer = |member: usize| format!("https://{}", SocketAddr::new(relay_address(member), PEER_PORT));
        let all: Vec<_> = names.iter().enumerate().map(|(member, name)| format!("{name}={}", peer(member))).collect();
        let member = |member: usize| {
            let namespace = Namespace::new()?;
            let plug =
                |bridge: &str, port: &str, own: IpAddr| namespace.plug_into(bridge, port, bridge, &format!("{own}/24"));
            plug(CLIENTS, &format!("{CLIENTS}{member}"), client_address(member))?;
            plug(PEERS, &peer_port(member), peer_address(member))?;
            let addresses = [
                SocketAddr::new(client_address(member), CLIENT_PORT),
                SocketAddr::new(peer_address(member), PEER_PORT),
                SocketAddr::new(client_address(member), HEALTH_PORT),
            ];
            let mut arguments = vec![
                format!("--listen-peer-urls=https://{}", addresses[1]),
                format!("--initial-advertise-peer-urls={}", peer(member)),
            ];
            for (prefix, check) in [("", "--client-cert-auth"), ("peer-", "--peer-client-cert-auth")] {
                for (flag, file) in
                    [("cert-file", "server.pem"), ("key-file", "server.key"), ("trusted-ca-file", "authority.pem")]
                {
                    arguments.push(format!("--{prefix}{flag}={}", certificates.path(file).display()));
                }
                arguments.push(check.to_owned());
            }
            Etcd::in_namespace(names[member], Arc::new(namespace), addresses, &all.join(","), arguments)
        };
        let mut members = [member(0)?, member(1)?, member(2)?];
        members.iter_mut().try_for_each(Etcd::start_again)?;
        wait_for(&mut members.each_mut())?;
        Ok(Self { members, certificates, relay, service })
    }

    /// Opens a client of the cluster, which first asks the member with this number. The end of an outage is when all
    /// these clients are served.
    pub(crate) fn open_client(&self, preferred: usize) -> kv::Result<Arc<dyn Store>> {
        let (inner, service) = (self.open(preferred)?, Arc::clone(&self.service));
        Ok(Arc::new(Served { inner, client: service.add_client(), service }))
    }

    /// Opens the cluster with the default timeouts.
    pub(crate) fn open(&self, preferred: usize) -> kv::Result<Arc<dyn Store>> {
        let file = |name: &str| Pem::File(self.certificates.path(name));
        let tls =
            Tls::new().with_authority(file("authority.pem")).with_identity(file("client.pem"), file("client.key"));
        let urls = (0..MEMBERS).map(|step| self.members[(preferred + step) % MEMBERS].url());
        Ok(Arc::new(EtcdStore::open(&Options::new(urls).with_tls(tls))?))
    }

    /// Runs etcdctl with these words, on these members.
    fn etcdctl(&self, members: &[usize], words: &[&str]) -> Result<String> {
        let urls: Vec<_> = members.iter().map(|&member| self.members[member].url()).collect();
        let file = |name: &str| self.certificates.path(name).display().to_string();
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["--endpoints", &urls.join(","), "--command-timeout", "60s"]);
        command.args(["--cacert", &file("authority.pem"), "--cert", &file("client.pem"), "--key", &file("client.key")]);
        run(command.args(words))
    }

    /// Changes the members of the cluster with etcdctl. Repeats the change while etcd refuses it because members have
    /// not found each other yet, and ends if an earlier try was carried out although it failed.
    fn change_members(&self, by: &[usize], words: &[&str]) -> Result<()> {
        const DONE: [&str; 2] = ["Peer URLs already exists", "member not found"];
        let until = Instant::now() + RECOVERY_TIMEOUT;
        loop {
            match self.etcdctl(by, words) {
                Err(error) if DONE.iter().any(|done| error.to_string().contains(done)) => return Ok(()),
                Err(_) if Instant::now() < until => thread::sleep(Duration::from_millis(100)),
                done => return done.map(drop),
            }
        }
    }

    /// Returns the member that is the leader, among the members other than `except`; `None` if none of them is.
    fn leader(&self, except: Option<usize>) -> Option<usize> {
        (0..MEMBERS).filter(|&member| Some(member) != except).find(|&member| {
            let metrics = self.members[member].ask("/metrics");
            metrics.is_ok_and(|text| text.lines().any(|line| line == "etcd_server_is_leader 1"))
        })
    }

    /// Waits until a member other than `except` is the leader.
    fn wait_for_leader(&self, except: Option<usize>) -> Result<usize> {
        let until = Instant::now() + RECOVERY_TIMEOUT;
        loop {
            match self.leader(except) {
                Some(leader) => return Ok(leader),
                None if Instant::now() > until => return Err(Error::other("the cluster elects no leader")),
                None => thread::sleep(LEADER_POLL_INTERVAL),
            }
        }
    }

    fn others(member: usize) -> Vec<usize> {
        (0..MEMBERS).filter(|&other| other != member).collect()
    }

    /// Waits until another member than `leader` leads and all clients are served, and records how long both took.
    fn measure_outage(&self, what: &'static str, leader: usize, begun: Instant) -> Result<()> {
        self.wait_for_leader(Some(leader))?;
        let election = begun.elapsed();
        if let Some(service) = self.service.wait_until_served(begun)? {
            self.service.record(Outage { what, election, service });
        }
        Ok(())
    }

    fn kill_leader(&mut self, rng: &mut Rng) -> Result<()> {
        let leader = self.wait_for_leader(None)?;
        let begun = self.service.expect_outage();
        self.members[leader].stop();
        self.measure_outage("leader killed", leader, begun)?;
        thread::sleep(Duration::from_millis(rng.u64(..1000)));
        self.members[leader].run()
    }

    fn cut_off(&mut self, rng: &mut Rng) -> Result<()> {
        let (leader, member) = (self.wait_for_leader(None)?, rng.usize(..MEMBERS));
        let begun = self.service.expect_outage();
        ip(&format!("link set {} nomaster", peer_port(member)))?;
        if member == leader {
            self.measure_outage("leader cut off from the others", leader, begun)?;
        } else {
            if let Some(service) = self.service.wait_until_served(begun)? {
                let what = "follower cut off from the others";
                self.service.record(Outage { what, election: Duration::ZERO, service });
            }
        }
        thread::sleep(Duration::from_millis(rng.u64(..3000)));
        ip(&format!("link set {} master {PEERS}", peer_port(member)))?;
        wait_for(&mut [&mut self.members[member]])
    }

    fn slow_down_follower(&mut self, rng: &mut Rng) -> Result<()> {
        let leader = self.wait_for_leader(None)?;
        let follower = (leader + rng.usize(1..MEMBERS)) % MEMBERS;
        let delay = &self.relay.delays[follower];
        delay.store(DELAY_MS, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(rng.u64(1000..4000)));
        delay.store(0, Ordering::Relaxed);
        Ok(())
    }

    fn lose_disk(&mut self, rng: &mut Rng) -> Result<()> {
        let member = rng.usize(..MEMBERS);
        let others = Self::others(member);
        self.members[member].lose_disk()?;
        self.wait_for_leader(Some(member))?;
        let name = self.members[member].name().to_owned();
        let listed = self.etcdctl(&others, &["member", "list"])?;
        let id =
            listed.lines().find(|line| line.contains(&format!(" {name},"))).and_then(|line| line.split(',').next());
        let id = id.ok_or_else(|| Error::other(format!("no member {name}: {listed}")))?;
        self.change_members(&others, &["member", "remove", id])?;
        thread::sleep(Duration::from_millis(rng.u64(..1000)));
        let url = format!("https://{}", SocketAddr::new(relay_address(member), PEER_PORT));
        self.change_members(&others, &["member", "add", &name, "--peer-urls", &url])?;
        // A new member ends if the others do not tell it about the cluster within seconds.
        let until = Instant::now() + RECOVERY_TIMEOUT;
        loop {
            match self.members[member].run() {
                Err(_) if Instant::now() < until => {}
                done => return done,
            }
        }
    }

    fn defragment(&mut self) -> Result<()> {
        (0..MEMBERS).try_for_each(|member| self.etcdctl(&[member], &["defrag"]).map(drop))
    }

    /// Replaces the authority and all certificates while the cluster runs. Etcd reads certificates at each handshake,
    /// but the trusted authorities only when it starts.
    fn exchange_certificates(&mut self) -> Result<()> {
        let next = self.certificates.trust_next()?;
        self.restart_in_turn()?;
        self.certificates.issue_by(&next)?;
        self.certificates.trust_only(&next)?;
        self.restart_in_turn()
    }

    fn restart_in_turn(&mut self) -> Result<()> {
        for member in &mut self.members {
            member.shut_down()?;
            member.run()?;
        }
        Ok(())
    }

    /// Returns the hash of each member's data.
    fn hashes(&self) -> Result<Vec<String>> {
        let hash = |member| {
            let said = self.etcdctl(&[member], &["endpoint", "hashkv"])?;
            said.trim().rsplit(", ").next().map(str::to_owned).ok_or_else(|| Error::other(said.clone()))
        };
        (0..MEMBERS).map(hash).collect()
    }
}

impl Victim for Cluster {
    fn inject(&mut self, number: usize, rng: &mut Rng, ledger: &Ledger) -> Result<()> {
        let fault =
            CLUSTER_FAULTS.get(number).copied().unwrap_or_else(|| CLUSTER_FAULTS[rng.usize(..CLUSTER_FAULTS.len())]);
        match fault {
            LEADER_KILLED => self.kill_leader(rng)?,
            MEMBER_CUT_OFF => self.cut_off(rng)?,
            FOLLOWER_SLOW => self.slow_down_follower(rng)?,
            DISK_LOST => self.lose_disk(rng)?,
            DEFRAGMENTED => self.defragment()?,
            _ => self.exchange_certificates()?,
        }
        ledger.count(fault, 1);
        Ok(())
    }

    fn calm(&self, rng: &mut Rng) -> Duration {
        Duration::from_millis(rng.u64(500..4000))
    }

    /// Checks that all members are healthy and have the same data.
    fn check(&mut self) -> Result<()> {
        wait_for(&mut self.members.each_mut())?;
        let until = Instant::now() + RECOVERY_TIMEOUT;
        loop {
            let hashes = self.hashes()?;
            if hashes.iter().all(|hash| *hash == hashes[0]) {
                return Ok(());
            }
            // A follower may not have applied the last commits yet.
            if Instant::now() > until {
                return Err(Error::other(format!("the members have different data: {hashes:?}")));
            }
            thread::sleep(LEADER_POLL_INTERVAL);
        }
    }
}

/// A time without service, measured from the fault.
#[derive(Clone, Debug)]
pub struct Outage {
    /// The fault that caused the outage.
    what: &'static str,
    /// The time until another member was the leader; zero if the leader did not change.
    election: Duration,
    /// The time until each client had finished a commit that it had begun after the fault.
    service: Duration,
}

impl fmt::Display for Outage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, election, service } = self;
        write!(f, "{what}: ")?;
        if !election.is_zero() {
            write!(f, "another leader after {} ms, ", election.as_millis())?;
        }
        write!(f, "a commit of each client after {} ms", service.as_millis())
    }
}

/// Measures when the clients of the cluster are served again after a fault.
#[derive(Debug, Default)]
pub(crate) struct Service {
    state: Mutex<ServiceState>,
}

#[derive(Debug, Default)]
struct ServiceState {
    /// The time of the fault.
    fault: Option<Instant>,
    /// For each client, the end of its first commit that began after the fault.
    served: Vec<Option<Instant>>,
    outages: Vec<Outage>,
    /// True when the workers have ended, after which no client commits any more.
    is_over: bool,
}

impl Service {
    fn state(&self) -> std::sync::MutexGuard<'_, ServiceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of a new client.
    fn add_client(&self) -> usize {
        let mut state = self.state();
        state.served.push(None);
        state.served.len() - 1
    }

    /// Returns the time of a fault that is injected now.
    fn expect_outage(&self) -> Instant {
        let mut state = self.state();
        let now = Instant::now();
        state.fault = Some(now);
        state.served.fill(None);
        now
    }

    fn note_commit(&self, client: usize, begun: Instant) {
        let mut state = self.state();
        if state.fault.is_some_and(|fault| begun > fault) && state.served[client].is_none() {
            state.served[client] = Some(Instant::now());
        }
    }

    /// Records that the workers have ended.
    pub(crate) fn close(&self) {
        self.state().is_over = true;
    }

    /// Waits until each client has finished a commit that began after the fault, and returns how long after `begun` the
    /// last one did. Returns `None` if the workers end before.
    fn wait_until_served(&self, begun: Instant) -> Result<Option<Duration>> {
        let until = Instant::now() + RECOVERY_TIMEOUT;
        while Instant::now() < until {
            if self.state().is_over {
                return Ok(None);
            }
            if let Some(served) = self.state().served.iter().copied().collect::<Option<Vec<_>>>() {
                return Ok(served.into_iter().max().map(|served| served.saturating_duration_since(begun)));
            }
            thread::sleep(LEADER_POLL_INTERVAL);
        }
        Err(Error::other("a client is not served again"))
    }

    fn record(&self, outage: Outage) {
        self.state().outages.push(outage);
    }

    /// Returns the measured outages.
    pub(crate) fn outages(&self) -> Vec<Outage> {
        self.state().outages.clone()
    }
}

/// A client of the cluster, which tells [`Service`] about each finished commit.
#[derive(Debug)]
struct Served {
    inner: Arc<dyn Store>,
    client: usize,
    service: Arc<Service>,
}

#[async_trait]
impl Store for Served {
    async fn range(&self, request: RangeRequest) -> kv::Result<RangeResponse> {
        self.inner.range(request).await
    }

    async fn txn(&self, txn: Txn) -> kv::Result<TxnResponse> {
        let (begun, is_commit) = (Instant::now(), !txn.is_read_only());
        let answer = self.inner.txn(txn).await?;
        if is_commit {
            self.service.note_commit(self.client, begun);
        }
        Ok(answer)
    }

    async fn watch(&self, request: WatchRequest) -> kv::Result<WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> kv::Result<()> {
        self.inner.compact(revision).await
    }
}

/// Forwards the connections between members, and delays the bytes from and to slow members.
struct Relay {
    /// For each member, the delay of its bytes in milliseconds.
    delays: [AtomicU64; MEMBERS],
}

impl Relay {
    /// Starts the relay in a thread of its own, which ends with the process.
    fn start() -> Result<Arc<Self>> {
        let relay = Arc::new(Self { delays: Default::default() });
        let mut listeners = Vec::new();
        for member in 0..MEMBERS {
            let listener = std::net::TcpListener::bind((relay_address(member), PEER_PORT))?;
            listener.set_nonblocking(true)?;
            listeners.push(listener);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let serving = Arc::clone(&relay);
        thread::spawn(move || {
            runtime.block_on(async {
                let accepting = listeners.into_iter().enumerate().map(async |(member, listener)| {
                    let listener = TcpListener::from_std(listener)?;
                    Arc::clone(&serving).accept(listener, member).await
                });
                futures::future::try_join_all(accepting).await
            })
        });
        Ok(relay)
    }

    async fn accept(self: Arc<Self>, listener: TcpListener, to: usize) -> Result<()> {
        loop {
            let (connection, source) = listener.accept().await?;
            let from = (0..MEMBERS).find(|&member| peer_address(member) == source.ip()).unwrap_or(to);
            tokio::spawn(Arc::clone(&self).forward(connection, from, to));
        }
    }

    /// Forwards a connection in both directions until one side closes it.
    async fn forward(self: Arc<Self>, connection: TcpStream, from: usize, to: usize) {
        let Ok(target) = TcpStream::connect((peer_address(to), PEER_PORT)).await else { return };
        for side in [&connection, &target] {
            // Without TCP_NODELAY, the kernel would delay small messages.
            let _ = side.set_nodelay(true);
        }
        let (from_reader, from_writer) = connection.into_split();
        let (to_reader, to_writer) = target.into_split();
        tokio::select! {
            () = self.copy(from_reader, to_writer, [from, to]) => {}
            () = self.copy(to_reader, from_writer, [from, to]) => {}
        }
    }

    /// Copies bytes between two members; each piece is written after the longer delay of both.
    async fn copy(&self, mut reader: impl AsyncRead + Unpin, mut writer: impl AsyncWrite + Unpin, members: [usize; 2]) {
        let (queue, mut pieces) = tokio::sync::mpsc::channel::<(tokio::time::Instant, Vec<u8>)>(1024);
        let read = async move {
            let mut buffer = vec![0; 64 << 10];
            while let Ok(count @ 1..) = reader.read(&mut buffer).await {
                let delay = members.map(|member| self.delays[member].load(Ordering::Relaxed)).into_iter().max();
                let due = tokio::time::Instant::now() + Duration::from_millis(delay.unwrap_or(0));
                if queue.send((due, buffer[..count].to_vec())).await.is_err() {
                    return;
                }
            }
        };
        let write = async move {
            while let Some((due, piece)) = pieces.recv().await {
                tokio::time::sleep_until(due).await;
                if writer.write_all(&piece).await.is_err() {
                    return;
                }
            }
        };
        tokio::join!(read, write);
    }
}
