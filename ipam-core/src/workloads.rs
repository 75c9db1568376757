//! Reads and writes the records of workloads that keep their addresses; see [`crate::sticky`].

use std::net::IpAddr;

use kv::Transaction;

use crate::error::Result;
use crate::model::{Block, Document, StickyRecord, keys};
use crate::sticky::STICKY;

/// Reads and guards the sticky record of a workload, which lists its sticky addresses. Returns an empty record if the
/// stored record is missing or damaged.
pub async fn read_record(tx: &mut Transaction, name: &str) -> Result<StickyRecord> {
    let key = keys::sticky(name);
    let Some(value) = tx.get(&key).await? else { return Ok(StickyRecord::default()) };
    Ok(StickyRecord::decode(&key, value.as_bytes()).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot decode the sticky address record of a workload; treating the record as empty");
        StickyRecord::default()
    }))
}

/// Writes the sticky record of a workload, or deletes the stored record if the new record is empty.
pub fn write_record(tx: &mut Transaction, name: &str, record: &StickyRecord) -> Result<()> {
    let key = keys::sticky(name);
    if record.addresses.is_empty() {
        tx.delete(&key)?;
    } else {
        tx.put(&key, record.encode()?)?;
    }
    Ok(())
}

/// Removes an address from a workload's sticky record, because the workload no longer keeps the address.
pub async fn forget(tx: &mut Transaction, name: &str, address: IpAddr) -> Result<()> {
    let mut record = read_record(tx, name).await?;
    if record.remove(address) { write_record(tx, name, &record) } else { Ok(()) }
}

/// Returns the given addresses of a block that workloads keep, each with the workload's name.
pub(crate) fn names_of(block: &Block, addresses: impl Iterator<Item = IpAddr>) -> Vec<(IpAddr, String)> {
    addresses.filter_map(|ip| Some((ip, block.attributes_of(ip)?.get(STICKY)?.to_owned()))).collect()
}
