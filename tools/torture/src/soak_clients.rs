//! The clients of etcd's API in a long run of the daemon: they hold leases, renew them, let them end, and compact.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use etcd_client::{Client, LeaseGrantOptions, PutOptions};
use tokio::time::sleep;

/// The time to live of a lease, in seconds: the shortest that there is.
const TTL: i64 = 2;
/// A lease that is not renewed is gone after this at the latest: the daemon may hand the store over meanwhile.
const GONE: Duration = Duration::from_secs(15);
/// A renewed lease is renewed so often, and so many times.
const RENEW: Duration = Duration::from_millis(500);
const RENEWALS: u32 = 10;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Holds one lease after the other until `over`, and counts those that ended as they should.
///
/// # Errors
/// A key that went while its lease was renewed, or stayed when it was not; an error of the API.
pub(crate) async fn hold_leases(url: &str, number: usize, over: &AtomicBool, ended: &AtomicU64) -> Result<(), String> {
    let mut client = Client::connect([url], None).await.map_err(text)?;
    let key = format!("/soak/lease/{number}");
    while !over.load(Ordering::SeqCst) {
        let lease = client.lease_grant(TTL, None::<LeaseGrantOptions>).await.map_err(text)?.id();
        client.put(key.clone(), "held", Some(PutOptions::new().with_lease(lease))).await.map_err(text)?;
        let (mut keeper, mut answers) = client.lease_keep_alive(lease).await.map_err(text)?;
        for _ in 0..RENEWALS {
            let begun = Instant::now();
            keeper.keep_alive().await.map_err(text)?;
            let answer = answers.message().await.map_err(text)?.ok_or("the stream of renewals ended")?;
            if answer.ttl() != TTL {
                return Err(format!("a renewal of a lease came to {} s", answer.ttl()));
            }
            if client.get(key.clone(), None).await.map_err(text)?.kvs().is_empty() {
                return Err(format!("{key} is gone although its lease was renewed {:?} ago", begun.elapsed()));
            }
            sleep(RENEW).await;
        }
        let last = Instant::now();
        while !client.get(key.clone(), None).await.map_err(text)?.kvs().is_empty() {
            if last.elapsed() > GONE {
                return Err(format!("{key} is there {:?} after the last renewal of its lease", last.elapsed()));
            }
            sleep(Duration::from_millis(100)).await;
        }
        ended.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Compacts all but the newest revisions, as a client of the API does.
///
/// # Errors
/// An error of the API, but for a revision that another client has compacted.
pub(crate) async fn compact(url: &str, revision: i64) -> Result<(), String> {
    let mut client = Client::connect([url], None).await.map_err(text)?;
    match client.compact(revision, None).await {
        Err(error) if !error.to_string().contains("has been compacted") => Err(text(error)),
        _ => Ok(()),
    }
}
