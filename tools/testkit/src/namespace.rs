//! Creates network namespaces for servers, with links between them. This needs root.

use std::fs::read_link;
use std::io::{Error, Result};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Maximum time until the process that keeps a new network namespace has entered the namespace.
const ENTER_TIMEOUT: Duration = Duration::from_secs(60);

/// A network namespace without a name. It ends when this value is dropped or this process dies, because the process
/// that keeps the namespace then reads the end of its standard input.
#[derive(Debug)]
pub struct Namespace {
    keeper: Child,
}

impl Namespace {
    /// Creates a network namespace whose loopback interface is up.
    pub fn new() -> Result<Self> {
        let mut unshare = Command::new("unshare");
        let keeper = unshare.args(["--net", "cat"]).stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
        let namespace = Self { keeper };
        let until = Instant::now() + ENTER_TIMEOUT;
        while read_link(namespace.path())? == read_link("/proc/self/ns/net")? {
            if Instant::now() > until {
                return Err(Error::other("unshare does not enter a new network namespace (is this root?)"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        namespace.ip("link set lo up")?;
        Ok(namespace)
    }

    fn path(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.keeper.id()).into()
    }

    /// Returns a command that runs the program in this namespace. Its process id is the id of the program.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path().display())).arg(program);
        command
    }

    /// Links this namespace to a bridge of the calling thread's namespace. The interface `interface` in the new
    /// namespace gets the address, and the other end of the link is the port `port` of the bridge.
    pub fn plug_into(&self, bridge: &str, port: &str, interface: &str, address: &str) -> Result<()> {
        ip(&format!("link add {port} type veth peer name {interface} netns {}", self.keeper.id()))?;
        ip(&format!("link set {port} up master {bridge}"))?;
        self.ip(&format!("address add {address} dev {interface}"))?;
        self.ip(&format!("link set {interface} up"))
    }

    /// Runs `ip` with these words in this namespace.
    fn ip(&self, words: &str) -> Result<()> {
        run(self.command("ip").args(words.split(' '))).map(drop)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

/// Runs `ip` with these words in the network namespace of the calling thread, and returns its standard output.
pub fn ip(words: &str) -> Result<String> {
    run(Command::new("ip").args(words.split(' ')))
}

/// Runs a command until it ends, and returns its standard output.
///
/// # Errors
/// An error with the command and its output if the command fails.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(Error::other(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim())))
}
