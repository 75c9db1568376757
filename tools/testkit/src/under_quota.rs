//! Kills plugin calls at random moments while a namespace has used up its quota, on embedded stores and on etcd.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use datastore::Create;
use futures::StreamExt;
use ipam_core::model::{Attribute, Block, Document, QuotaCount, QuotaKind, QuotaSubject, Quotas, keys};
use kv::{EventKind, Range, Revision, StoreExt, WatchRequest};
use serde_json::Value;

use crate::lab::Lab;
use crate::process::{Call, Outcome};
use crate::random::{Random, setting};

const ROUNDS: u64 = 10;
const CALLERS: u64 = 6;

/// The namespace whose addresses are limited by the quota.
pub fn shop() -> QuotaSubject {
    QuotaSubject::new(QuotaKind::Namespace, "shop")
}

/// Sets a quota directly in the store, without the command `margay`.
pub fn limit(lab: &Lab, subject: &QuotaSubject, limit: u64) {
    lab.with_ipam(Create::Never, async |ipam, _| {
        let mut quotas = Quotas::default();
        quotas.set(subject, Some(limit));
        ipam.store().put(keys::quotas(), quotas.encode().unwrap()).await.unwrap();
    });
}

/// Returns a plugin call for a pod in the namespace with the quota.
pub fn of_shop(verb: &str, container: &str, conf: &Value) -> Call {
    let pod = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={container}");
    Call::new(verb, container, conf).with("CNI_ARGS", &pod)
}

/// True if the quota made the plugin call fail. Panics if the plugin call failed for a reason other than the quota.
#[track_caller]
pub fn is_refused(outcome: &Outcome) -> bool {
    if outcome.exit == 0 {
        return false;
    }
    let refusal = outcome.refusal();
    assert!(refusal.text.contains("the quota of namespace shop is used up"), "{outcome:?}");
    true
}

fn held(block: &Block) -> u64 {
    let is_its = |entry: &Attribute| entry.released_at().is_none() && entry.namespace() == Some("shop");
    block.allocated().filter(|(_, entry)| is_its(entry)).count() as u64
}

/// Returns the largest number of addresses that the namespace had at any revision from `since` on. Fails if the
/// namespace has more addresses at a revision than its counter says.
fn most_at_once(lab: &Lab, since: Revision) -> u64 {
    lab.with_ipam(Create::Never, async |ipam, _| {
        let end = ipam.store().list(Range::All).await.unwrap().revision;
        let mut changes = ipam.store().watch(WatchRequest::new(Range::All, since.next())).await.unwrap();
        let (mut blocks, mut counted, mut revision, mut most) = (BTreeMap::new(), 0, since, 0);
        while revision < end {
            let batch = changes.next().await.unwrap().unwrap();
            revision = batch.revision;
            for event in batch.events {
                let key = event.kv.key.clone();
                if key == keys::quota_use(QuotaKind::Namespace, "shop") {
                    counted = serde_json::from_slice::<QuotaCount>(event.kv.value.as_bytes()).unwrap().used;
                } else if keys::parse_block(&key).is_some() {
                    let number = match event.kind {
                        EventKind::Put => held(&Block::decode(&key, event.kv.value.as_bytes()).unwrap()),
                        EventKind::Delete => 0,
                    };
                    blocks.insert(key, number);
                }
            }
            let now = blocks.values().sum();
            assert!(now <= counted, "revision {revision}: {now} held, {counted} counted");
            most = most.max(now);
        }
        most
    })
}

fn revision(lab: &Lab) -> Revision {
    lab.with_ipam(Create::Never, async |ipam, _| ipam.store().list(Range::All).await.unwrap().revision)
}

/// Runs a plugin call to completion, or kills it at a random moment. Returns `None` after a kill, because the outcome
/// of the call is unknown.
fn perhaps_killed(call: &Call, random: &mut Random) -> Option<Outcome> {
    if !random.once_in(2) {
        return Some(call.run());
    }
    let mut child = call.start(call.command());
    thread::sleep(Duration::from_micros(random.below(60_000)));
    child.kill().unwrap();
    child.wait().unwrap();
    None
}

/// Adds and deletes containers in a namespace with a quota, and kills half of the calls. The namespace must never have
/// more addresses than its quota allows, and none of the quota may be used in the end.
pub fn kills_leave_the_quota_exact(lab: &Lab, conf: &Value) {
    const LIMIT: u64 = 3;
    limit(lab, &shop(), LIMIT);
    let since = revision(lab);
    let seed = setting("MARGAY_CRASH_SEED", 20_261_126);
    println!("MARGAY_CRASH_SEED={seed}");
    let refused: u64 = thread::scope(|scope| {
        let caller = |caller: u64| {
            let mut random = Random::new(seed, caller);
            let mut refused = 0;
            for round in 0..ROUNDS {
                let container = format!("c{caller}-{round}");
                let added = perhaps_killed(&of_shop("ADD", &container, conf), &mut random);
                refused += u64::from(added.as_ref().is_some_and(is_refused));
                if let Some(deleted) = perhaps_killed(&of_shop("DEL", &container, conf), &mut random) {
                    assert_eq!(deleted.exit, 0, "{deleted:?}");
                }
            }
            refused
        };
        let callers: Vec<_> = (0..CALLERS).map(|number| scope.spawn(move || caller(number))).collect();
        callers.into_iter().map(|caller| caller.join().unwrap()).sum()
    });
    let most = most_at_once(lab, since);
    println!("{refused} were refused, and {most} had an address at once");
    assert!(most <= LIMIT);
    for caller in 0..CALLERS {
        for round in 0..ROUNDS {
            of_shop("DEL", &format!("c{caller}-{round}"), conf).ok();
        }
    }
    for number in 0..LIMIT {
        of_shop("ADD", &format!("last{number}"), conf).ok();
    }
    assert!(is_refused(&of_shop("ADD", "more", conf).run()));
    of_shop("DEL", "last0", conf).ok();
    of_shop("ADD", "more", conf).ok();
    assert_eq!(most_at_once(lab, since), LIMIT);
}
