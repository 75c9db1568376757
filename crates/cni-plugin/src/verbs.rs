//! Carries out CHECK, STATUS and GC of the IPAM plugin.
//!
//! CHECK fails if the container holds no address in the store at all. CHECK also fails if an address of its
//! `prevResult` is free in the store, or belongs to another container. If the state of an address is unknown, CHECK
//! succeeds and writes a log line, because a runtime stops a container whose CHECK fails.
//!
//! STATUS reports whether an ADD with the same configuration and store would succeed now. STATUS succeeds even if no
//! pool has a free address, because a runtime marks a node as not ready when STATUS fails, and the node's pods are
//! evicted.
//!
//! GC releases the addresses of all attachments that are not in the runtime's list. By the CNI specification, the
//! runtime's list of attachments is authoritative: an attachment that is not in the list is gone. GC releases the
//! addresses of an unlisted attachment even if an interface still has them, for example because the runtime failed to
//! remove the container. Unlike the verb GC, the command `margay gc` finds unused addresses by the state of the
//! machine, for example by its network namespaces.

use std::collections::BTreeSet;
use std::net::IpAddr;

use agent::{Allocator, Check, CheckAnswer, CniError, Code, Gc, GcSummary, Result};
use ipam_core::assign::RequestedAddresses;
use ipam_core::attachment::Attachment;
use ipam_core::vm::VM_INFIX;
use ipam_core::{CheckResult, Standing};

use crate::bridged::network_of;
use crate::gojson::GoJson;
use crate::identity::{ContainerIdentity, no_node_error};
use crate::run::CniContext;
use crate::{result, sticky};

impl CniContext<'_> {
    pub(crate) fn check(&self, allocator: &dyn Allocator) -> Result<()> {
        let (_, identity) = self.identify()?;
        // The address of a virtual machine has its own handle, which is unknown without the Kubernetes API.
        let is_vms = self.may_be_vms(&identity);
        let check = Check {
            old_handle: identity.old_handle(),
            attachment: identity.attachment.clone(),
            addresses: result::previous_addresses(self.conf.prev_result.as_ref())?,
        };
        match allocator.check(&self.store, check)? {
            CheckAnswer::Unknown(why) => {
                tracing::warn!(
                    why,
                    "cannot read the store; CHECK did not compare the container's addresses with the store"
                );
            }
            CheckAnswer::Compared(mut comparison) => {
                if is_vms {
                    let prefix = format!("{}{VM_INFIX}", identity.attachment.network);
                    comparison.standings.retain(
                        |(_, standing)| !matches!(standing, Standing::Another(handle) if handle.starts_with(&prefix)),
                    );
                    if comparison.standings.is_empty() {
                        return Ok(());
                    }
                }
                self.judge(&identity.attachment, &comparison)?;
            }
        }
        Ok(())
    }

    fn judge(&self, who: &Attachment, found: &CheckResult) -> Result<()> {
        let (mut wrong, mut why) = (Vec::new(), Vec::new());
        for (ip, standing) in &found.standings {
            match standing {
                Standing::Own => {}
                Standing::Unmarked => tracing::info!(
                    %ip,
                    "the store records no interface name for the address, so CHECK cannot compare the interface; \
                     treating the address as correct"
                ),
                Standing::Unknown => tracing::info!(
                    %ip,
                    "the address is in no pool, so the store cannot contain the address; CHECK accepts the address"
                ),
                Standing::Free => {
                    wrong.push(*ip);
                    why.push(format!("{ip} is free"));
                }
                Standing::Another(handle) => {
                    wrong.push(*ip);
                    why.push(format!("{ip} is held by {handle}"));
                }
            }
        }
        // If the runtime passes no `prevResult`, CHECK only detects that the container holds no address at all.
        let nothing = found.standings.is_empty() && found.held.is_empty() && !self.asks_for_nothing();
        let what = match wrong.as_slice() {
            [] if nothing => "no address is recorded".to_owned(),
            [] => return Ok(()),
            wrong => {
                let wrong: Vec<_> = wrong.iter().map(IpAddr::to_string).collect();
                format!("{} is not recorded", wrong.join(", "))
            }
        };
        why.push("the container has to be made anew: its address may be given to another one".to_owned());
        let text =
            format!("{what} for container {} interface {} in network {}", who.container, who.interface, who.network);
        Err(CniError::internal(text).with_details(why.join("; ")))
    }

    fn asks_for_nothing(&self) -> bool {
        let settings = self.bridged_settings().ok().flatten();
        self.counts(&network_of(settings.as_ref()), &[]) == (0, 0)
    }
}

/// The container id in the request that STATUS sends to the store. No container has the id `-status`, because a
/// container id begins with a letter or a digit.
const STATUS_CONTAINER: &str = "-status";

/// Sets the error's code to 50, the code of every error of STATUS.
pub(crate) fn unavailable(error: CniError) -> CniError {
    error.with_code(Code::Unavailable)
}

impl CniContext<'_> {
    pub(crate) fn status(&self, allocator: &dyn Allocator) -> Result<()> {
        let settings = self.bridged_settings()?;
        let network = network_of(settings.as_ref());
        let attachment = Attachment {
            network: self.conf.name.clone(),
            container: STATUS_CONTAINER.to_owned(),
            interface: "eth0".to_owned(),
            node: self.host.node(&self.conf),
            boot: self.host.boot(),
        };
        let identity = ContainerIdentity { attachment, pod: None, namespace: "default".to_owned(), netns: None };
        identity.check_node()?;
        sticky::check(&self.conf)?;
        let assign = self.assignment(identity, network, Vec::new());
        // If the network assigns no addresses, STATUS does not need the store.
        if assign.wanted != RequestedAddresses::default() {
            allocator.status(&self.store, assign.into())?;
        }
        Ok(())
    }
}

/// The configuration field that lists the valid attachments, and its former name in the CNI specification. libcni
/// writes both fields.
const ATTACHMENT_MEMBERS: [&str; 2] = ["cni.dev/valid-attachments", "cni.dev/attachments"];

/// Returns the valid attachments that the runtime lists, as pairs of container id and interface name.
///
/// # Errors
/// CNI error code 7 if the list of valid attachments is missing or has a malformed element. Without a valid list of
/// attachments, GC must not release any address.
pub(crate) fn valid_attachments(json: &GoJson) -> Result<BTreeSet<(String, String)>> {
    let member =
        ATTACHMENT_MEMBERS.into_iter().find(|name| json.member(name).is_some()).unwrap_or(ATTACHMENT_MEMBERS[0]);
    let Some(GoJson::Array(elements)) = json.member(member) else {
        return Err(CniError::config(format!("GC needs a list in {member}, nothing was released"))
            .with_details("an empty list means that no attachment is in use"));
    };
    let attachment = |element: &GoJson| {
        let text = |name: &str| element.text_member(name).ok().filter(|text| !text.is_empty()).map(str::to_owned);
        Some((text("containerID")?, text("ifname")?))
    };
    let valid = elements.iter().map(attachment).collect::<Option<BTreeSet<_>>>();
    valid.ok_or_else(|| {
        CniError::config(format!("{member} has an element that is no attachment, nothing was released"))
            .with_details("every element needs the texts containerID and ifname")
    })
}

impl CniContext<'_> {
    /// Releases the addresses of all attachments that the runtime does not list.
    pub(crate) fn gc(&self, valid: BTreeSet<(String, String)>, allocator: &dyn Allocator) -> Result<()> {
        let node = self.host.node(&self.conf);
        if node.is_empty() {
            return Err(no_node_error());
        }
        let now = self.host.now.unix_timestamp_nanos();
        let gc = Gc { network: self.conf.name.clone(), node, valid, now };
        log_collected(&allocator.gc(&self.store, gc)?, &self.conf.name);
        Ok(())
    }
}

/// Logs how many addresses GC released, how many it kept, and why.
fn log_collected(collected: &GcSummary, network: &str) {
    let GcSummary { released, changed, young, undated, unmarked } = collected;
    tracing::info!(
        network,
        ?released,
        changed,
        young,
        unmarked,
        "GC released the addresses of attachments that the runtime no longer lists"
    );
    if *undated > 0 {
        tracing::warn!(
            network,
            undated,
            "GC kept addresses with an unreadable assignment time; run margay gc --netns to free unused ones"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<BTreeSet<(String, String)>> {
        valid_attachments(&GoJson::parse(text.as_bytes()).unwrap())
    }

    #[test]
    fn attachment_list_is_read_and_may_be_empty() {
        let text =
            r#"{"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"},{"containerID":"a","ifname":"e1"}]}"#;
        let expected = [("a", "e1"), ("a", "eth0")].map(|(id, name)| (id.to_owned(), name.to_owned()));
        assert_eq!(read(text).unwrap(), expected.into());
        assert_eq!(read(r#"{"cni.dev/valid-attachments":[]}"#).unwrap(), BTreeSet::new());
        let one = BTreeSet::from([("b".to_owned(), "eth0".to_owned())]);
        let other = r#""cni.dev/attachments":[{"containerID":"b","ifname":"eth0"}]"#;
        assert_eq!(read(&format!("{{{other}}}")).unwrap(), one);
        assert_eq!(read(&format!(r#"{{"cni.dev/valid-attachments":null,{other}}}"#)).unwrap(), one);
        assert_eq!(read(&format!(r#"{{"cni.dev/valid-attachments":[],{other}}}"#)).unwrap(), BTreeSet::new());
    }

    #[test]
    fn attachment_list_is_refused_when_malformed() {
        for list in [
            "{}",
            "null",
            "\"a\"",
            "{\"containerID\":\"a\",\"ifname\":\"b\"}",
            "[1]",
            "[{\"containerID\":\"a\"}]",
            "[{\"containerID\":\"\",\"ifname\":\"b\"}]",
            "[{\"containerID\":\"a\",\"ifname\":1}]",
            "[null]",
        ] {
            let error = read(&format!(r#"{{"cni.dev/valid-attachments":{list}}}"#)).unwrap_err();
            assert_eq!(error.code().number(), 7, "{list}");
            assert!(error.message().contains("nothing was released") && !error.details().is_empty(), "{list}");
        }
        let both = r#"{"cni.dev/valid-attachments":"a","cni.dev/attachments":[]}"#;
        assert_eq!(read(both).unwrap_err().code().number(), 7, "the other list counts only where this one is missing");
        let error = read(r#"{"cni.dev/attachments":[1]}"#).unwrap_err();
        assert!(error.message().starts_with("cni.dev/attachments has an element"), "{}", error.message());
    }
}
