//! `margay serve`: the daemon of a store.

use std::path::Path;

use ::serve::api;
use ::serve::life::{self, Options};
use datastore::care::Retention;
use datastore::{Location, served};

use crate::args::Serve;
use crate::command::{Call, Standalone};
use crate::error::{Failure, Result};

impl Standalone for Serve {
    /// Serves a store until a signal ends the process.
    fn run(&self, call: &mut Call<'_>) -> Result<u8> {
        let location = match &self.folder {
            Some(folder) if call.cli.store.is_none() => in_folder(call, folder)?,
            _ => call.choose()?.location,
        };
        if self.name {
            let name = served::instance(&location);
            let name = name.ok_or_else(|| Failure::new(format!("{location} has no daemon")))?;
            writeln!(call.out, "{name}")?;
            return Ok(0);
        }
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        // The work is reads and commits, which are short. Each further thread would have a heap of its own: with eight
        // callers and watches that was 30 MiB more.
        let runtime = builder.worker_threads(2).max_blocking_threads(4).enable_all().build();
        let runtime = runtime.map_err(|error| Failure::new(format!("cannot start: {error}")))?;
        let defaults = Retention::WITH_CLIENTS;
        let bounds = Retention {
            revisions: self.history_revisions.or(defaults.revisions),
            age: self.history_age.or(defaults.age),
            bytes: self.history_mib.map(|mib| mib << 20).or(defaults.bytes),
            min_age: self.history_min_age.or(defaults.min_age),
        };
        let is_bounded = self.history_revisions.or(self.history_mib).is_some()
            || self.history_age.or(self.history_min_age).is_some();
        if is_bounded && location.path().is_none() {
            return Err(Failure::new(format!(
                "the options --history-... take a store on {}; {location} is none",
                call.drivers.local_names("", "")
            )));
        }
        let options = Options {
            location,
            http: self.http.clone(),
            hosts: self.host.clone(),
            api: api::Options {
                listen: self.listen.clone(),
                advertise: self.advertise.clone(),
                cert: self.cert_file.clone(),
                key: self.key_file.clone(),
                client_ca: self.client_ca_file.clone(),
                insecure_loopback: self.insecure_loopback,
                watch_progress_interval: self.watch_progress_interval,
            },
            history: if is_bounded || !self.listen.is_empty() { Some(bounds) } else { None },
            history_required: is_bounded,
            node: host::node_name(""),
            boot: host::boot_id().as_deref().and_then(host::short_boot),
        };
        let served = runtime.block_on(life::run(options, |said| _ = writeln!(call.err, "{said}")));
        runtime.shutdown_background();
        served.map(|()| 0).map_err(|refusal| Failure::new(refusal.to_string()))
    }
}

/// The store in a folder.
fn in_folder(call: &Call<'_>, folder: &Path) -> Result<Location> {
    if !folder.is_absolute() {
        return Err(Failure::new(format!("{} is not an absolute path", folder.display())));
    }
    call.drivers.in_folder(folder).map_err(|error| call.explain(&error))
}
