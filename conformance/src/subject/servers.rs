//! Controls the servers of the store that a test case uses, and opens clients of these servers.

use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, io};

use kv::Store;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::net::TcpSocket;

use super::{BoundedHandle, Subject, environment};
use crate::expect::{Checked, Failure, JudgedByRule, RECOVERY_TIMEOUT, some, within};
use crate::harness::{RefusedUser, Server};
use crate::proxy::Proxy;

/// The interval between two checks whether a server process has stopped.
const PROCESS_CHECK_INTERVAL: Duration = Duration::from_millis(1);

impl Subject {
    pub(crate) fn servers(&self) -> Checked<Vec<Server>> {
        match self.surroundings()?.servers() {
            servers if servers.is_empty() => Err(Failure::new("the environment: its servers", "some", "none")),
            servers => Ok(servers),
        }
    }

    pub(crate) fn addresses(&self) -> Checked<Vec<SocketAddr>> {
        Ok(self.servers()?.into_iter().map(|server| server.address).collect())
    }

    /// Opens a store handle that connects to the given addresses.
    pub(crate) async fn connect(&self, addresses: &[SocketAddr]) -> Checked<BoundedHandle> {
        let store = self.surroundings()?.connect(addresses).await.map_err(|error| environment("a handle", &error))?;
        Ok(self.handle_on(store))
    }

    /// Starts a proxy in front of the first server, and opens a handle that connects through this proxy.
    pub(crate) async fn through_proxy(&self) -> Checked<(Proxy, BoundedHandle)> {
        let addresses = self.addresses()?;
        let server = some("the environment: the address of a server", addresses.first())?;
        let proxy = Proxy::to(*server).map_err(|error| environment("a proxy", &error.into()))?;
        let handle = self.connect(&[proxy.address()]).await?;
        Ok((proxy, handle))
    }

    fn process_of(&self, server: usize) -> Checked<u32> {
        let process = self.servers()?.get(server).and_then(|server| server.process);
        some("the environment: the process of a server", process)
    }

    pub(crate) fn signal(&self, server: usize, signal: Signal) -> Checked {
        let process = i32::try_from(self.process_of(server)?).ok().map(Pid::from_raw);
        let process = some("the environment: the process of a server", process)?;
        kill(process, signal).map_err(|error| environment("a signal to a server", &error.into()))
    }

    /// Waits until all threads of a server process have stopped; after `SIGSTOP`, they stop one after another.
    async fn stopped(&self, server: usize) -> Checked {
        let process = self.process_of(server)?;
        let wait = tokio::task::spawn_blocking(move || {
            let until = Instant::now() + RECOVERY_TIMEOUT;
            while !has_stopped(process).unwrap_or(false) && Instant::now() < until {
                std::thread::sleep(PROCESS_CHECK_INTERVAL);
            }
            has_stopped(process)
        });
        match wait.await? {
            Ok(true) => Ok(()),
            Ok(false) => Err(Failure::new("the environment: a server that is told to stop", "a stop", "it goes on")),
            Err(error) => Err(environment("a server that is told to stop", &error.into())),
        }
    }

    /// Runs `work` while a server is stopped by `SIGSTOP`, and then lets the server continue.
    pub(crate) async fn while_frozen<T>(&self, server: usize, work: impl Future<Output = Checked<T>>) -> Checked<T> {
        self.signal(server, Signal::SIGSTOP)?;
        self.stopped(server).await?;
        let done = within(RECOVERY_TIMEOUT, "work while a server is frozen", work).await.of("N2");
        self.signal(server, Signal::SIGCONT)?;
        done?
    }

    /// Restarts a server process, whether or not it is running; the restarted server may not be ready yet when this
    /// method returns.
    pub(crate) async fn restart(&mut self, server: usize) -> Checked {
        self.surroundings_mut()?
            .restart(server)
            .await
            .map_err(|error| environment("a server that starts again", &error))
    }

    pub(crate) async fn leader(&self) -> Checked<usize> {
        self.surroundings()?.leader().await.map_err(|error| environment("the leader", &error))
    }

    pub(crate) async fn take_copy(&mut self) -> Checked {
        self.surroundings_mut()?.take_copy().await.map_err(|error| environment("a copy", &error))
    }

    pub(crate) async fn put_back(&mut self) -> Checked {
        self.surroundings_mut()?.put_back().await.map_err(|error| environment("putting a copy back", &error))
    }

    /// Does what an operator must do after the store was full (for etcd: defragment, clear the alarm).
    pub(crate) async fn make_room(&self) -> Checked {
        self.surroundings()?.make_room().await.map_err(|error| environment("making room", &error))
    }

    pub(crate) async fn strangers(&self) -> Checked<Vec<RefusedUser>> {
        self.surroundings()?.strangers().await.map_err(|error| environment("strangers", &error))
    }

    /// Opens a handle of a client with access to some of the keys only.
    pub(crate) async fn guest(&self) -> Checked<BoundedHandle> {
        let store = self.surroundings()?.guest().await.map_err(|error| environment("a guest", &error))?;
        Ok(self.bounded(store))
    }

    /// Wraps a store of the test environment in a handle with a time limit for each call.
    pub(crate) fn bounded(&self, store: Arc<dyn Store>) -> BoundedHandle {
        self.handle_on(store)
    }
}

/// Returns true if all threads of a process are stopped by a signal.
fn has_stopped(process: u32) -> io::Result<bool> {
    for thread in fs::read_dir(format!("/proc/{process}/task"))? {
        let stat = fs::read_to_string(thread?.path().join("stat"))?;
        // In `/proc`, a thread's state follows its name, which is in parentheses.
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        if state != Some('T') {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A reserved address on which no process listens until the `UnusedAddress` is dropped.
#[derive(Debug)]
pub(crate) struct UnusedAddress(TcpSocket);

impl UnusedAddress {
    pub(crate) fn new() -> Checked<Self> {
        let bound = || {
            let socket = TcpSocket::new_v4()?;
            socket.bind((Ipv4Addr::LOCALHOST, 0).into()).map(|()| socket)
        };
        bound().map(Self).map_err(|error| environment("an address without a server", &error.into()))
    }

    pub(crate) fn address(&self) -> Checked<SocketAddr> {
        self.0.local_addr().map_err(|error| environment("an address without a server", &error.into()))
    }
}
