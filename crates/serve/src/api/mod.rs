//! etcd's API in front of the daemon's store, for programs that are not ours: etcdctl, calicoctl, Felix, locks in any language.

mod address;
mod authority;
mod backing;
mod connections;
mod options;
mod tls;

use std::fmt;
use std::sync::Arc;

use datastore::Location;
use etcd_api::Api;
use tokio::task::JoinSet;

use crate::daemon::Daemon;

use address::Address;
pub(crate) use backing::Served;
use connections::Offer;
pub use options::Options;
use tls::{Files, Tls};

/// Why the API is not offered.
#[derive(Debug)]
pub struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Refused {
    fn at(url: &str, why: impl fmt::Display) -> Self {
        Self(format!("cannot listen at {url}: {why}"))
    }
}

/// Listens at all URLs. Returns the part about them of the line with which the daemon starts.
///
/// # Errors
/// The URL that cannot be had, and what to change.
pub(crate) async fn offer(
    daemon: &Arc<Daemon>,
    location: &Location,
    options: &Options,
    tasks: &mut JoinSet<()>,
) -> Result<String, Refused> {
    let Some(first) = options.listen.first() else { return Ok(String::new()) };
    if location.path().is_none() {
        let local = location.drivers().local_names("", "");
        let why =
            &format!("the store is an etcd already, or gone with its process; --listen is for a store on {local}");
        return Err(Refused::at(first, why));
    }
    let mut tls = None;
    let (mut offers, mut urls) = (Vec::new(), Vec::new());
    for url in &options.listen {
        let address = Address::parse(url).map_err(|why| Refused::at(url, why))?;
        address.check(options).map_err(|why| Refused::at(url, why))?;
        let tls = match (&address, &tls) {
            (Address::Tcp { tls: true, .. }, Some(loaded)) => Some(Arc::clone(loaded)),
            (Address::Tcp { tls: true, .. }, None) => {
                let files = Files::of(options).ok_or_else(|| Refused::at(url, address::TLS))?;
                let loaded = Arc::new(Tls::load(files).map_err(|why| Refused::at(url, why))?);
                tls = Some(Arc::clone(&loaded));
                Some(loaded)
            }
            _ => None,
        };
        let offer = Offer::bind(&address, tls).await.map_err(|why| Refused::at(url, why))?;
        urls.push(offer.url().to_owned());
        offers.push(offer);
    }
    let said = format!(", with etcd's API at {}", urls.join(" and "));
    let advertised = if options.advertise.is_empty() { urls } else { options.advertise.clone() };
    let mut api = Api::new(Arc::new(Served::new(daemon.held.clone(), advertised)));
    if let Some(interval) = options.watch_progress_interval {
        api = api.with_report_interval(interval);
    }
    let connections = connections::connections(offers, tasks);
    let leases = api.clone();
    tasks.spawn(async move { leases.end_leases().await });
    tasks.spawn(async move {
        if let Err(error) = api.server().serve_with_incoming(connections).await {
            tracing::error!(%error, "etcd's API is not offered any more");
        }
    });
    Ok(said)
}
