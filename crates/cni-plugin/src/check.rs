//! CHECK: it fails if the store has an address of the container as free or as another's, or has none of it. A runtime
//! ends a container whose CHECK fails, so a state that cannot be known is success and a line in the log.

use std::net::IpAddr;

use agent::{Allocator, Check, Checked, CniError, Result};
use ipam_core::attachment::Attachment;
use ipam_core::vm::VM_INFIX;
use ipam_core::{CheckResult, Standing};

use crate::bridged::network_of;
use crate::prev_result;
use crate::run::Context;

impl Context<'_> {
    pub(crate) fn check(&self, allocator: &dyn Allocator) -> Result<()> {
        let (_, identity) = self.identify()?;
        // A virtual machine holds its address itself; which machine it is, only the Kubernetes API could say.
        let is_vms = self.may_be_vms(&identity);
        let check = Check {
            old_handle: identity.old_handle(),
            attachment: identity.attachment.clone(),
            addresses: prev_result::addresses(self.conf.prev_result.as_ref())?,
        };
        match allocator.check(&self.store, check)? {
            Checked::Unknown(why) => tracing::warn!(why, "what the container has was not compared"),
            Checked::Compared(mut comparison) => {
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
                Standing::Unmarked => tracing::info!(%ip, "the address is recorded without its interface"),
                Standing::Unknown => tracing::info!(%ip, "the address is in no pool, so nothing is recorded of it"),
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
        // Without an earlier result, CHECK can find only that no address is held.
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
