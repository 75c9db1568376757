//! The arguments of `margay export`, `margay import` and `margay migrate`.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use ipnet::IpNet;

use crate::cni::is_cni_name;

const EXPORT: &str = "\
Examples:
  margay export /var/backups/ipam.jsonl
  margay export - --store redb:///var/lib/margay/ipam.redb | gzip > ipam.jsonl.gz

Containers can be started and stopped meanwhile. The file has blocks, handles,
affinities, settings, pools, reservations and nodes, as they were at one
revision; of a cluster nothing else, where `margay store backup` writes all
that is Calico's. It is of the same form: `margay store restore` takes it, too.";

const IMPORT: &str = "\
Examples:
  margay import ipam.jsonl --store etcd://10.0.0.1:2379
  margay import ipam.jsonl --as-node worker-7
  margay import host-local /var/lib/cni/networks/lab --network lab --dry-run

The file is one of `margay export` or `margay store backup`, and is checked
first. The store must have no pools and no addresses; nodes that it has stay as
they are. Until all is there and was read back, every plugin is refused. If it
is broken off, give the same command again: it goes on.";

const HOST_LOCAL: &str = "\
Examples:
  margay pool create lab 10.88.0.0/24 --gateway 10.88.0.1
  margay import host-local /var/lib/cni/networks/lab --network lab --dry-run
  margay import host-local /var/lib/cni/networks/lab --network lab

Each address becomes its container's, as if Margay's plugin had given it, so that
the plugin's DEL takes it back. What is taken over already stays so. An address
that is in no pool, reserved, or another container's is listed and left out; the
exit code is then 1.";

const PODMAN: &str = "\
Examples:
  podman inspect $(podman ps -q) | margay import podman - --network lab

For podman with netavark, which keeps no files for host-local. A container in
several networks is left out: podman does not say which interface is in which.
With CNI podman uses host-local: margay import host-local.";

const WHEREABOUTS: &str = "\
Examples:
  kubectl get ippools.whereabouts.cni.cncf.io,pods -A -o yaml >records.yaml
  margay import whereabouts records.yaml --network storage --dry-run
  margay import whereabouts records.yaml --network storage --range 10.9.0.0/16

The pods say on which node each address is, and which addresses nobody uses any
more: those are left out. Without pods in the file all addresses are --node's.
The pools must be there: margay pool create NAME CIDR --manual.";

const MIGRATE: &str = "\
Examples:
  margay migrate sled:///var/lib/margay/ipam.sled etcd://10.0.0.1:2379
  margay migrate sled:///var/lib/margay/ipam.sled etcd://10.0.0.1:2379 --finish

1. Without --finish all is copied and compared. Plugins go on using FROM; on TO
   they are refused. Again, it brings TO up to date with what has changed.
2. Stop the runtime, so that nothing changes any more, and run it once more.
3. --finish compares once more, refuses if anything differs, and opens TO.
4. Name TO in the network's configuration and start the runtime.

FROM is never written to. Calico's own programs do not know that TO is not to be
used yet. The login and the certificates are the same for both.";

/// Moving what is in a store to another one.
#[derive(Debug, Subcommand)]
pub(crate) enum Moving {
    /// Write all that IPAM has, as it is at one revision, to a file
    #[command(after_help = EXPORT)]
    Export(Export),
    /// Fill an empty store from a file, or with what others have given
    #[command(after_help = IMPORT, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
    Import(Import),
    /// Copy all that IPAM has to another store, and switch to that
    #[command(after_help = MIGRATE)]
    Migrate(Migrate),
}

#[derive(Debug, Args)]
pub(crate) struct Export {
    /// The file to write, or - for stdout
    pub(crate) file: PathBuf,

    /// Write over a file that is there
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Import {
    #[command(subcommand)]
    pub(crate) of: Option<TakeOver>,

    /// The file
    #[arg(required = true)]
    pub(crate) file: Option<PathBuf>,

    /// This node gets the blocks and addresses of the file's only node, or of the node of --from-node
    #[arg(long, value_name = "NAME")]
    pub(crate) as_node: Option<String>,

    /// Which of the file's nodes that is
    #[arg(long, value_name = "OLD", requires = "as_node")]
    pub(crate) from_node: Option<String>,

    /// Only say what would be imported
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Remove what an import that was broken off has written
    #[arg(long)]
    pub(crate) abort: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Migrate {
    /// The store to copy
    #[arg(value_name = "FROM")]
    pub(crate) from: String,

    /// The store to fill
    #[arg(value_name = "TO")]
    pub(crate) to: String,

    /// If both are equal, open TO for use
    #[arg(long, conflicts_with = "abort")]
    pub(crate) finish: bool,

    /// Remove from TO what was written, and open it for use
    #[arg(long)]
    pub(crate) abort: bool,

    /// Only say what would be done
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Taking over what another plugin has given.
#[derive(Debug, Subcommand)]
pub(crate) enum TakeOver {
    /// Take over the addresses that host-local has given in one network
    #[command(after_help = HOST_LOCAL)]
    HostLocal(FromHostLocal),
    /// Take over the addresses that podman's containers have in one network
    #[command(after_help = PODMAN)]
    Podman(FromPodman),
    /// Take over the addresses that whereabouts has given in one network
    #[command(after_help = WHEREABOUTS)]
    Whereabouts(FromWhereabouts),
}

#[derive(Debug, Args)]
pub(crate) struct FromHostLocal {
    /// The folder with a file for each address
    pub(crate) folder: PathBuf,

    #[command(flatten)]
    pub(crate) terms: Terms,
}

#[derive(Debug, Args)]
pub(crate) struct FromPodman {
    /// The output of `podman inspect`; - for stdin
    pub(crate) file: PathBuf,

    #[command(flatten)]
    pub(crate) terms: Terms,
}

#[derive(Debug, Args)]
pub(crate) struct FromWhereabouts {
    /// Its IPPools, and the cluster's pods, as kubectl prints them as YAML or JSON; - for stdin
    pub(crate) file: PathBuf,

    /// Only the addresses of this range, as a network has it: CIDR or FIRST-LAST/BITS; may be repeated
    #[arg(long = "range", value_name = "RANGE", value_parser = address_range)]
    pub(crate) ranges: Vec<AddressRange>,

    #[command(flatten)]
    pub(crate) terms: Terms,
}

/// A range as whereabouts writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddressRange {
    /// The network, without host bits.
    pub(crate) net: IpNet,
    /// The first and the last address.
    pub(crate) bounds: (IpAddr, IpAddr),
}

impl AddressRange {
    /// True if an address of the network is in the range.
    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        self.net.contains(&address) && self.bounds.0 <= address && address <= self.bounds.1
    }
}

/// Reads a network, with or without host bits, or FIRST-LAST/BITS.
fn address_range(text: &str) -> Result<AddressRange, String> {
    let (first, rest) = match text.split_once('-') {
        Some((first, rest)) => (Some(first), rest),
        None => (None, text),
    };
    let wrong = || "not a range such as 10.9.0.0/16 or 10.9.0.10-10.9.0.99/16".to_owned();
    let written: IpNet = rest.trim().parse().map_err(|_| wrong())?;
    let net = written.trunc();
    let bounds = match first {
        None => (net.network(), net.broadcast()),
        Some(first) => (first.trim().parse().map_err(|_| wrong())?, written.addr()),
    };
    if !net.contains(&bounds.0) {
        return Err(format!("{} is not in {net}", bounds.0));
    }
    if bounds.0 > bounds.1 {
        return Err(format!("{} comes after {}", bounds.0, bounds.1));
    }
    Ok(AddressRange { net, bounds })
}

/// Reads a network's name. A runtime calls the plugin with no other, so no DEL could release what is taken over.
fn network_name(text: &str) -> Result<String, String> {
    match is_cni_name(text) {
        true => Ok(text.to_owned()),
        false => {
            Err("a network's name has letters, digits, '_', '.' and '-', and begins with a letter or digit".to_owned())
        }
    }
}

/// In whose name addresses are taken over.
#[derive(Debug, Args)]
pub(crate) struct Terms {
    /// The network's name, as its configuration has it
    #[arg(long, value_name = "NAME", value_parser = network_name)]
    pub(crate) network: String,

    /// The node's name, if the network's configuration names another than this machine has
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,

    /// Only say what would be taken over
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_has_a_name_that_cni_takes() {
        assert!(network_name("my_net.v4-1").is_ok());
        for text in ["", " ", "-a", "a b", "a/b", "\u{feff}lab"] {
            assert!(network_name(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_range_is_read_as_whereabouts_writes_it() {
        for (text, net, first, last) in [
            ("10.9.0.0/16", "10.9.0.0/16", "10.9.0.0", "10.9.255.255"),
            ("10.9.0.77/16", "10.9.0.0/16", "10.9.0.0", "10.9.255.255"),
            ("10.9.0.10-10.9.0.99/16", "10.9.0.0/16", "10.9.0.10", "10.9.0.99"),
            ("10.9.0.10 - 10.9.0.99/16", "10.9.0.0/16", "10.9.0.10", "10.9.0.99"),
            ("fd09::5-fd09::9/64", "fd09::/64", "fd09::5", "fd09::9"),
            ("fd09::5/120", "fd09::/120", "fd09::", "fd09::ff"),
        ] {
            let range = address_range(text).unwrap();
            assert_eq!(range.net, net.parse().unwrap(), "{text}");
            assert_eq!(range.bounds, (first.parse().unwrap(), last.parse().unwrap()), "{text}");
        }
        for text in
            ["", "x", "10.9.0.0", "10.9.0.5-10.9.0.9", "-10.9.0.9/16", "10.8.0.1-10.9.0.9/16", "10.9.0.9-10.9.0.5/16"]
        {
            assert!(address_range(text).is_err(), "{text}");
        }
        assert!(address_range("fd09::5-10.9.0.9/16").is_err(), "of two families");
    }
}
