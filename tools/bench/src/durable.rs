//! Compares a durable commit with the minimum cost of durability: appending the same number of bytes to an open file
//! and syncing the file.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use kv::{Op, Store, Txn};
use kv_mvcc::MvccStore;

use crate::fill;
use crate::report::print;
use crate::{Outcome, Programs};

const ROUNDS: usize = 40;
const COMMITS: usize = 25;
/// Size in bytes of the block that an ADD writes on a node with 40 containers.
const BLOCK_BYTES: usize = 9_000;
const HANDLE_BYTES: usize = 90;

/// Measures the commits per second of one thread, alternating between a plain file and the stores.
pub(crate) fn run(_: &Programs, folder: &Path) -> Outcome<()> {
    let folder = folder.join("durable");
    std::fs::create_dir(&folder)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    runtime.block_on(async {
        let mut file = File::create(folder.join("file"))?;
        let engines = ["redb", "sled"];
        let mut stores = Vec::new();
        for engine in engines {
            stores.push(fill::create(engine, &folder.join(engine)).await?);
        }
        let (mut appending, mut committing) = (Duration::ZERO, [Duration::ZERO; 2]);
        for _ in 0..ROUNDS {
            appending += append(&mut file)?;
            for (store, time) in stores.iter().zip(&mut committing) {
                *time += commit(store).await?;
            }
        }
        for store in stores {
            store.close().await?;
        }
        let rate = |time: Duration| (ROUNDS * COMMITS) as f64 / time.as_secs_f64();
        let floor = rate(appending);
        let row = |name: &str, rate: f64, at_least: &str| {
            vec![name.to_owned(), format!("{rate:.0}"), format!("{:.2}", rate / floor), at_least.to_owned()]
        };
        print(
            &format!("Durable commits of {} bytes, one thread, in one open store", BLOCK_BYTES + HANDLE_BYTES),
            &["", "a second", "/ append and fdatasync", "at least"],
            vec![
                row("append to a file, fdatasync", floor, "-"),
                row("redb", rate(committing[0]), "0.50"),
                row("sled", rate(committing[1]), "0.40"),
            ],
        );
        Ok(())
    })
}

fn append(file: &mut File) -> Outcome<Duration> {
    let bytes = vec![b'x'; BLOCK_BYTES + HANDLE_BYTES];
    let begun = Instant::now();
    for _ in 0..COMMITS {
        file.write_all(&bytes)?;
        file.sync_data()?;
    }
    Ok(begun.elapsed())
}

async fn commit(store: &MvccStore) -> Outcome<Duration> {
    let begun = Instant::now();
    for number in 0..COMMITS {
        let writes =
            [Op::put("block", vec![b'x'; BLOCK_BYTES]), Op::put(format!("handle/{number}"), vec![b'x'; HANDLE_BYTES])];
        store.txn(Txn::new().with_success(writes)).await?;
    }
    Ok(begun.elapsed())
}
