//! Implements sticky addresses, which a named workload keeps when it is restarted or recreated.
//!
//! While a workload holds a sticky address, the address's entry in the block records the workload's name and how long
//! the address will wait for the workload after a release. Releasing a sticky address removes the handle from the
//! block's entry, and records the end of the wait. Calico ignores a block's entry without a handle, so Calico neither
//! assigns nor garbage-collects the address. The next assignment to a workload with the same name assigns the waiting
//! address again. An address whose wait is over is assigned to other workloads only when no other address is free.
//!
//! For each workload, a record lists the workload's sticky addresses ([`StickyRecord`](crate::model::StickyRecord)). A
//! workload's record is written only when its list of addresses changes, and not when a sticky address is released or
//! assigned again.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::attachment::{INTERFACE, NETWORK};
use crate::model::Attribute;
use crate::timestamps::{parse_rfc3339, rfc3339};

/// The allocation attribute that names the workload that keeps the address.
pub const STICKY: &str = "margay.io/sticky";
/// The allocation attribute that records how long the address waits for its workload after a release: a number of
/// seconds, [`FOREVER`] or [`PINNED`].
pub const STICKY_FOR: &str = "margay.io/sticky-for";
/// The allocation attribute that records when an address stops waiting for its workload: a time as RFC 3339, or
/// [`FOREVER`].
pub const STICKY_UNTIL: &str = "margay.io/sticky-until";
/// The value of [`STICKY_FOR`] and [`STICKY_UNTIL`] for an address whose wait never ends.
pub const FOREVER: &str = "forever";
/// The value of [`STICKY_FOR`] for an address that an operator has pinned. A pinned address waits for its workload for
/// ever, regardless of the network's configuration.
pub const PINNED: &str = "pinned";

/// Maximum length of a workload's name, in bytes. A pod's namespace and name together have at most 317 bytes.
pub const MAX_NAME_BYTES: usize = 512;
/// Maximum configurable time that an address waits for its workload: a hundred years.
pub const MAX_WAIT: Duration = Duration::from_secs(36_500 * 24 * 60 * 60);

/// A workload that keeps its addresses over restarts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sticky {
    /// The workload's name, for example `default/web-0`.
    pub name: String,
    /// How long a released address waits for the workload; `None` if the wait never ends.
    pub wait: Option<Duration>,
}

impl Sticky {
    /// Returns the attributes that mark an allocation as kept by the workload.
    pub(crate) fn attributes(&self) -> [(String, String); 2] {
        let wait = self.wait.map_or(FOREVER.to_owned(), |wait| wait.as_secs().to_string());
        [(STICKY.to_owned(), self.name.clone()), (STICKY_FOR.to_owned(), wait)]
    }

    /// Checks the name of a workload.
    ///
    /// # Errors
    /// Returns a message that states the rule for workload names.
    pub fn check_name(name: &str) -> Result<(), String> {
        if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
            return Err(format!("a workload's name has 1 to {MAX_NAME_BYTES} bytes and no control characters"));
        }
        Ok(())
    }
}

/// When a sticky address stops waiting for its workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitEnd {
    /// The sticky address stops waiting at the given time.
    At(OffsetDateTime),
    /// The sticky address waits for its workload for ever.
    Forever,
}

impl WaitEnd {
    /// Returns the end of a wait as the value of the attribute [`STICKY_UNTIL`].
    pub fn text(self) -> String {
        match self {
            Self::At(at) => rfc3339(at),
            Self::Forever => FOREVER.to_owned(),
        }
    }
}

/// Returns when an address stops waiting for its workload; `None` if the address does not wait for a workload, and
/// [`WaitEnd::Forever`] if the recorded time cannot be parsed.
pub fn waits_until(entry: &Attribute) -> Option<WaitEnd> {
    if entry.handle().is_some_and(|handle| !handle.is_empty()) || entry.get(STICKY).is_none() {
        return None;
    }
    entry.get(STICKY_UNTIL).map(|text| parse_rfc3339(text).map_or(WaitEnd::Forever, WaitEnd::At))
}

/// Maximum time by which another machine's clock may be ahead of the local clock. A recorded end of a wait is corrected
/// if it is later than the end of a wait that starts now, by more than [`MAX_CLOCK_LEAD`].
const MAX_CLOCK_LEAD: time::Duration = time::Duration::MINUTE;

/// Returns the corrected end of a sticky address's wait if the clock of the machine that recorded the end was ahead.
/// The corrected end is the end of a wait that starts at `now`. Returns `None` if the recorded end of the wait needs no
/// correction.
pub(crate) fn end_of_wait(entry: &Attribute, now: OffsetDateTime, cooldown_seconds: i64) -> Option<OffsetDateTime> {
    if entry.handle_id().is_some() {
        return None;
    }
    let WaitEnd::At(recorded) = waits_until(entry)? else { return None };
    let WaitEnd::At(latest) = until_after(now, entry.get(STICKY_FOR)?, cooldown_seconds) else { return None };
    (recorded - latest > MAX_CLOCK_LEAD).then_some(latest)
}

/// Returns the end of a wait that starts now and lasts at least as long as the cooldown.
fn until_after(now: OffsetDateTime, wait: &str, cooldown_seconds: i64) -> WaitEnd {
    let seconds = wait.parse::<i64>().ok().map(|seconds| seconds.max(cooldown_seconds));
    seconds.and_then(|seconds| now.checked_add(time::Duration::seconds(seconds))).map_or(WaitEnd::Forever, WaitEnd::At)
}

/// True if an operator has pinned the address, even if the address is in use.
pub fn is_pinned(entry: &Attribute) -> bool {
    entry.get(STICKY_FOR) == Some(PINNED)
}

/// Returns the time at which a sticky address's wait has ended; `None` if the address still waits or does not wait for
/// a workload.
pub(crate) fn overdue(entry: &Attribute, now: OffsetDateTime) -> Option<OffsetDateTime> {
    match waits_until(entry)? {
        WaitEnd::At(at) => (at < now).then_some(at),
        WaitEnd::Forever => None,
    }
}

/// Returns the block entry of a sticky address after a release at the time `now`. The wait lasts at least as long as
/// the cooldown. Returns `None` for an address that no workload keeps.
pub(crate) fn waiting(entry: &Attribute, now: OffsetDateTime, cooldown_seconds: i64) -> Option<Attribute> {
    let (name, wait) = (entry.get(STICKY)?, entry.get(STICKY_FOR)?);
    let until = until_after(now, wait, cooldown_seconds);
    let more = [(STICKY_FOR, Some(wait)), (NETWORK, entry.network()), (INTERFACE, entry.get(INTERFACE))];
    Some(waiting_for(name, until, more))
}

/// Returns the block entry of an address that is pinned to a workload and waits for it. If `network` is `None`, the
/// workload can use the address in any network; if `interface` is `None`, on any interface.
pub fn pinned_to(name: &str, network: Option<&str>, interface: Option<&str>) -> Attribute {
    waiting_for(name, WaitEnd::Forever, [(STICKY_FOR, Some(PINNED)), (NETWORK, network), (INTERFACE, interface)])
}

fn waiting_for<const N: usize>(name: &str, until: WaitEnd, more: [(&str, Option<&str>); N]) -> Attribute {
    let until = until.text();
    let own = [(STICKY, Some(name)), (STICKY_UNTIL, Some(until.as_str()))];
    let text = |(name, value): (&str, Option<&str>)| Some((name.to_owned(), value?.to_owned()));
    Attribute::new(None, own.into_iter().chain(more).filter_map(text).collect())
}
