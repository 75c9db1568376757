//! A machine of its own for the node: Linux namespaces and folders, so that the host stays unchanged. As on a real
//! host, a reboot ends all processes and loses the network and `/run`, but keeps the disk.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use testkit::machine::start_machine;

use crate::programs;

/// The node's name, which is also the machine's host name.
pub(crate) const NODE: &str = "node1";
/// The node's address.
pub(crate) const NODE_ADDRESS: &str = "192.0.2.7";

/// Interval between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Time limit until the processes of a stopped machine have ended.
const GROUPS_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit of a command on the machine, in seconds.
const COMMAND_TIMEOUT: &str = "120";

/// Set by SIGINT and SIGTERM; every wait of a scenario then fails.
pub(crate) static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// A machine that is switched off. Dropping it deletes its disk and its control groups.
#[derive(Debug)]
pub(crate) struct Machine {
    disk: TempDir,
    /// The machine's unique name, also of the control group (cgroup) in which all its pods are.
    pub(crate) tag: String,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let disk = tempfile::Builder::new().prefix("margay-kubernetes.").tempdir().unwrap();
        // The process id is unique among the running ones; what a killed run of the same id left is removed at the boot.
        let machine = Self { disk, tag: format!("margay-kubernetes-{}", std::process::id()) };
        for folder in ["etc/cni/net.d", "etc/kubernetes", "opt/cni/bin", "var-lib", "var-log", "log"] {
            fs::create_dir_all(machine.disk().join(folder)).unwrap();
        }
        machine
    }

    /// Returns the folder with the machine's files. The folder `log` has a log of each program.
    pub(crate) fn disk(&self) -> &Path {
        self.disk.path()
    }

    /// Boots the machine; each boot has a new boot id.
    pub(crate) fn boot(&self) -> Boot {
        // The control groups of an earlier boot are the host's, and would be taken for containers.
        self.remove_groups();
        for controller in controllers() {
            fs::create_dir(controller.join(&self.tag)).unwrap();
        }
        let disk = self.disk();
        let (script, id_file) = (disk.join("node.sh"), disk.join("boot-id"));
        fs::write(&id_file, format!("{}\n", uuid::Uuid::new_v4())).unwrap();
        fs::write(&script, include_str!("node.sh")).unwrap();
        let (first, number) = start_machine(&["--uts", "--ipc"], [script.as_path(), disk, &id_file]);
        Boot { disk: disk.to_owned(), first: Some(first), number }
    }

    /// Removes the machine's control groups, from the inside out. Processes of a stopped machine may take a moment to
    /// end.
    fn remove_groups(&self) {
        let until = Instant::now() + GROUPS_TIMEOUT;
        let mut tops: Vec<PathBuf> = controllers().iter().map(|controller| controller.join(&self.tag)).collect();
        while Instant::now() < until {
            tops.iter().for_each(|top| remove_groups(top));
            tops.retain(|top| top.exists());
            if tops.is_empty() {
                return;
            }
            thread::sleep(POLL_INTERVAL);
        }
        eprintln!("these control groups are left: {tops:?}");
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.remove_groups();
    }
}

/// Returns the folders of the host's control groups: one for each controller, or with version 2 one for all.
fn controllers() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let groups = fields.filter(|fields| fields[2] == "cgroup" || fields[2] == "cgroup2");
    groups.map(|fields| PathBuf::from(fields[1])).filter(|path| path.starts_with("/sys/fs/cgroup")).collect()
}

fn remove_groups(top: &Path) {
    let inner = fs::read_dir(top).into_iter().flatten().flatten();
    for entry in inner.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove_groups(&entry.path());
    }
    let _ = fs::remove_dir(top);
}

/// A running machine. Dropping it stops the machine as by a power cut.
#[derive(Debug)]
pub(crate) struct Boot {
    disk: PathBuf,
    first: Option<Child>,
    number: Pid,
}

impl Boot {
    /// Returns a command that runs on the machine.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.number.to_string(), "--mount", "--net", "--pid", "--uts", "--ipc", "--"]);
        // The home folder is on the machine's disk: kubectl keeps a cache there.
        command.args(["env", "-i", "HOME=/var/lib/root", "KUBECONFIG=/var/lib/kubernetes/admin.conf"]);
        let mut folders: Vec<PathBuf> = programs::containerd().into_iter().collect();
        folders.push(programs::kubernetes());
        folders.extend(["/opt/bin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from));
        command.arg(format!("PATH={}", std::env::join_paths(folders).unwrap().display()));
        command.args(words).stdin(Stdio::null());
        command
    }

    /// Runs a command on the machine until it exits, and returns its standard output, or both outputs if it failed.
    pub(crate) fn attempt(&self, words: &[&str]) -> Result<String, String> {
        let output = self.command(&[&["timeout", "-s", "KILL", COMMAND_TIMEOUT], words].concat()).output().unwrap();
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        match output.status.success() {
            true => Ok(said(&output.stdout)),
            false => {
                let (stdout, stderr) = (said(&output.stdout), said(&output.stderr));
                Err(format!("{words:?} failed with {}: {stderr} {stdout}", output.status))
            }
        }
    }

    /// Runs a command that must succeed on the machine, and returns its standard output.
    #[track_caller]
    pub(crate) fn run(&self, words: &[&str]) -> String {
        self.attempt(words).unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// Opens the machine's network namespace.
    pub(crate) fn network_namespace(&self) -> File {
        File::open(format!("/proc/{}/ns/net", self.number)).unwrap()
    }

    /// Starts a program that stays, with a log in the machine's folder `log`.
    pub(crate) fn start(&self, name: &'static str, words: &[&str]) -> Part {
        let path = self.disk.join("log").join(format!("{name}.log"));
        let log = File::options().create(true).append(true).open(&path).unwrap();
        let mut command = self.command(words);
        let entered = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        Part { name, entered, log: path }
    }
}

impl Boot {
    /// Stops the machine as by a power cut.
    pub(crate) fn stop(&mut self) {
        if let Some(mut first) = self.first.take() {
            // The machine's first process has not been waited for yet, so the kernel cannot have reused its process id.
            // All other processes of the machine end together with its first process.
            let _ = kill(self.number, Signal::SIGKILL);
            let _ = first.wait();
        }
    }
}

impl Drop for Boot {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A program that runs on the machine until it is killed.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) name: &'static str,
    /// nsenter, whose only child is the program.
    entered: Child,
    log: PathBuf,
}

impl Part {
    /// Returns the program's process id on the host, or None if the program has ended.
    pub(crate) fn process(&self) -> Option<Pid> {
        let id = self.entered.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?;
        children.split_whitespace().next()?.parse().ok().map(Pid::from_raw)
    }

    /// Sends a signal to the program, and waits until the program has ended.
    pub(crate) fn end(mut self, signal: Signal) {
        if let Some(process) = self.process() {
            let _ = kill(process, signal);
        }
        let _ = self.entered.wait();
    }

    /// Panics with the end of the program's log if the program has ended.
    #[track_caller]
    pub(crate) fn must_run(&mut self) {
        if let Some(status) = self.entered.try_wait().unwrap() {
            panic!("{} has ended with {status}:\n{}", self.name, self.end_of_log());
        }
    }

    fn end_of_log(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if let Some(process) = self.process() {
            let _ = kill(process, Signal::SIGKILL);
        }
        // A program that has not been started yet is not started any more.
        let _ = self.entered.kill();
        let _ = self.entered.wait();
    }
}

/// Waits until a condition holds: `is` returns Err with what is still missing.
#[track_caller]
pub(crate) fn wait_until<T>(what: &str, limit: Duration, mut is: impl FnMut() -> Result<T, String>) -> T {
    let begun = Instant::now();
    loop {
        let missing = match is() {
            Ok(value) => return value,
            Err(missing) => missing,
        };
        assert!(!INTERRUPTED.load(Ordering::Relaxed), "interrupted");
        assert!(begun.elapsed() < limit, "{what}: not within {} s: {missing}", limit.as_secs());
        thread::sleep(POLL_INTERVAL);
    }
}
