//! Reading host-local's files. Their names are addresses; a file has the container's id and the interface's name.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::Args;
use datastore::text_fault;

use super::take_over::{Lease, Leases, LeftOut, TakingOver, Terms};
use crate::command::{Call, Standalone};
use crate::error::{Failure, Result};
use crate::output::printable;

pub(crate) const HELP: &str = "\
Examples:
  margay pool create lab 10.88.0.0/24 --gateway 10.88.0.1
  margay import host-local /var/lib/cni/networks/lab --network lab --dry-run
  margay import host-local /var/lib/cni/networks/lab --network lab

Each address becomes its container's, as if Margay's plugin had given it, so that
the plugin's DEL takes it back. What is taken over already stays so. An address
that is in no pool, reserved, or another container's is listed and left out; the
exit code is then 1.";

#[derive(Debug, Args)]
pub(crate) struct FromHostLocal {
    /// The folder with a file for each address
    pub(crate) folder: PathBuf,

    #[command(flatten)]
    pub(crate) terms: Terms,
}

/// The length of the longest file that host-local could have written, in bytes.
const MAX_BYTES: u64 = 4096;
/// The interface for files of versions that did not write it.
const USUAL_INTERFACE: &str = "eth0";

impl Standalone for FromHostLocal {
    fn run(&self, call: &mut Call<'_>) -> Result<u8> {
        let found = read(&self.folder)?;
        call.on_store(&TakingOver::new(found, &self.terms))
    }
}

/// Reads a folder.
fn read(folder: &Path) -> Result<Leases> {
    let failed = |path: &Path, error: &io::Error| {
        Failure::new(format!("cannot read {}: {error}", path.display()))
            .hint("give the folder in which host-local keeps a network's addresses, such as /var/lib/cni/networks/NAME")
    };
    let mut containers: BTreeMap<(String, String), Lease> = BTreeMap::new();
    let mut left_out = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| failed(folder, &error))? {
        let path = entry.map_err(|error| failed(folder, &error))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name == "lock" || name.starts_with("last_reserved_ip") {
            continue;
        }
        let Ok(address) = name.parse::<IpAddr>() else {
            left_out.push(LeftOut::new(printable(&name), "its name is no address"));
            continue;
        };
        let (text, given_at) = match content(&path) {
            Ok(Ok(content)) => content,
            Ok(Err(why)) => {
                left_out.push(LeftOut::new(address.to_string(), format!("its file cannot be used: {why}")));
                continue;
            }
            // The container was removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(&path, &error)),
        };
        let mut lines = text.lines().map(str::trim);
        let container = lines.next().unwrap_or_default();
        let interface = lines.next().filter(|name| !name.is_empty()).unwrap_or(USUAL_INTERFACE);
        let lease = containers.entry((container.to_owned(), interface.to_owned())).or_insert_with(|| Lease {
            container: container.to_owned(),
            interface: interface.to_owned(),
            addresses: Vec::new(),
            given_at: Some(given_at),
            ..Lease::default()
        });
        lease.addresses.push(address);
        lease.addresses.sort_unstable();
    }
    Ok(Leases { leases: containers.into_values().collect(), left_out })
}

/// The contents of a file and the time of its last write, or why it is none of host-local's.
fn content(path: &Path) -> io::Result<Result<(String, SystemTime), String>> {
    let about = fs::metadata(path)?;
    if !about.is_file() {
        return Ok(Err("it is no regular file".to_owned()));
    }
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if let Some(fault) = text_fault(&bytes) {
        return Ok(Err(fault.to_string()));
    }
    if bytes.len() as u64 > MAX_BYTES {
        return Ok(Err(format!("it has more than {MAX_BYTES} bytes")));
    }
    let text = String::from_utf8(bytes).map_err(io::Error::other)?;
    Ok(Ok((text, about.modified()?)))
}
