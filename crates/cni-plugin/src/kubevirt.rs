//! Handles pods on Calico networks that run a virtual machine of KubeVirt. The addresses of a pod with a virtual
//! machine belong to the virtual machine, not to the container.

use std::fmt::Write;
use std::time::{Duration, Instant};

use agent::{CniError, NetworkRules, Result};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ipam_core::vm::{PodRole, VM_INFIX, VmFate, VmPod};
use tokio_rustls::rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256;

use crate::identity::ContainerIdentity;
use crate::kubernetes::{LAUNCHER_PREFIX, Launcher, VmInstance};
use crate::run::CniContext;

/// Maximum length of a Calico handle, in bytes.
const MAX_HANDLE_BYTES: usize = 128;

impl CniContext<'_> {
    /// Finds the virtual machine whose address a pod gets; returns `None` if the pod runs no virtual machine.
    ///
    /// # Errors
    /// CNI error code 999 with Calico's message if the Kubernetes API does not report the pod or its virtual machine.
    pub(crate) fn vm_of_add(&mut self, identity: &ContainerIdentity) -> Result<Option<VmPod>> {
        match self.launcher(identity)? {
            Launcher::Ordinary => Ok(None),
            Launcher::Of(instance) => Ok(Some(vm_pod(identity, instance))),
            Launcher::Gone(_) => Err(CniError::internal("failed to get VMI info: pod not found")),
        }
    }

    /// Finds the virtual machine whose address a pod had, even if the pod is gone.
    ///
    /// # Errors
    /// Any error of [`vm_of_add`](Self::vm_of_add), except the error for a pod that is gone.
    pub(crate) fn vm_of_del(&mut self, identity: &ContainerIdentity) -> Result<Option<VmPod>> {
        Ok(match self.launcher(identity)? {
            Launcher::Ordinary | Launcher::Gone(None) => None,
            Launcher::Of(instance) | Launcher::Gone(Some(instance)) => Some(vm_pod(identity, instance)),
        })
    }

    /// True if the pod of this plugin call may run a virtual machine that keeps its address when it moves to another
    /// pod. Only Calico networks keep an address for a virtual machine; on other networks, each interface has its own
    /// address.
    pub(crate) fn may_be_vms(&self, identity: &ContainerIdentity) -> bool {
        self.rules == NetworkRules::Calico
            && identity.pod.as_ref().is_some_and(|(_, name)| name.starts_with(LAUNCHER_PREFIX))
    }

    fn launcher(&mut self, identity: &ContainerIdentity) -> Result<Launcher> {
        match &identity.pod {
            Some((namespace, pod)) if self.may_be_vms(identity) => {
                let begun = Instant::now();
                // The request to the Kubernetes API may take half of the time limit; the other half is reserved for the
                // store.
                let launcher = self.kubernetes.launcher(namespace, pod, self.store.patience / 2);
                self.shorten_timeout(begun.elapsed());
                launcher
            }
            _ => Ok(Launcher::Ordinary),
        }
    }

    /// Subtracts the time that was spent on requests to the Kubernetes API from the store's time limit.
    pub(crate) fn shorten_timeout(&mut self, spent: Duration) {
        self.store.patience = self.store.patience.saturating_sub(spent);
    }
}

fn vm_pod(identity: &ContainerIdentity, instance: VmInstance) -> VmPod {
    let (namespace, name) = identity.pod.clone().unwrap_or_default();
    let role = if instance.migration.is_some() { PodRole::Target } else { PodRole::Source };
    let recorded = [
        ("vmi-uid", Some(instance.uid)),
        ("vm-uid", instance.machine),
        ("vmim-uid", instance.migration),
        ("vmi-name", Some(instance.name.clone())),
    ];
    let recorded = recorded.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    VmPod {
        handle: handle(&identity.attachment.network, &namespace, &instance.name),
        role,
        fate: if instance.ends { VmFate::Ends } else { VmFate::Stays },
        attributes: recorded.collect(),
        namespace,
        name,
    }
}

/// Returns the handle under which a virtual machine's addresses are assigned. If the handle would be too long, a
/// checksum replaces the names of the namespace and the virtual machine. The checksum is cut so that the handle has at
/// most [`MAX_HANDLE_BYTES`], but never to fewer than [`MIN_SUM_CHARS`] characters. If the checksum is too short to
/// fill up the handle, uses the whole checksum; Calico panics in this case.
fn handle(network: &str, namespace: &str, machine: &str) -> String {
    let mut handle = format!("{network}{VM_INFIX}");
    let prefix = handle.len();
    // Writing to a `String` cannot fail.
    let _ = write!(handle, "{namespace}.{machine}");
    if handle.len() <= MAX_HANDLE_BYTES {
        return handle;
    }
    // Use the SHA-256 implementation of the TLS library, because the program contains that library anyway.
    let Some(suite) = TLS13_AES_128_GCM_SHA256.tls13() else { return handle };
    let sum = URL_SAFE_NO_PAD.encode(suite.common.hash_provider.hash(&handle.as_bytes()[prefix..]));
    let room = (MAX_HANDLE_BYTES - 1).saturating_sub(prefix).max(MIN_SUM_CHARS).min(sum.len());
    handle.truncate(prefix);
    handle.push('_');
    handle.push_str(&sum[..room]);
    handle
}

/// Minimum number of characters of the checksum in a handle, even after a very long network name. With a shorter
/// checksum, two virtual machines could get the same handle.
const MIN_SUM_CHARS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handle_names_machine_or_its_checksum() {
        let k = |times| "k".repeat(times);
        assert_eq!(handle("net1", "shop", "a.b"), "net1.vmi.shop.a.b");
        let fits = handle("net1", &k(63), &k(55));
        assert_eq!((fits.len(), fits.ends_with('k')), (128, true));
        let n = |times| "n".repeat(times);
        assert_eq!(
            handle(&n(80), &k(63), &k(63)),
            format!("{}.vmi._Vhmos_BDDQHT13lWE5PRcSTxvcWoCG7u34_T2ZHmEV", n(80))
        );
        assert_eq!(handle(&n(85), &k(63), &k(63)), format!("{}.vmi._Vhmos_BDDQHT13lWE5PRcSTxvcWoCG7u34_T2", n(85)));
        // Calico's plugin panics if the network name is short and the names of the namespace and the virtual machine
        // are long.
        assert_eq!(handle("net1", &k(63), &k(63)), "net1.vmi._Vhmos_BDDQHT13lWE5PRcSTxvcWoCG7u34_T2ZHmEVY");
        assert_eq!(handle(&n(300), &k(63), &k(63)).len(), 300 + ".vmi._".len() + MIN_SUM_CHARS);
    }
}
