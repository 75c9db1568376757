//! This machine: its names, its boot, and what is in use on it.

use std::collections::BTreeSet;

use ipam_core::gc::Evidence;

use crate::error::{Failure, Result};

/// The evidence of this machine.
pub(super) struct Machine {
    /// The boot's whole id.
    pub(super) boot_id: String,
    /// The node's name.
    pub(super) node: String,
}

impl Machine {
    /// This machine, under the `given` name or else its own.
    ///
    /// # Errors
    /// The kernel does not report its boot id.
    pub(super) fn of(given: Option<&str>) -> Result<Self> {
        Ok(Self {
            boot_id: host::boot_id().ok_or_else(|| Failure::new("the kernel does not tell its boot id"))?,
            node: host::node_name(given.unwrap_or_default()),
        })
    }

    /// The addresses in use on this machine.
    ///
    /// # Errors
    /// Not everything can be scanned, or the kernel does not report when it began.
    pub(super) fn evidence(&self) -> Result<Evidence> {
        let host::Sight { addresses: live, namespaces, within } = host::scan().map_err(|blind| {
            Failure::new(format!("nothing was freed: {blind}")).hint(
                "run margay gc as root, where the container runtime runs; without a scan of every namespace, an address \
                 that is in use cannot be told from one that is not",
            )
        })?;
        let known = host::short_boot(&self.boot_id).zip(host::uptime());
        let (boot, up) = known.ok_or_else(|| Failure::new("the kernel does not tell when it began"))?;
        Ok(Evidence { boot, up, live, namespaces, within })
    }

    /// The same, but of the whole machine. It serves for addresses of other nodes: only the machine's interfaces show
    /// whether this machine has them.
    ///
    /// # Errors
    /// Those of `evidence`; this process runs in a container.
    pub(super) fn whole_evidence(&self) -> Result<Evidence> {
        let evidence = self.evidence()?;
        match evidence.within {
            None => Ok(evidence),
            Some(_) => Err(Failure::new("nothing was freed: in a container nothing is seen of the machine around it")
                .hint("run margay gc --gone and --free on a machine itself, or in a pod with hostPID")),
        }
    }
}

/// All names that this machine may have in a store.
pub(super) fn own_names() -> BTreeSet<String> {
    let hostname = host::hostname();
    let mut names = BTreeSet::from([host::node_name(""), hostname.to_lowercase(), hostname]);
    names.remove("");
    names
}
