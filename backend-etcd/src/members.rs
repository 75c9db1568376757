//! The members of a cluster, and which of them is asked first.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use kv::{Error, ErrorKind, Operation, Result};
use tokio::time::{Instant, timeout_at};

use crate::address::{Address, TlsUse};
use crate::discovery::resolve;
use crate::endpoint::{Endpoint, Manner};
use crate::error::NAME;
use crate::options::{Discovery, Options};
use crate::tls::Tls;

/// The members of a cluster, as far as they are known.
pub(crate) struct Members {
    manner: Arc<Manner>,
    discovery: Option<(Discovery, TlsUse)>,
    known: RwLock<Arc<Known>>,
}

/// Members at one time.
pub(crate) struct Known {
    endpoints: Vec<Arc<Endpoint>>,
    /// Which one is asked first.
    preferred: AtomicUsize,
    /// How many failed one after another.
    failures: AtomicUsize,
}

impl fmt::Debug for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.known().endpoints.fmt(f)
    }
}

impl Members {
    /// # Errors
    /// The fault of the options.
    pub(crate) fn new(options: &Options) -> Result<Self> {
        let addresses = options.addresses()?;
        let needs_tls = options.discovery.is_some() || addresses.iter().any(Address::needs_tls);
        // Certificates that nobody needs are looked at all the same: somebody thinks that they are used.
        let tls = options.tls.clone().or_else(|| needs_tls.then(Tls::new));
        let manner = Arc::new(Manner::new(options, tls)?);
        let known = Known::new(addresses.into_iter().map(|address| Endpoint::new(address, manner.clone()).into()));
        let discovery = options.discovery.clone().map(|discovery| (discovery, options.tls_use()));
        Ok(Self { manner, discovery, known: RwLock::new(Arc::new(known)) })
    }

    fn known(&self) -> Arc<Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The members to ask. They are looked up if none are known yet or all of them were lost.
    ///
    /// # Errors
    /// Why none could be found.
    pub(crate) async fn current(&self, operation: Operation, deadline: Instant) -> Result<Arc<Known>> {
        let known = self.known();
        let Some((discovery, tls)) = self.discovery.as_ref().filter(|_| known.are_lost()) else { return Ok(known) };
        let late = || Error::new(ErrorKind::NotSent, operation, NAME).with_detail("no answer from DNS in time");
        let found = timeout_at(deadline, resolve(discovery, *tls)).await.unwrap_or_else(|_| Err(late()));
        match found {
            Ok(addresses) => Ok(self.replace(addresses)),
            Err(error) if known.endpoints.is_empty() => Err(error),
            Err(error) => {
                tracing::warn!(%error, "going on with the members that were found before");
                known.failures.store(0, Ordering::Relaxed);
                Ok(known)
            }
        }
    }

    /// These are the members now. Those that were known keep their connections.
    fn replace(&self, addresses: Vec<Address>) -> Arc<Known> {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        let endpoint = |address: Address| {
            let before = known.endpoints.iter().find(|endpoint| endpoint.address == address);
            before.cloned().unwrap_or_else(|| Endpoint::new(address, self.manner.clone()).into())
        };
        let found = Arc::new(Known::new(addresses.into_iter().map(endpoint)));
        *known = found.clone();
        found
    }
}

impl Known {
    fn new(endpoints: impl Iterator<Item = Arc<Endpoint>>) -> Self {
        Self { endpoints: endpoints.collect(), preferred: AtomicUsize::new(0), failures: AtomicUsize::new(0) }
    }

    fn are_lost(&self) -> bool {
        self.failures.load(Ordering::Relaxed) >= self.endpoints.len()
    }

    pub(crate) fn count(&self) -> usize {
        self.endpoints.len()
    }

    /// Which one is asked first.
    pub(crate) fn first(&self) -> usize {
        self.preferred.load(Ordering::Relaxed)
    }

    /// The member at this place; places begin anew after the last one.
    pub(crate) fn get(&self, place: usize) -> Option<&Arc<Endpoint>> {
        self.endpoints.get(place % self.endpoints.len().max(1))
    }

    /// This one has answered, so it is asked first.
    pub(crate) fn prefer(&self, place: usize) {
        self.failures.store(0, Ordering::Relaxed);
        self.preferred.store(place % self.endpoints.len().max(1), Ordering::Relaxed);
    }

    /// This one has failed: the next call asks somebody else first.
    pub(crate) fn avoid(&self, place: usize) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        let (place, next) = (place % self.endpoints.len().max(1), (place + 1) % self.endpoints.len().max(1));
        // If that was changed meanwhile, somebody else knows better.
        let _ = self.preferred.compare_exchange(place, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}
