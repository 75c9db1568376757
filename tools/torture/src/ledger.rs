//! Collects the reports of the workers and compares them with the revisions of the store. Each worker reports to a
//! [`Witness`] before and after each of its operations.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum number of lines of history that the ledger keeps for each address.
const REMEMBERED: usize = 24;

/// Whether a store event gives an address to a container or takes the address away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The address, and the container that holds it from the event's revision on.
    Given(IpAddr, String),
    /// The address, and the container that no longer holds it from the event's revision on.
    Taken(IpAddr, String),
}

/// The stage of a container's life that its worker has reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Adding,
    Held,
    /// The worker has sent a DEL of the container. The field contains the newest revision that the worker had seen when
    /// it sent the DEL.
    Deleting(i64),
}

#[derive(Debug, Default)]
struct Container {
    stage: Stage,
    acknowledged: BTreeSet<IpAddr>,
    given: BTreeSet<IpAddr>,
    /// Addresses that were released before the worker reported a DEL, with the revision of each release.
    taken_early: Vec<(IpAddr, i64)>,
}

#[derive(Debug, Default)]
struct Books {
    containers: HashMap<String, Container>,
    /// Containers whose DEL is visible in a revision that was checked.
    gone: HashSet<String>,
    /// For each address, the container whose ADD returned the address last.
    holders: HashMap<IpAddr, String>,
    /// Containers whose DEL was acknowledged, each with the revision at which the store must show the release.
    leaving: VecDeque<(i64, String)>,
    history: HashMap<IpAddr, VecDeque<String>>,
    counts: BTreeMap<String, u64>,
    slowest_call: Duration,
    violation: Option<String>,
}

/// Compares the reports of the workers with the revisions of the store. The ledger records only the first violation.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    books: Mutex<Books>,
}

impl Books {
    fn violate(&mut self, what: String, about: &[IpAddr]) {
        if self.violation.is_some() {
            return;
        }
        let mut text = what;
        for ip in about {
            text.push_str(&format!("\n  history of {ip}:"));
            for line in self.history.get(ip).into_iter().flatten() {
                text.push_str(&format!("\n    {line}"));
            }
        }
        self.violation = Some(text);
    }

    fn note(&mut self, ip: IpAddr, line: String) {
        let lines = self.history.entry(ip).or_default();
        if lines.len() == REMEMBERED {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    fn given(&mut self, ip: IpAddr, container: &str, revision: i64) {
        self.note(ip, format!("revision {revision}: given to {container}"));
        if self.gone.contains(container) {
            self.violate(format!("revision {revision}: {ip} was given to {container}, which is gone"), &[ip]);
            return;
        }
        // The ledger may follow the revision of an ADD before it has read the worker's line about this ADD.
        self.containers.entry(container.to_owned()).or_default().given.insert(ip);
    }

    fn taken(&mut self, ip: IpAddr, container: &str, revision: i64) {
        self.note(ip, format!("revision {revision}: taken from {container}"));
        let Some(known) = self.containers.get_mut(container) else { return };
        match known.stage {
            Stage::Deleting(since) if revision > since => {}
            Stage::Deleting(since) => self.lost(ip, container, revision, since),
            Stage::Adding | Stage::Held => known.taken_early.push((ip, revision)),
        }
    }

    fn lost(&mut self, ip: IpAddr, container: &str, revision: i64, since: i64) {
        let what = format!("revision {revision}: {container} lost {ip}, and its DEL began only at revision {since}");
        self.violate(what, &[ip]);
    }
}

impl Ledger {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn violation(&self) -> Option<String> {
        self.books().violation.clone()
    }

    /// Records a contradiction between documents, with the history of the addresses of all containers involved.
    pub(crate) fn violated(&self, what: String, batch: &kv::Batch) {
        let mut books = self.books();
        let named = |name: &String| {
            let handle = format!("/handle/net.{name}");
            batch.events.iter().any(|event| event.kv.key.to_string().ends_with(&handle))
        };
        let containers = books.containers.iter().filter(|(name, _)| named(name));
        let about: BTreeSet<IpAddr> =
            containers.flat_map(|(_, known)| known.given.union(&known.acknowledged).copied()).collect();
        books.violate(what, &about.into_iter().collect::<Vec<_>>());
    }

    /// Returns the number of events of each kind, by the kind's name.
    pub(crate) fn counts(&self) -> BTreeMap<String, u64> {
        self.books().counts.clone()
    }

    /// Returns the duration of the slowest call.
    pub(crate) fn slowest_call(&self) -> Duration {
        self.books().slowest_call
    }

    pub(crate) fn operations(&self) -> u64 {
        self.books().counts.get("operation").copied().unwrap_or(0)
    }

    pub(crate) fn count(&self, what: &str, by: u64) {
        *self.books().counts.entry(what.to_owned()).or_default() += by;
    }

    /// Lists the containers whose names start with `prefix` and whose DEL was not acknowledged.
    pub(crate) fn left_by(&self, prefix: &str) -> Vec<String> {
        let books = self.books();
        let leaving: BTreeSet<&String> = books.leaving.iter().map(|(_, name)| name).collect();
        let mut left: Vec<String> = books
            .containers
            .keys()
            .filter(|name| name.starts_with(prefix) && !leaving.contains(name))
            .cloned()
            .collect();
        left.sort();
        left
    }

    /// Records the changes of one revision of the store. Once a container's acknowledged DEL must be visible, checks
    /// that the container holds no address and removes it from the ledger. The closure `held` returns the addresses
    /// that a container holds at revision `revision`.
    pub(crate) fn follow(&self, revision: i64, changes: Vec<Change>, held: impl Fn(&str) -> Vec<IpAddr>) {
        let mut books = self.books();
        for change in changes {
            match change {
                Change::Given(ip, container) => books.given(ip, &container, revision),
                Change::Taken(ip, container) => books.taken(ip, &container, revision),
            }
        }
        while books.leaving.front().is_some_and(|(bound, _)| *bound <= revision) {
            let Some((bound, name)) = books.leaving.pop_front() else { break };
            let Some(gone) = books.containers.remove(&name) else { continue };
            let left = held(&name);
            books.gone.insert(name.clone());
            if !left.is_empty() {
                books.violate(format!("revision {bound}: {name} holds {left:?} after its DEL"), &left);
            }
            let never: Vec<IpAddr> = gone.acknowledged.difference(&gone.given).copied().collect();
            if !never.is_empty() {
                books.violate(format!("revision {bound}: {name} was told {never:?}, which no revision shows"), &never);
            }
        }
    }

    /// Records a violation if no revision has shown the DEL of a container that was deleted.
    pub(crate) fn close(&self) {
        let mut books = self.books();
        let mut open: Vec<String> = books.containers.keys().cloned().collect();
        open.sort();
        if !open.is_empty() {
            books.violate(format!("no revision shows the DEL of {open:?}"), &[]);
        }
    }
}

impl Witness for Ledger {
    fn adding(&self, container: &str, _node: &str) {
        self.books().containers.entry(container.to_owned()).or_default();
    }

    fn added(&self, container: &str, addresses: &[IpAddr], revision: i64) {
        let mut books = self.books();
        for ip in addresses {
            books.note(*ip, format!("at revision {revision} or before: {container} was told it"));
            let other = books.holders.insert(*ip, container.to_owned()).filter(|other| other != container);
            if let Some(other) = other {
                books.violate(format!("{container} was told {ip}, which {other} was told too"), &[*ip]);
            }
        }
        if let Some(known) = books.containers.get_mut(container) {
            known.stage = Stage::Held;
            known.acknowledged.extend(addresses);
        }
    }

    fn deleting(&self, container: &str, revision: i64) {
        let mut books = self.books();
        let Some(known) = books.containers.get_mut(container) else { return };
        if matches!(known.stage, Stage::Deleting(_)) {
            return;
        }
        known.stage = Stage::Deleting(revision);
        let early: Vec<(IpAddr, i64)> = known.taken_early.iter().copied().filter(|(_, at)| *at <= revision).collect();
        let addresses: Vec<IpAddr> = known.acknowledged.iter().copied().collect();
        for (ip, at) in early {
            books.lost(ip, container, at, revision);
        }
        for ip in addresses {
            books.note(ip, format!("at revision {revision} or before: DEL of {container} begins"));
            if books.holders.get(&ip).is_some_and(|holder| holder == container) {
                books.holders.remove(&ip);
            }
        }
    }

    fn deleted(&self, container: &str, revision: i64) {
        self.books().leaving.push_back((revision, container.to_owned()));
    }

    fn counted(&self, what: &'static str) {
        self.count(what, 1);
    }

    fn took(&self, duration: Duration) {
        let mut books = self.books();
        books.slowest_call = books.slowest_call.max(duration);
    }

    fn failed(&self, what: String) {
        self.books().violate(what, &[]);
    }
}

/// Receives a worker's reports about its operations. The parameter `revision` is the newest revision that the worker
/// has seen.
pub(crate) trait Witness: Send + Sync {
    /// Reports that the worker is about to send an ADD.
    fn adding(&self, container: &str, node: &str);
    /// Reports that an ADD was acknowledged with these addresses.
    fn added(&self, container: &str, addresses: &[IpAddr], revision: i64);
    /// Reports that the worker is about to send a DEL.
    fn deleting(&self, container: &str, revision: i64);
    /// Reports that a DEL was acknowledged.
    fn deleted(&self, container: &str, revision: i64);
    /// Reports the outcome of an operation that has ended.
    fn counted(&self, what: &'static str);
    /// Reports the duration of a call of the allocator.
    fn took(&self, duration: Duration);
    /// Reports a violation that the worker itself has found.
    fn failed(&self, what: String);
}

#[cfg(test)]
mod tests {
    use super::*;

    const C: &str = "c";

    fn ip() -> IpAddr {
        "10.0.0.1".parse().unwrap()
    }

    fn nothing(_: &str) -> Vec<IpAddr> {
        Vec::new()
    }

    /// A ledger with one container, which has held an address since revision 5.
    fn held() -> Ledger {
        let ledger = Ledger::default();
        ledger.adding(C, "n");
        ledger.follow(5, vec![Change::Given(ip(), C.into())], nothing);
        ledger.added(C, &[ip()], 5);
        ledger
    }

    fn violation(ledger: &Ledger) -> String {
        ledger.violation().expect("a violation")
    }

    #[test]
    fn ledger_accepts_life_without_trouble() {
        let ledger = held();
        ledger.deleting(C, 6);
        ledger.deleted(C, 7);
        ledger.follow(7, vec![Change::Taken(ip(), C.into())], nothing);
        ledger.close();
        assert_eq!(ledger.violation(), None);
    }

    #[test]
    fn ledger_accepts_what_is_told_later_than_seen() {
        let ledger = held();
        ledger.follow(7, vec![Change::Taken(ip(), C.into())], nothing);
        ledger.deleting(C, 6);
        ledger.deleted(C, 7);
        ledger.follow(8, Vec::new(), nothing);
        ledger.close();
        assert_eq!(ledger.violation(), None);
    }

    #[test]
    fn ledger_accepts_container_seen_before_told() {
        let ledger = Ledger::default();
        ledger.follow(5, vec![Change::Given(ip(), C.into())], nothing);
        ledger.follow(6, vec![Change::Taken(ip(), C.into())], nothing);
        ledger.adding(C, "n");
        ledger.added(C, &[ip()], 5);
        ledger.deleting(C, 5);
        ledger.deleted(C, 6);
        ledger.follow(7, Vec::new(), nothing);
        ledger.close();
        assert_eq!(ledger.violation(), None);
        ledger.follow(8, vec![Change::Given(ip(), "never".into())], nothing);
        ledger.close();
        assert!(violation(&ledger).contains("no revision shows the DEL of [\"never\"]"));
    }

    #[test]
    fn ledger_finds_address_lost_before_its_del() {
        let ledger = held();
        ledger.follow(6, vec![Change::Taken(ip(), C.into())], nothing);
        ledger.deleting(C, 6);
        let said = violation(&ledger);
        assert!(said.starts_with("revision 6: c lost 10.0.0.1") && said.contains("history of 10.0.0.1"), "{said}");
        assert!(said.contains("revision 5: given to c"), "{said}");
    }

    #[test]
    fn ledger_finds_address_told_to_two() {
        let ledger = held();
        ledger.adding("d", "n");
        ledger.added("d", &[ip()], 9);
        assert!(violation(&ledger).starts_with("d was told 10.0.0.1, which c was told too"));
    }

    #[test]
    fn ledger_finds_address_that_no_revision_shows() {
        let ledger = Ledger::default();
        ledger.adding(C, "n");
        ledger.added(C, &[ip()], 5);
        ledger.deleting(C, 5);
        ledger.deleted(C, 6);
        ledger.follow(6, Vec::new(), nothing);
        assert!(violation(&ledger).contains("which no revision shows"));
    }

    #[test]
    fn ledger_finds_what_is_left_or_comes_after_del() {
        let ledger = held();
        ledger.deleting(C, 6);
        ledger.deleted(C, 7);
        ledger.follow(7, Vec::new(), |_| vec![ip()]);
        assert!(violation(&ledger).contains("c holds [10.0.0.1] after its DEL"));
        let ledger = held();
        ledger.deleting(C, 6);
        ledger.deleted(C, 7);
        ledger.follow(7, vec![Change::Taken(ip(), C.into())], nothing);
        ledger.follow(9, vec![Change::Given(ip(), C.into())], nothing);
        assert!(violation(&ledger).starts_with("revision 9: 10.0.0.1 was given to c, which is gone"));
    }
}
