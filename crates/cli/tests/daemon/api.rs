//! Tests `margay serve --listen`: etcd's API as other programs use it.

mod bad_input;
mod etcdctl;
mod full;
mod history;
mod leases;
mod mutual_tls;
mod together;

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;

use nix::sys::signal::Signal;

use crate::daemon::Daemon;
use crate::lab::Lab;
use crate::programs::{Ended, Running, margay, run, wait_until};

/// A daemon that serves etcd's API on a loopback address.
#[derive(Debug)]
struct Api {
    daemon: Daemon,
    /// The host and port at which the API listens.
    address: String,
}

impl Api {
    fn start(lab: &Lab) -> Self {
        Self::start_with(lab, &["--listen", "http://127.0.0.1:0", "--insecure-loopback"])
    }

    fn start_with(lab: &Lab, options: &[&str]) -> Self {
        let store = lab.url();
        let command = margay(["--store", &store, "serve"].into_iter().chain(options.iter().copied()));
        let daemon = Daemon::start_as(lab, command);
        let said = || {
            let log = daemon.own_log();
            let (_, rest) = log.rsplit_once("serving the etcd API at http")?;
            let (url, _) = rest.split_once('\n')?;
            Some(url.split_once("://")?.1.to_owned())
        };
        wait_until("the API is offered", || said().is_some());
        let address = said().unwrap();
        Self { daemon, address }
    }

    fn url(&self) -> String {
        format!("etcd://{}", self.address)
    }

    /// Runs etcdctl with arguments that are separated by spaces.
    fn etcdctl(&self, args: &str) -> Ended {
        run(self.etcdctl_command(args))
    }

    fn etcdctl_command(&self, args: &str) -> Command {
        let mut command = Command::new("etcdctl");
        command.env_clear().env("ETCDCTL_API", "3").env("PATH", "/usr/bin:/bin").current_dir("/");
        command.stdin(std::process::Stdio::piped());
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        command.args(["--endpoints", &self.address]).args(args.split(' '));
        command
    }

    /// Stops the daemon with SIGTERM and checks that the daemon succeeded.
    #[track_caller]
    fn end(self) {
        self.daemon.signal(Signal::SIGTERM);
        self.daemon.wait().ok();
    }
}

/// A running `etcdctl watch` of the keys under `/t/`.
#[derive(Debug)]
struct Watching {
    etcdctl: Running,
    said: PathBuf,
}

impl Watching {
    /// Puts the key `/t/begin`, and starts a watch whose first event is this put.
    fn start(api: &Api, lab: &Lab) -> Self {
        api.etcdctl("put /t/begin x").ok();
        let said = lab.root().join("watched");
        let mut command = api.etcdctl_command("watch /t/ --prefix --rev 1");
        command.stdout(File::create(&said).unwrap());
        let watching = Self { etcdctl: Running::start(command, ""), said };
        watching.until("/t/begin");
        watching
    }

    /// Waits until the watch has printed an event of the given key.
    fn until(&self, key: &str) {
        wait_until(&format!("an event of {key}"), || self.count(key) > 0);
    }

    /// Returns the number of events of the given key that the watch has printed.
    fn count(&self, key: &str) -> usize {
        fs::read_to_string(&self.said).unwrap().matches(&format!("{key}\n")).count()
    }
}
