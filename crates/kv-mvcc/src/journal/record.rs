//! The bytes of a journal: records one behind the other.
//!
//! A record is its length without this header (4 bytes), its number (8) and a CRC-32 over both and the rest (4), then for
//! each write the lengths of key and value (4 and 4) and the two. A length of [`REMOVED`] is that of no value: the row is
//! removed. Numbers are little endian.

use std::io;

use super::overlay::Overlay;
use super::{Medium, Noted};
use crate::table::Write;

const HEADER_BYTES: usize = 16;
const SUM_AT: usize = 12;
/// The length of the value of a row that is removed.
const REMOVED: u32 = u32::MAX;
/// How much is read at once: most journals that are not read to their end hold less.
const PIECE_BYTES: usize = 64 * 1024;

/// How long a record of these writes is.
pub(super) fn encoded_bytes(writes: &[Write]) -> u64 {
    let bytes = |write: &Write| 8 + write.key().len() + write.value().map_or(0, <[u8]>::len);
    (HEADER_BYTES + writes.iter().map(bytes).sum::<usize>()) as u64
}

/// The record with this number.
pub(super) fn encode(number: u64, writes: &[Write]) -> Vec<u8> {
    let mut record = vec![0; HEADER_BYTES];
    for write in writes {
        record.extend(length(write.key()).to_le_bytes());
        record.extend(write.value().map_or(REMOVED, length).to_le_bytes());
        record.extend(write.key());
        record.extend(write.value().unwrap_or_default());
    }
    let body = record.split_off(HEADER_BYTES);
    record[..4].copy_from_slice(&length(&body).to_le_bytes());
    record[4..SUM_AT].copy_from_slice(&number.to_le_bytes());
    let sum = checksum(&record[..SUM_AT], &body);
    record[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
    record.extend(body);
    record
}

/// Larger than any row or commit can be.
fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(REMOVED - 1)
}

fn checksum(header: &[u8], body: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(header);
    hasher.update(body);
    hasher.finalize()
}

/// The records of a journal.
#[derive(Debug, Default)]
pub(super) struct Records {
    /// The number of the first one; 0 without any.
    pub(super) first: u64,
    /// Where each one begins.
    starts: Vec<usize>,
    /// All of them.
    pub(super) bytes: Vec<u8>,
}

impl Records {
    /// The number of the last one; 0 without any.
    pub(super) fn last(&self) -> u64 {
        (self.first + self.starts.len() as u64).saturating_sub(1)
    }

    /// The rows of those after the record `number`; nothing if one of them cannot be read.
    pub(super) fn after(&self, number: u64) -> Option<Overlay> {
        let mut overlay = Overlay::default();
        let skip = usize::try_from((number + 1).saturating_sub(self.first)).ok()?;
        let ends = self.starts.iter().skip(1).copied().chain([self.bytes.len()]);
        for (start, end) in self.starts.iter().zip(ends).skip(skip) {
            let mut body = self.bytes.get(start + HEADER_BYTES..end)?;
            while !body.is_empty() {
                let (key, value) = (take_number(&mut body)?, take_number(&mut body)?);
                let key = take(&mut body, key)?;
                let value = if value == REMOVED { None } else { Some(take(&mut body, value)?) };
                overlay.set(key, value);
            }
        }
        Some(overlay)
    }
}

fn take<'a>(bytes: &mut &'a [u8], length: u32) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(length as usize)?;
    *bytes = rest;
    Some(taken)
}

fn take_number(bytes: &mut &[u8]) -> Option<u32> {
    let (taken, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u32::from_le_bytes(*taken))
}

/// Reads the records that are whole and follow one another.
pub(super) fn read_all(medium: &dyn Medium, capacity: u64) -> io::Result<Records> {
    let capacity = usize::try_from(capacity).unwrap_or(usize::MAX);
    let mut records = Records::default();
    let (mut bytes, mut end, mut at_end) = (Vec::new(), 0, false);
    loop {
        match next_record(&bytes[end..], &records) {
            Next::Record { number, length } => {
                if records.starts.is_empty() {
                    records.first = number;
                }
                records.starts.push(end);
                end += length;
            }
            Next::Cut if !at_end && bytes.len() < capacity => {
                let have = bytes.len();
                bytes.resize((have + PIECE_BYTES).min(capacity), 0);
                let read = medium.read(have as u64, &mut bytes[have..])?;
                bytes.truncate(have + read);
                at_end = read == 0;
            }
            Next::Cut | Next::Nothing => break,
        }
    }
    bytes.truncate(end);
    records.bytes = bytes;
    Ok(records)
}

/// The kind of the bytes behind a record.
enum Next {
    /// The next record.
    Record { number: u64, length: usize },
    /// Too few to tell.
    Cut,
    /// Not the next record.
    Nothing,
}

fn next_record(bytes: &[u8], records: &Records) -> Next {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Next::Cut };
    let [a, b, c, d, number @ .., s, t, u, v] = *header;
    let (body, number) = (u32::from_le_bytes([a, b, c, d]) as usize, u64::from_le_bytes(number));
    let is_next = number != 0 && (records.starts.is_empty() || number == records.last() + 1);
    if !is_next {
        return Next::Nothing;
    }
    let Some(body) = rest.get(..body) else { return Next::Cut };
    if checksum(&header[..SUM_AT], body) != u32::from_le_bytes([s, t, u, v]) {
        return Next::Nothing;
    }
    Next::Record { number, length: HEADER_BYTES + body.len() }
}

/// The engine's row: two numbers and the CRC-32 of both.
pub(super) fn encode_noted(noted: Noted) -> Vec<u8> {
    let mut row = [noted.record.to_le_bytes(), noted.checkpoint.to_le_bytes()].concat();
    row.extend(crc32fast::hash(&row).to_le_bytes());
    row
}

/// The contents of the engine's row; nothing if it is damaged.
pub(super) fn decode_noted(row: &[u8]) -> Option<Noted> {
    let (record, rest) = row.split_first_chunk()?;
    let (checkpoint, _) = rest.split_first_chunk()?;
    let noted = Noted { record: u64::from_le_bytes(*record), checkpoint: u64::from_le_bytes(*checkpoint) };
    (encode_noted(noted) == row).then_some(noted)
}
