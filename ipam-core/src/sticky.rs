//! Implements sticky addresses: a named workload keeps its address when it is restarted or recreated.
//!
//! While a workload holds its address, the address's entry in the block records the workload's name and the length of
//! the wait. A release then leaves the address in its block without a handle, and records the end of the wait. Calico
//! ignores an entry without a handle: Calico neither assigns nor collects the address. An assignment to a workload of
//! the same name assigns the waiting address again. An address whose wait is over is assigned to other workloads only
//! when no other address is free.
//!
//! A record under the workload's name lists the workload's addresses ([`StickyRecord`](crate::model::StickyRecord)).
//! The record is written only when this list changes. Releasing and reassigning a kept address therefore does not write
//! the record.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::attachment::{INTERFACE, NETWORK};
use crate::model::Attribute;
use crate::timestamps::{parse_rfc3339, rfc3339};

/// The allocation attribute with the name of the workload that keeps the address.
pub const STICKY: &str = "margay.io/sticky";
/// The allocation attribute with the time in seconds that an address waits for its workload after a release, or
/// [`FOREVER`] or [`PINNED`].
pub const STICKY_FOR: &str = "margay.io/sticky-for";
/// The allocation attribute with the end of a waiting address's wait as RFC 3339, or [`FOREVER`].
pub const STICKY_UNTIL: &str = "margay.io/sticky-until";
/// The attribute value for an address that is never assigned to another workload.
pub const FOREVER: &str = "forever";
/// The value of [`STICKY_FOR`] for an address that an operator has pinned. A pinned address waits for ever, regardless
/// of the network's configuration.
pub const PINNED: &str = "pinned";

/// Maximum length of a workload's name, in bytes. A pod's namespace and name together have at most 317 bytes.
pub const MAX_NAME_BYTES: usize = 512;
/// Maximum time that an address waits for its workload: a hundred years.
pub const MAX_WAIT: Duration = Duration::from_secs(36_500 * 24 * 60 * 60);

/// A workload that keeps its addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sticky {
    /// The workload's name, for example `default/web-0`.
    pub name: String,
    /// How long a released address waits for the workload, or `None` for ever.
    pub wait: Option<Duration>,
}

impl Sticky {
    /// Returns the attributes of an address that the workload keeps.
    pub(crate) fn attributes(&self) -> [(String, String); 2] {
        let wait = self.wait.map_or(FOREVER.to_owned(), |wait| wait.as_secs().to_string());
        [(STICKY.to_owned(), self.name.clone()), (STICKY_FOR.to_owned(), wait)]
    }

    /// Checks the name of a workload.
    ///
    /// # Errors
    /// A message that states the rule for names.
    pub fn check_name(name: &str) -> Result<(), String> {
        if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
            return Err(format!("a workload's name has 1 to {MAX_NAME_BYTES} bytes and no control characters"));
        }
        Ok(())
    }
}

/// The end of an address's wait for its workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitEnd {
    /// The address waits until this time.
    At(OffsetDateTime),
    /// The address waits for ever.
    Forever,
}

impl WaitEnd {
    /// Returns the end of the wait as the value of [`STICKY_UNTIL`].
    pub fn text(self) -> String {
        match self {
            Self::At(at) => rfc3339(at),
            Self::Forever => FOREVER.to_owned(),
        }
    }
}

/// Returns the end of the wait of an address that waits for its workload, or `None` if the address does not wait. If
/// the recorded time is unreadable, the wait never ends.
pub fn waits_until(entry: &Attribute) -> Option<WaitEnd> {
    if entry.handle().is_some_and(|handle| !handle.is_empty()) || entry.get(STICKY).is_none() {
        return None;
    }
    entry.get(STICKY_UNTIL).map(|text| parse_rfc3339(text).map_or(WaitEnd::Forever, WaitEnd::At))
}

/// How far another machine's clock may be ahead of the local clock before the end of a wait that the other machine
/// recorded is corrected.
const MAX_CLOCK_LEAD: time::Duration = time::Duration::MINUTE;

/// Returns the corrected end of a wait that was recorded too late because a clock was far ahead. The corrected end is
/// computed as if the address were released now. Returns `None` if the recorded end is plausible.
pub(crate) fn end_of_wait(entry: &Attribute, now: OffsetDateTime, cooldown_seconds: i64) -> Option<OffsetDateTime> {
    if entry.handle_id().is_some() {
        return None;
    }
    let WaitEnd::At(recorded) = waits_until(entry)? else { return None };
    let WaitEnd::At(latest) = until_after(now, entry.get(STICKY_FOR)?, cooldown_seconds) else { return None };
    (recorded - latest > MAX_CLOCK_LEAD).then_some(latest)
}

/// Returns the end of a wait that starts now. The wait does not end before the cooldown ends.
fn until_after(now: OffsetDateTime, wait: &str, cooldown_seconds: i64) -> WaitEnd {
    let seconds = wait.parse::<i64>().ok().map(|seconds| seconds.max(cooldown_seconds));
    seconds.and_then(|seconds| now.checked_add(time::Duration::seconds(seconds))).map_or(WaitEnd::Forever, WaitEnd::At)
}

/// True if an operator has pinned the address, whether the address is in use or waits.
pub fn is_pinned(entry: &Attribute) -> bool {
    entry.get(STICKY_FOR) == Some(PINNED)
}

/// Returns the end of the address's wait, if the wait is over.
pub(crate) fn overdue(entry: &Attribute, now: OffsetDateTime) -> Option<OffsetDateTime> {
    match waits_until(entry)? {
        WaitEnd::At(at) => (at < now).then_some(at),
        WaitEnd::Forever => None,
    }
}

/// Returns the entry that a kept address has after it is released now. The address waits at least until the cooldown is
/// over. Returns `None` for an address that no workload keeps.
pub(crate) fn waiting(entry: &Attribute, now: OffsetDateTime, cooldown_seconds: i64) -> Option<Attribute> {
    let (name, wait) = (entry.get(STICKY)?, entry.get(STICKY_FOR)?);
    let until = until_after(now, wait, cooldown_seconds);
    let more = [(STICKY_FOR, Some(wait)), (NETWORK, entry.network()), (INTERFACE, entry.get(INTERFACE))];
    Some(waiting_for(name, until, more))
}

/// Returns the entry of an address that is pinned to a workload and waits for it. The address waits for any network if
/// `network` is `None`, and for any interface if `interface` is `None`.
pub fn pinned_to(name: &str, network: Option<&str>, interface: Option<&str>) -> Attribute {
    waiting_for(name, WaitEnd::Forever, [(STICKY_FOR, Some(PINNED)), (NETWORK, network), (INTERFACE, interface)])
}

fn waiting_for<const N: usize>(name: &str, until: WaitEnd, more: [(&str, Option<&str>); N]) -> Attribute {
    let until = until.text();
    let own = [(STICKY, Some(name)), (STICKY_UNTIL, Some(until.as_str()))];
    let text = |(name, value): (&str, Option<&str>)| Some((name.to_owned(), value?.to_owned()));
    Attribute::new(None, own.into_iter().chain(more).filter_map(text).collect())
}
