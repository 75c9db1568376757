//! Runs a real etcd for tests. Each etcd member is a process on free ports of the loopback address, with a temporary
//! folder.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::namespace::Namespace;

/// Maximum time from the start of an etcd member until it is healthy.
const START: Duration = Duration::from_secs(120);

/// Number of lines at the end of an etcd member's log that an error contains.
const REPORTED_LOG_LINES: usize = 30;

/// A running member of an etcd cluster. Dropping this value ends the member's process.
#[derive(Debug)]
pub struct Etcd {
    folder: TempDir,
    addresses: Addresses,
    scheme: &'static str,
    name: String,
    /// All members of the cluster, in the form `name=url,...`.
    members: String,
    arguments: Vec<String>,
    /// The network namespace in which the member's process runs; `None` for the namespace of this process.
    namespace: Option<Arc<Namespace>>,
    child: Option<Child>,
}

/// The command-line arguments of the etcd servers that tests start. Unlike in production, the etcd servers of the tests
/// let clients send keepalives more often and use cheaper password hashes.
const USUAL: [&str; 5] = [
    "--auto-compaction-mode=revision",
    "--auto-compaction-retention=10000",
    "--quota-backend-bytes=8589934592",
    "--grpc-keepalive-min-time=500ms",
    "--bcrypt-cost=4",
];

/// The first TCP port that etcd members may use. The ports for etcd are below the range that the kernel uses for
/// outgoing connections.
const FIRST_PORT: u16 = 12_000;
/// Number of TCP ports that etcd members may use.
const PORTS: u16 = 16_000;

/// The addresses of an etcd member: for clients, for the other members, and for health checks.
type Addresses = [SocketAddr; 3];

/// Returns unused addresses. Never returns an address twice to one process, and starts at a different port in each
/// process, so that no etcd member connects to a member of another test.
fn free_addresses() -> std::io::Result<Addresses> {
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    let mut free = std::iter::from_fn(|| {
        let place = std::process::id().wrapping_mul(97).wrapping_add(GIVEN.fetch_add(1, Ordering::Relaxed));
        let port = FIRST_PORT + u16::try_from(place % u32::from(PORTS)).ok()?;
        Some(SocketAddr::from(([127, 0, 0, 1], port)))
    })
    .take(usize::from(PORTS))
    .filter(|address| TcpListener::bind(address).is_ok());
    match (free.next(), free.next(), free.next()) {
        (Some(client), Some(peer), Some(health)) => Ok([client, peer, health]),
        _ => Err(std::io::Error::other("no free port")),
    }
}

/// Returns a loopback address on which no process listens.
pub fn dead_address() -> std::io::Result<SocketAddr> {
    Ok(free_addresses()?[0])
}

impl Etcd {
    /// Starts a new, empty etcd with one member.
    pub fn start() -> std::io::Result<Self> {
        Self::start_with("http", &[])
    }

    /// Starts a new, empty etcd with one member and additional command-line arguments.
    pub fn start_with(scheme: &'static str, arguments: &[String]) -> std::io::Result<Self> {
        retried(|| {
            let addresses = free_addresses()?;
            let mut etcd = Self::prepare("one", addresses, &format!("one=http://{}", addresses[1]))?;
            etcd.scheme = scheme;
            etcd.arguments = arguments.to_vec();
            etcd.run()?;
            Ok(etcd)
        })
    }

    /// Starts a new etcd cluster of three members.
    pub fn start_three() -> std::io::Result<[Self; 3]> {
        Self::start_three_with(&[])
    }

    /// Starts a new etcd cluster of three members with additional command-line arguments.
    pub fn start_three_with(arguments: &[&str]) -> std::io::Result<[Self; 3]> {
        retried(|| {
            let addresses = [free_addresses()?, free_addresses()?, free_addresses()?];
            let names = ["one", "two", "three"];
            let member = |(name, [_, peer, _]): (&str, Addresses)| format!("{name}=http://{peer}");
            let members = names.into_iter().zip(addresses).map(member).collect::<Vec<_>>().join(",");
            let mut etcds = [
                Self::prepare(names[0], addresses[0], &members)?,
                Self::prepare(names[1], addresses[1], &members)?,
                Self::prepare(names[2], addresses[2], &members)?,
            ];
            for etcd in &mut etcds {
                etcd.arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
                etcd.spawn()?;
            }
            wait_for(&mut etcds.each_mut())?;
            Ok(etcds)
        })
    }

    /// Starts a learner in the cluster of the member `etcd`, without waiting until the learner listens.
    pub async fn start_learner(etcd: &Self) -> std::io::Result<Self> {
        let addresses = free_addresses()?;
        let members = format!("one=http://{},two=http://{}", etcd.addresses[1], addresses[1]);
        let options = etcd_client::MemberAddOptions::new().with_is_learner();
        let mut client = etcd_client::Client::connect([etcd.url()], None).await.map_err(std::io::Error::other)?;
        let added = client.member_add([format!("http://{}", addresses[1])], Some(options)).await;
        added.map_err(std::io::Error::other)?;
        let mut learner = Self::prepare("two", addresses, &members)?;
        learner.arguments = vec!["--initial-cluster-state=existing".to_owned()];
        learner.spawn()?;
        Ok(learner)
    }

    /// Prepares an etcd member of a cluster with TLS in its own network namespace, without starting its process. The
    /// first address is for clients, the second for other members, the third for health checks. The list `members`
    /// contains all members in the form `name=url,...`.
    pub fn in_namespace(
        name: &str,
        namespace: Arc<Namespace>,
        addresses: [SocketAddr; 3],
        members: &str,
        arguments: Vec<String>,
    ) -> std::io::Result<Self> {
        let mut etcd = Self::prepare(name, addresses, members)?;
        (etcd.scheme, etcd.namespace, etcd.arguments) = ("https", Some(namespace), arguments);
        Ok(etcd)
    }

    fn prepare(name: &str, addresses: Addresses, members: &str) -> std::io::Result<Self> {
        Ok(Self {
            folder: tempfile::tempdir()?,
            addresses,
            scheme: "http",
            name: name.to_owned(),
            members: members.to_owned(),
            arguments: Vec::new(),
            namespace: None,
            child: None,
        })
    }

    /// Returns the name of this etcd member.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Stops this etcd member, deletes its data, and makes its next start that of a member which has been added to an
    /// existing cluster.
    pub fn lose_disk(&mut self) -> std::io::Result<()> {
        self.stop();
        self.arguments.push("--initial-cluster-state=existing".to_owned());
        std::fs::remove_dir_all(self.data())
    }

    /// Returns the URL that clients of this etcd member use.
    pub fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.addresses[0])
    }

    /// Returns the working directory of the etcd member's process.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the folder with the etcd member's data.
    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// Returns true if this etcd member answers health checks, for which it needs a leader.
    pub fn is_well(&self) -> bool {
        self.ask("/health").is_ok_and(|answer| answer.contains("\"true\""))
    }

    /// Requests the path `path` (`/health` or `/metrics`) from the etcd member, and returns the whole HTTP response.
    pub fn ask(&self, path: &str) -> std::io::Result<String> {
        let mut connection = TcpStream::connect_timeout(&self.addresses[2], Duration::from_secs(1))?;
        connection.set_read_timeout(Some(Duration::from_secs(5)))?;
        connection.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Starts the process of this etcd member, and waits until the member is healthy.
    pub fn run(&mut self) -> std::io::Result<()> {
        self.spawn()?;
        self.wait()
    }

    fn spawn(&mut self) -> std::io::Result<()> {
        let peer = format!("http://{}", self.addresses[1]);
        let log = File::options().create(true).append(true).open(self.folder.path().join("log"))?;
        let mut etcd = match &self.namespace {
            Some(namespace) => namespace.command("etcd"),
            None => Command::new("etcd"),
        };
        let child = etcd
            .current_dir(self.folder.path())
            .arg("--data-dir")
            .arg(self.data())
            .args(["--name", &self.name, "--logger", "zap", "--log-level", "error"])
            .args(["--listen-client-urls", &self.url(), "--advertise-client-urls", &self.url()])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &self.members])
            .args(["--listen-metrics-urls", &format!("http://{}", self.addresses[2])])
            .args(USUAL)
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        self.child = Some(child);
        Ok(())
    }

    /// Waits until this etcd member is healthy, for which it needs a leader.
    fn wait(&mut self) -> std::io::Result<()> {
        wait_for(&mut [self])
    }

    /// Restarts the process of this etcd member without waiting until the member is healthy, which may require other
    /// members to run.
    pub fn start_again(&mut self) -> std::io::Result<()> {
        self.stop();
        self.spawn()
    }

    /// Returns the address that clients of this etcd member use.
    pub fn address(&self) -> SocketAddr {
        self.addresses[0]
    }

    /// Returns the process id of this etcd member, if its process is running.
    pub fn process(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Sends a signal to the process of this etcd member. After sending SIGSTOP, waits until the process has stopped.
    pub fn signal(&self, signal: Signal) -> std::io::Result<()> {
        let child = self.child.as_ref().ok_or_else(|| std::io::Error::other("etcd does not run"))?;
        send_signal(child.id(), signal)
    }

    /// Kills the process of this etcd member with SIGKILL.
    pub fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // The process of the etcd member may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Sends SIGTERM to the process of this etcd member, and waits until the process has ended.
    pub fn shut_down(&mut self) -> std::io::Result<()> {
        self.signal(Signal::SIGTERM)?;
        match self.child.take() {
            Some(mut child) => child.wait().map(|_| ()),
            None => Ok(()),
        }
    }
}

/// Starts etcd servers. If another process has taken one of the chosen ports, chooses new ports and retries.
fn retried<T>(start: impl Fn() -> std::io::Result<T>) -> std::io::Result<T> {
    let mut last = std::io::Error::other("etcd was not started");
    for _ in 0..5 {
        match start() {
            Ok(started) => return Ok(started),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Waits until all of the given etcd members are healthy. Fails immediately if one of the members has ended, because
/// the others may wait for that member.
pub fn wait_for(etcds: &mut [&mut Etcd]) -> std::io::Result<()> {
    let until = Instant::now() + START;
    while !etcds.iter().all(|etcd| etcd.is_well()) {
        for etcd in etcds.iter_mut() {
            let ended = etcd.child.as_mut().and_then(|child| child.try_wait().transpose()).transpose()?;
            if ended.is_some() || Instant::now() > until {
                let log = std::fs::read_to_string(etcd.folder.path().join("log")).unwrap_or_default();
                etcds.iter_mut().for_each(|etcd| etcd.stop());
                let first = log.lines().count().saturating_sub(REPORTED_LOG_LINES);
                let end: Vec<&str> = log.lines().skip(first).collect();
                return Err(std::io::Error::other(format!("etcd does not start:\n{}", end.join("\n"))));
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Sends a signal to a process. After sending SIGSTOP, waits until the process has stopped.
pub fn send_signal(process: u32, signal: Signal) -> std::io::Result<()> {
    kill(Pid::from_raw(i32::try_from(process).map_err(std::io::Error::other)?), signal)?;
    let until = Instant::now() + START;
    // If a thread ends while its state is being read, the read fails and is repeated for all threads.
    while signal == Signal::SIGSTOP && !has_stopped(process).unwrap_or(false) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// True if all threads of a process have stopped. The threads of a process stop one after another, and each may serve
/// requests until it stops.
fn has_stopped(process: u32) -> std::io::Result<bool> {
    for thread in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let stat = std::fs::read_to_string(thread?.path().join("stat"))?;
        // In the file `stat`, the state follows the process name, which is in parentheses.
        if !stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T')) {
            return Ok(false);
        }
    }
    Ok(true)
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns the major, minor and patch version of the installed etcd.
pub fn version() -> std::io::Result<[u32; 3]> {
    let output = Command::new("etcd").arg("--version").output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.lines().find_map(|line| line.strip_prefix("etcd Version: ")).unwrap_or_default();
    let numbers: Vec<u32> = version.split(['.', '-', '+']).map_while(|number| number.parse().ok()).collect();
    let first = numbers.first_chunk().ok_or_else(|| std::io::Error::other(format!("no version of etcd: {text}")))?;
    Ok(*first)
}

/// Returns the size of a file in bytes.
pub fn bytes_of(path: &Path) -> std::io::Result<u64> {
    Ok(path.metadata()?.len())
}

/// Copies a file, or a folder with all its contents.
pub fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    if !from.is_dir() {
        return std::fs::copy(from, to).map(|_| ());
    }
    std::fs::create_dir_all(to)?;
    for entry in from.read_dir()? {
        let entry = entry?;
        copy(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}
