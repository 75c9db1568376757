//! A program that opens a sled store, commits a few kilobytes durably and closes the store: the minimum work of any
//! program that keeps its state in sled and answers only when the state is durable.
//!
//! Usage: floor-sled FOLDER NUMBER

use std::error::Error;
use std::fs::File;
use std::path::PathBuf;

/// Sizes in bytes of the rows that an ADD writes on a node with 40 containers: a block (two rows, about 9 KB), a
/// handle, two history entries, two pointers, and the counters of the store.
const ROW_BYTES: [usize; 8] = [6_100, 3_000, 90, 120, 120, 40, 40, 80];

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(folder), Some(number)) = (arguments.next(), arguments.next()) else {
        return Err("usage: floor-sled FOLDER NUMBER".into());
    };
    let folder = PathBuf::from(folder);
    let store = sled::Config::new().path(&folder).flush_every_ms(None).cache_capacity(2 << 20).open()?;
    let file = File::open(folder.join("db"))?;
    let mut batch = sled::Batch::default();
    for (row, bytes) in ROW_BYTES.into_iter().enumerate() {
        batch.insert(format!("z/{number}/{row}").as_bytes(), vec![b'x'; bytes]);
    }
    store.apply_batch(batch)?;
    store.flush()?;
    file.sync_all()?;
    Ok(())
}
