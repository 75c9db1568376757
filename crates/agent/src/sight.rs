//! The evidence of this machine, for an ADD that finds no room.

use async_trait::async_trait;
use ipam_core::gc::{Evidence, Live};
use tokio::sync::oneshot;

/// This machine, scanned when its evidence is requested.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sight;

#[async_trait]
impl Live for Sight {
    async fn evidence(&self) -> Option<Evidence> {
        let (done, looked) = oneshot::channel();
        // Nobody may wait for namespaces on the thread that runs the store.
        let scanning = std::thread::Builder::new().name("sight".into()).spawn(move || done.send(host::scan()));
        if let Err(error) = scanning {
            tracing::warn!(%error, "no thread can be started, so nothing that earlier boots have left is freed");
            return None;
        }
        match looked.await {
            Ok(Ok(host::Sight { addresses: live, namespaces, within })) => {
                let (boot, up) = (host::short_boot(&host::boot_id()?)?, host::uptime()?);
                Some(Evidence { boot, up, live, namespaces, within })
            }
            Ok(Err(blind)) => {
                tracing::warn!(%blind, "nothing that earlier boots have left is freed");
                None
            }
            Err(_) => None,
        }
    }
}
