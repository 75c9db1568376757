//! A program that opens a sled store, commits a few kilobytes durably and closes: what any program pays that keeps its
//! state in sled and answers only when it is safe.
//!
//! Usage: floor-sled FOLDER NUMBER

use std::error::Error;
use std::fs::File;
use std::path::PathBuf;

/// About what an ADD writes: a block with its log row, a handle with its own, the counters.
const ROW_BYTES: [usize; 6] = [4_000, 120, 80, 120, 60, 60];

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
