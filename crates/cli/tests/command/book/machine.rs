//! Creates a separate machine for each page from kernel namespaces, with its own host name, files and address (needs
//! root).

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::{fs, thread};

use datastore::{Create, Location};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::sethostname;

use crate::book::engine;
use crate::tested::programs;

/// Folders of the machine that are empty when the test of a page starts, except for files in /etc that other programs
/// need.
const EMPTY: [&str; 5] = ["/etc", "/run", "/var/lib", "/var/backups", "/root"];
const KEPT: [&str; 3] = ["/etc/passwd", "/etc/group", "/etc/hosts"];

/// The machine in whose namespaces the current thread runs.
pub(crate) struct Machine {
    env: Vec<(String, String)>,
    etcd: Option<Child>,
    /// A function that is called as soon as the page's next command has begun to watch the store.
    meanwhile: Option<fn()>,
    /// A thread that keeps a store open, and the channel that tells this thread to end.
    holder: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Machine {
    /// Moves the calling thread to a new machine with the host name `vm` and the address 10.0.0.1. Processes that the
    /// calling thread starts run on the new machine.
    pub(crate) fn new() -> Self {
        let kept = KEPT.map(|file| (file, fs::read(file).unwrap_or_default()));
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWNET)
            .unwrap_or_else(|error| panic!("this test needs root: {error}"));
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        let mut machine = Self { env: Vec::new(), etcd: None, meanwhile: None, holder: None };
        EMPTY.into_iter().for_each(|folder| machine.empty_folder(folder));
        for (file, text) in kept {
            fs::write(file, text).unwrap();
        }
        sethostname("vm").unwrap();
        machine.set("TZ", "Europe/Berlin");
        assert_eq!(machine.run("ip link set lo up && ip address add 10.0.0.1/32 dev lo"), (0, String::new()));
        machine
    }

    /// Sets an environment variable for later commands on the machine.
    pub(crate) fn set(&mut self, name: &str, value: &str) {
        self.env.push((name.to_owned(), value.to_owned()));
    }

    /// Removes all stores, and all configurations that name a store.
    pub(crate) fn clear(&mut self) {
        self.let_go();
        self.env.retain(|(name, _)| !name.starts_with("DATASTORE_"));
        for folder in ["/var/lib/margay", "/etc/cni", "/var/lib/cni", "/run/margay"] {
            let _ = fs::remove_dir_all(folder);
        }
    }

    pub(crate) fn put(&self, path: impl AsRef<Path>, content: impl AsRef<[u8]>) {
        let path = Path::new("/root").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// Runs a command line in a shell, and returns its exit code and the output as a terminal would show it.
    pub(crate) fn run(&mut self, line: &str) -> (i32, String) {
        let (programs, line) = (programs(), engine::command(line));
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("exec 2>&1; {line}")]).current_dir("/root").stdin(Stdio::null()).env_clear();
        shell.env("PATH", format!("{}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", programs.display()));
        let mut child = shell.envs(self.env.iter().cloned()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut output, mut meanwhile) = (String::new(), self.meanwhile.take());
        for line in BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap) {
            if line.starts_with("note: watching")
                && let Some(happen) = meanwhile.take()
            {
                happen();
            }
            output += &format!("{line}\n");
        }
        (child.wait().unwrap().code().unwrap_or(-1), output)
    }

    pub(crate) fn do_all(&mut self, lines: &[&str]) {
        for line in lines {
            let (code, output) = self.run(line);
            assert_eq!(code, 0, "{line}: {output}");
        }
    }

    /// Calls `happen` as soon as the page's next command has begun to watch the store.
    pub(crate) fn meanwhile(&mut self, happen: fn()) {
        self.meanwhile = Some(happen);
    }

    /// Keeps a store open until [`clear`](Self::clear) resets the test machine, so that no other process can open the
    /// store.
    pub(crate) fn hold(&mut self, store: Location) {
        let (end, ended) = channel();
        let (begun, has_begun) = channel();
        let holder = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let open = runtime
                .block_on(datastore::open(&store, &Create::Never.with_wait(std::time::Duration::from_secs(30))))
                .unwrap();
            begun.send(()).unwrap();
            let _ = ended.recv();
            runtime.block_on(open.close()).unwrap();
        });
        has_begun.recv().unwrap();
        self.holder = Some((end, holder));
    }

    fn let_go(&mut self) {
        if let Some((end, holder)) = self.holder.take() {
            drop(end);
            holder.join().unwrap();
        }
    }

    /// Mounts an empty folder at a path, which hides the path's earlier content.
    pub(crate) fn empty_folder(&self, path: &str) {
        fs::create_dir_all(path).unwrap();
        mount(Some("book"), path, Some("tmpfs"), MsFlags::empty(), Some("mode=755")).unwrap();
    }

    pub(crate) fn start_etcd(&mut self, address: &str) {
        let url = &format!("http://{address}");
        let mut etcd = Command::new("etcd");
        etcd.args(["--data-dir", "/var/lib/etcd", "--listen-client-urls", url, "--advertise-client-urls", url]);
        etcd.args(["--listen-peer-urls", "http://10.0.0.1:2380", "--logger", "zap", "--unsafe-no-fsync"]);
        let child = etcd.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        self.etcd = Some(child);
        // Wait in a shell loop until the started etcd answers requests.
        let asks = format!("margay --store etcd://{address} store status >/dev/null");
        self.do_all(&[&format!("i=0; until {asks}; do i=$((i+1)); [ $i -lt 50 ]; done")]);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.let_go();
        if let Some(mut etcd) = self.etcd.take() {
            let _ = etcd.kill();
            let _ = etcd.wait();
        }
    }
}
