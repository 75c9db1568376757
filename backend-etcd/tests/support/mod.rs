//! A real etcd for tests: one process of one member, on free ports of the loopback address, in a temporary folder.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::fs::File;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// How long a member may take until it listens.
const START: Duration = Duration::from_secs(30);

/// A member. Dropping it ends the process.
#[derive(Debug)]
pub(crate) struct Etcd {
    folder: TempDir,
    client: SocketAddr,
    peer: SocketAddr,
    scheme: &'static str,
    arguments: Vec<String>,
    child: Option<Child>,
}

/// Two addresses that were free a moment ago.
fn free_addresses() -> std::io::Result<[SocketAddr; 2]> {
    let held = [TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?];
    Ok([held[0].local_addr()?, held[1].local_addr()?])
}

/// An address on which nobody listens.
pub(crate) fn dead_address() -> std::io::Result<SocketAddr> {
    Ok(free_addresses()?[0])
}

impl Etcd {
    /// A new, empty one.
    pub(crate) fn start() -> std::io::Result<Self> {
        Self::start_with("http", &[])
    }

    /// A new, empty one with these arguments besides.
    pub(crate) fn start_with(scheme: &'static str, arguments: &[String]) -> std::io::Result<Self> {
        let mut last = std::io::Error::other("etcd was not started");
        // Somebody else may take a free port before etcd does.
        for _ in 0..5 {
            let [client, peer] = free_addresses()?;
            let arguments = arguments.to_vec();
            let mut etcd = Self { folder: tempfile::tempdir()?, client, peer, scheme, arguments, child: None };
            match etcd.run() {
                Ok(()) => return Ok(etcd),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Its address, for clients.
    pub(crate) fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.client)
    }

    /// Where it keeps its state.
    pub(crate) fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// Starts the process and waits until it listens.
    pub(crate) fn run(&mut self) -> std::io::Result<()> {
        let peer = format!("http://{}", self.peer);
        let log = File::options().create(true).append(true).open(self.folder.path().join("log"))?;
        let child = Command::new("etcd")
            .arg("--data-dir")
            .arg(self.data())
            .args(["--name", "one", "--logger", "zap", "--log-level", "error"])
            .args(["--listen-client-urls", &self.url(), "--advertise-client-urls", &self.url()])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("one={peer}")])
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        self.child = Some(child);
        let until = Instant::now() + START;
        while TcpStream::connect_timeout(&self.client, Duration::from_secs(1)).is_err() {
            let ended = self.child.as_mut().and_then(|child| child.try_wait().transpose()).transpose()?;
            if ended.is_some() || Instant::now() > until {
                let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
                self.stop();
                return Err(std::io::Error::other(format!("etcd does not listen: {log}")));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Sends the process a signal.
    pub(crate) fn signal(&self, signal: Signal) -> std::io::Result<()> {
        let child = self.child.as_ref().ok_or_else(|| std::io::Error::other("etcd does not run"))?;
        let pid = i32::try_from(child.id()).map_err(std::io::Error::other)?;
        Ok(kill(Pid::from_raw(pid), signal)?)
    }

    /// Ends the process at once.
    pub(crate) fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Asks the process to end, and waits until it has.
    pub(crate) fn shut_down(&mut self) -> std::io::Result<()> {
        self.signal(Signal::SIGTERM)?;
        match self.child.take() {
            Some(mut child) => child.wait().map(|_| ()),
            None => Ok(()),
        }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The version of the etcd that is installed: major, minor, patch.
pub(crate) fn version() -> std::io::Result<[u32; 3]> {
    let output = Command::new("etcd").arg("--version").output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.lines().find_map(|line| line.strip_prefix("etcd Version: ")).unwrap_or_default();
    let numbers: Vec<u32> = version.split(['.', '-', '+']).map_while(|number| number.parse().ok()).collect();
    let first = numbers.first_chunk().ok_or_else(|| std::io::Error::other(format!("no version of etcd: {text}")))?;
    Ok(*first)
}

/// The bytes of a file.
pub(crate) fn bytes_of(path: &Path) -> std::io::Result<u64> {
    Ok(path.metadata()?.len())
}

/// Copies a folder with all that is in it.
pub(crate) fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
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
