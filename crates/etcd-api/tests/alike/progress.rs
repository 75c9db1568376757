//! Tests progress reports while other watches have events, and for watches with a future start revision.

use std::time::Duration;

use etcd_client::{Client, PutOptions, WatchOptions};
use kv_mvcc::MemoryTable;
use tokio::time::{Instant, sleep, timeout};

use super::Outcome;
use super::support::Server;

/// The watch id of messages about a whole stream of watches.
const NO_WATCH: i64 = -1;

/// Requests progress reports on a stream with one busy watch and several quiet watches. The quiet watches of the store
/// report their progress at different times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn progress_report_is_never_behind_event() -> Outcome {
    let server = Server::start(&MemoryTable::new()).await?;
    let mut client = Client::connect([server.url()], None).await?;
    let mut writer = client.clone();
    let writing = tokio::spawn(async move {
        for number in 0.. {
            let key = if number % 50 == 7 { "/quiet/1" } else { "/busy" };
            writer.put(key, "1", None::<PutOptions>).await?;
            sleep(Duration::from_millis(1)).await;
        }
        Ok::<_, etcd_client::Error>(())
    });
    let (mut requests, mut answers) = client.watch("/busy", None).await?.split();
    for quiet in ["/quiet/1", "/quiet/2", "/quiet/3"] {
        requests.watch(quiet, None).await?;
        sleep(Duration::from_millis(70)).await;
    }
    let asking = tokio::spawn(async move {
        while requests.request_progress().await.is_ok() {
            sleep(Duration::from_millis(7)).await;
        }
    });
    let (begun, mut reports, mut events, mut newest) = (Instant::now(), 0, 0, 0);
    while reports < 10 || events < 200 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{reports} reports, {events} events");
        let message = timeout(Duration::from_secs(30), answers.message()).await??.ok_or("the stream has ended")?;
        let revision = message.header().map_or(0, |header| header.revision());
        if message.watch_id() == NO_WATCH {
            assert!(revision >= newest, "a report of {revision} after an event of {newest}");
            reports += 1;
        }
        for event in message.events() {
            events += 1;
            newest = newest.max(event.kv().map_or(0, |kv| kv.mod_revision()));
        }
    }
    writing.abort();
    asking.abort();
    server.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn progress_report_is_absent_before_watch_began() -> Outcome {
    let server = Server::start(&MemoryTable::new()).await?;
    let mut client = Client::connect([server.url()], None).await?;
    let put = client.put("a", "1", None::<PutOptions>).await?;
    let now = put.header().map_or(0, |header| header.revision());
    let options = |start| WatchOptions::new().with_progress_notify().with_start_revision(start);
    let mut future = client.watch("a", Some(options(now + 3))).await?;
    let mut other = client.watch("a", Some(options(0))).await?;
    future.message().await?;
    future.request_progress().await?;
    // Waits until the watch `other` has sent two progress reports.
    for report in 0..3 {
        let message = other.message().await?.ok_or("the stream has ended")?;
        assert_eq!((message.created(), message.header().map(|header| header.revision())), (report == 0, Some(now)));
    }
    assert!(timeout(Duration::from_millis(1), future.message()).await.is_err());
    let status = client.status().await?;
    assert_eq!(status.header().map(|header| header.revision()), Some(now));
    // Once the store has reached the start revision of a watch, the watch reports progress like any other watch.
    for value in ["2", "3", "4"] {
        client.put("a", value, None::<PutOptions>).await?;
    }
    let event = future.message().await?.ok_or("the stream has ended")?;
    assert_eq!(event.events().len(), 1);
    let report = future.message().await?.ok_or("the stream has ended")?;
    assert_eq!((report.events().len(), report.header().map(|header| header.revision())), (0, Some(now + 3)));
    server.stop().await
}
