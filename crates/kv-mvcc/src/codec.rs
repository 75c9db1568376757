//! Encodes and decodes the keys and contents of rows.
//!
//! All rows of a store are in one table of the engine. The first byte of a row's key is the kind of the row:
//!
//! | Key | Row |
//! |---|---|
//! | `m` name | metadata: `format`, `id`, `state`, and in format 2 `retention` |
//! | `c` key | the [`Pointer`] to the live value of a key |
//! | `l` revision, sub | a [`LogRow`]: one change, without values |
//! | `v` revision, sub, chunk | a piece of the value that was written at that position |
//! | `e` lease | the [`LeaseRow`] of a granted lease |
//! | `k` lease, key | empty: a live key that is attached to a lease |
//!
//! Numbers in keys are big endian (8, 4 and 4 bytes), so that keys sort numerically. Each row starts with the version
//! of its encoding and a CRC-32 over its key and content. The CRC-32 detects a row with a flipped bit and a row stored
//! under the wrong key.
//!
//! Format 2 of a store added leases, and the compaction mark for clients of etcd's API. Rows with an
//! [`Extra`](Row::Extra) have encoding version 2: encoding version 1, followed by the encoded `Extra`. Rows without an
//! `Extra` keep encoding version 1, so upgrading a store to format 2 rewrites no rows.

use bincode::config::{Configuration, Limit, LittleEndian, Varint};
use bincode::de::Decoder;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};
use kv::LeaseId;
use uuid::Uuid;

use crate::table::{MAX_ROW_BYTES, Write};

/// The default format of new stores, and the oldest supported store format.
pub const FORMAT: u32 = 1;
/// The store format with leases and the clients' compaction mark, and the newest supported format.
pub const FORMAT_WITH_LEASES: u32 = 2;

/// The encoding version of rows without an [`Extra`](Row::Extra).
const ROW_VERSION: u8 = 1;
/// The encoding version of rows with an [`Extra`](Row::Extra).
const ROW_VERSION_WITH_EXTRA: u8 = 2;
/// The length in bytes of the encoding version and the checksum at the start of each row.
const SEAL_BYTES: usize = 5;
/// Maximum number of bytes of a value that one row stores; part of the store format, because it decides into how many
/// rows a value is split.
const CHUNK_BYTES: usize = MAX_ROW_BYTES - SEAL_BYTES;

/// The decoder's limit in bytes: twice the longest key, which is more than any encoded row needs.
const DECODE_LIMIT: usize = 2 * kv::MAX_KEY_BYTES;
const BINCODE: Configuration<LittleEndian, Varint, Limit<DECODE_LIMIT>> =
    bincode::config::standard().with_limit::<DECODE_LIMIT>();

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Damage(pub(crate) String);

impl Damage {
    fn row(key: &[u8], what: impl std::fmt::Display) -> Self {
        Self(format!("row {} {what}", key.escape_ascii()))
    }
}

pub(crate) const CURRENT: u8 = b'c';
pub(crate) const LOG: u8 = b'l';
pub(crate) const VALUE: u8 = b'v';
pub(crate) const LEASE: u8 = b'e';
pub(crate) const LEASED: u8 = b'k';

pub(crate) const FORMAT_KEY: &[u8] = b"mformat";
pub(crate) const ID_KEY: &[u8] = b"mid";
pub(crate) const STATE_KEY: &[u8] = b"mstate";
pub(crate) const RETENTION_KEY: &[u8] = b"mretention";

/// Returns the row key under which the table records the store key `key` while that key is live.
pub(crate) fn current_key(key: &[u8]) -> Vec<u8> {
    let mut row = Vec::with_capacity(1 + key.len());
    row.push(CURRENT);
    row.extend_from_slice(key);
    row
}

/// The key of the log row for the change at log position `place`.
pub(crate) fn log_key(place: LogPosition) -> Vec<u8> {
    let mut row = Vec::with_capacity(LOG_KEY_BYTES);
    row.push(LOG);
    row.extend_from_slice(&place.revision.to_be_bytes());
    row.extend_from_slice(&place.sub.to_be_bytes());
    row
}

const LOG_KEY_BYTES: usize = 13;

/// Parses the row key of a log row into its log position.
pub(crate) fn log_place(row: &[u8]) -> Result<LogPosition, Damage> {
    let parse = || {
        let rest = row.strip_prefix(&[LOG])?;
        let (revision, sub) = rest.split_first_chunk::<8>()?;
        Some(LogPosition { revision: u64::from_be_bytes(*revision), sub: u32::from_be_bytes(sub.try_into().ok()?) })
    };
    parse().ok_or_else(|| Damage::row(row, "has a key of the wrong length"))
}

/// Returns the row key of chunk number `chunk` of the value that was written at log position `place`.
pub(crate) fn value_key(place: LogPosition, chunk: u32) -> Vec<u8> {
    let mut row = Vec::with_capacity(17);
    row.push(VALUE);
    row.extend_from_slice(&place.revision.to_be_bytes());
    row.extend_from_slice(&place.sub.to_be_bytes());
    row.extend_from_slice(&chunk.to_be_bytes());
    row
}

/// The row key of the row that records the lease `lease`.
pub(crate) fn lease_key(lease: LeaseId) -> Vec<u8> {
    numbered(LEASE, lease)
}

/// The key of the row that attaches the user's key `key` to a lease. With an empty `key`, the result is the start of
/// the range of all rows that attach keys to the lease.
pub(crate) fn leased_key(lease: LeaseId, key: &[u8]) -> Vec<u8> {
    let mut row = numbered(LEASED, lease);
    row.extend_from_slice(key);
    row
}

fn numbered(tag: u8, lease: LeaseId) -> Vec<u8> {
    [&[tag][..], &lease.get().to_be_bytes()].concat()
}

/// Parses the key of a lease row, or of a row that attaches a key to a lease ([`leased_key`]).
pub(crate) fn lease_and_key(row: &[u8]) -> Result<(LeaseId, &[u8]), Damage> {
    let parse = || {
        let (number, key) = row.get(1..)?.split_first_chunk::<8>()?;
        Some((LeaseId::new(i64::from_be_bytes(*number))?, key))
    };
    parse().ok_or_else(|| Damage::row(row, "names no lease"))
}

/// The exclusive end of the range of rows whose keys start with the byte `tag`.
pub(crate) fn end_of(tag: u8) -> [u8; 1] {
    [tag + 1]
}

/// The keys and contents of the rows into which a value is split.
pub(crate) fn value_rows(place: LogPosition, value: &[u8]) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> {
    value.chunks(CHUNK_BYTES).zip(0..).map(move |(piece, chunk)| {
        let key = value_key(place, chunk);
        let row = seal(&key, piece);
        (key, row)
    })
}

pub(crate) fn encode<T: Row>(key: &[u8], what: &T) -> Result<Vec<u8>, Damage> {
    let odd = |error| Damage::row(key, format_args!("is odd: {error}"));
    let mut payload = bincode::encode_to_vec(what, BINCODE).map_err(odd)?;
    let extra = what.extra();
    if extra == T::Extra::default() {
        return Ok(sealed(ROW_VERSION, key, &payload));
    }
    payload.extend(bincode::encode_to_vec(extra, BINCODE).map_err(odd)?);
    Ok(sealed(ROW_VERSION_WITH_EXTRA, key, &payload))
}

pub(crate) fn decode<T: Row>(key: &[u8], row: &[u8]) -> Result<T, Damage> {
    let (version, payload) = unsealed(key, row)?;
    let cut_short = |error| Damage::row(key, format_args!("cannot be decoded: {error}"));
    let (mut what, mut used) = bincode::decode_from_slice::<T, _>(payload, BINCODE).map_err(cut_short)?;
    if version == ROW_VERSION_WITH_EXTRA {
        let rest = payload.get(used..).unwrap_or_default();
        let (extra, more) = bincode::decode_from_slice::<T::Extra, _>(rest, BINCODE).map_err(cut_short)?;
        what.set_extra(extra);
        used += more;
    }
    match used == payload.len() {
        true if what.is_possible() => Ok(what),
        true => Err(Damage::row(key, "has numbers that cannot be")),
        false => Err(Damage::row(key, "is too long")),
    }
}

/// Prepends the encoding version and the checksum to the content of a row.
pub(crate) fn seal(key: &[u8], payload: &[u8]) -> Vec<u8> {
    sealed(ROW_VERSION, key, payload)
}

fn sealed(version: u8, key: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut row = Vec::with_capacity(SEAL_BYTES + payload.len());
    row.push(version);
    row.extend_from_slice(&checksum(key, payload).to_be_bytes());
    row.extend_from_slice(payload);
    row
}

/// Checks and removes the encoding version and the checksum of a row without an [`Extra`](Row::Extra).
pub(crate) fn unseal<'r>(key: &[u8], row: &'r [u8]) -> Result<&'r [u8], Damage> {
    match unsealed(key, row)? {
        (ROW_VERSION, payload) => Ok(payload),
        (version, _) => Err(Damage::row(key, format_args!("has the unknown version {version}"))),
    }
}

/// Checks the encoding version and the checksum of a row; returns the version and the content.
fn unsealed<'r>(key: &[u8], row: &'r [u8]) -> Result<(u8, &'r [u8]), Damage> {
    match row.split_first_chunk::<SEAL_BYTES>() {
        Some(([version @ (ROW_VERSION | ROW_VERSION_WITH_EXTRA), sum @ ..], payload)) => {
            let is_whole = u32::from_be_bytes(*sum) == checksum(key, payload);
            if is_whole { Ok((*version, payload)) } else { Err(Damage::row(key, "fails its checksum")) }
        }
        Some(([version, ..], _)) => Err(Damage::row(key, format_args!("has the unknown version {version}"))),
        None => Err(Damage::row(key, "is cut off")),
    }
}

fn checksum(key: &[u8], payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(key);
    hasher.update(payload);
    hasher.finalize()
}

/// Encodes the format row: 4 bytes big endian and their checksum. All future store formats must keep this encoding of
/// the format row.
pub(crate) fn encode_format(format: u32) -> Vec<u8> {
    let number = format.to_be_bytes();
    [number, checksum(FORMAT_KEY, &number).to_be_bytes()].concat()
}

pub(crate) fn decode_format(row: &[u8]) -> Result<u32, Damage> {
    let parse = || {
        let (number, rest) = row.split_first_chunk::<4>()?;
        let sum = u32::from_be_bytes(*rest.first_chunk::<4>()?);
        (sum == checksum(FORMAT_KEY, number)).then(|| u32::from_be_bytes(*number))
    };
    parse().ok_or_else(|| Damage::row(FORMAT_KEY, "fails its checksum"))
}

pub(crate) fn encode_id(id: Uuid) -> Vec<u8> {
    seal(ID_KEY, id.as_bytes())
}

pub(crate) fn decode_id(row: &[u8]) -> Result<Uuid, Damage> {
    Uuid::from_slice(unseal(ID_KEY, row)?).map_err(|_| Damage::row(ID_KEY, "has the wrong length"))
}

/// The number of bytes that a log row adds to the size of the history: the row itself, plus the superseded value that
/// the history keeps for the log row.
pub(crate) fn log_cost(row_bytes: usize, prev: Option<&Pointer>) -> u64 {
    (LOG_KEY_BYTES + row_bytes) as u64 + prev.map_or(0, |prev| u64::from(prev.len))
}

/// The revision of the store after a commit of `writes`; `None` if `writes` do not contain the state row.
pub fn revision_of(writes: &[Write]) -> Option<u64> {
    writes
        .iter()
        .rev()
        .find_map(|write| match write {
            Write::Put(key, row) if key == STATE_KEY => decode::<StateRow>(key, row).ok(),
            _ => None,
        })
        .map(|state| state.revision)
}

/// The position of a change in the log: the revision of the change, and the index of the change inside its transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Encode, Decode)]
pub(crate) struct LogPosition {
    pub(crate) revision: u64,
    pub(crate) sub: u32,
}

impl LogPosition {
    pub(crate) fn first_of(revision: u64) -> Self {
        Self { revision, sub: 0 }
    }

    pub(crate) fn next(self) -> Self {
        Self { sub: self.sub + 1, ..self }
    }
}

/// The metadata of a store entry, and the log position under which the entry's value is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pointer {
    pub(crate) create_revision: u64,
    pub(crate) version: u64,
    /// The log position of the last write to the key; the value is stored under this position.
    pub(crate) place: LogPosition,
    /// The length of the entry's value in bytes.
    pub(crate) len: u32,
    /// The lease that the key is attached to; encoded in the row's [`Extra`](Row::Extra).
    pub(crate) lease: Option<LeaseId>,
}

impl Encode for Pointer {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        (self.create_revision, self.version, self.place, self.len).encode(encoder)
    }
}

impl<Context> Decode<Context> for Pointer {
    fn decode<D: Decoder<Context = Context>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let (create_revision, version, place, len) = Decode::decode(decoder)?;
        Ok(Self { create_revision, version, place, len, lease: None })
    }
}

bincode::impl_borrow_decode!(Pointer);

impl Pointer {
    /// The number of rows into which the value is split; 0 for an empty value.
    pub(crate) fn chunks(&self) -> u32 {
        u32::try_from((self.len as usize).div_ceil(CHUNK_BYTES)).unwrap_or(u32::MAX)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct LogRow {
    pub(crate) key: Vec<u8>,
    /// The commit time of the change in microseconds since 1970.
    pub(crate) time: u64,
    pub(crate) change: Change,
    /// The entry of the key before the change. The store keeps the value of the key's previous entry until this log row
    /// is removed.
    pub(crate) prev: Option<Pointer>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) enum Change {
    Put(Pointer),
    Delete,
}

/// The row that records a granted lease. The remaining time of a lease is not stored: after a restart each lease gets
/// its full time again, as in etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct LeaseRow {
    /// The time to live that the lease was granted, in seconds.
    pub(crate) ttl: u64,
}

/// The row with the limits on the history that an administrator set for this store, which override the options of every
/// program. All durations in the row with the stored limits are in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct StoredRetention {
    pub(crate) revisions: Option<u64>,
    pub(crate) age: Option<u64>,
    pub(crate) bytes: Option<u64>,
    pub(crate) min_age: Option<u64>,
}

/// The row with the store's revision, compaction marks and totals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StateRow {
    pub(crate) revision: u64,
    /// The compaction mark: the oldest readable revision; 0 if all revisions are readable.
    pub(crate) compacted: u64,
    /// The lowest log position that may still have a log row. Log rows from position `swept` up to the compaction mark
    /// have expired but are not removed yet.
    pub(crate) swept: LogPosition,
    /// The total size in bytes of the history: all log rows and superseded values.
    pub(crate) log_bytes: u64,
    /// The time of the newest commit in microseconds since 1970.
    pub(crate) time: u64,
    pub(crate) live: u64,
    /// The wrapping sum of [`fingerprint`] over all live keys. If the recorded sum differs from the sum over the live
    /// keys, the engine has lost a key.
    pub(crate) digest: u64,
    /// The oldest revision that clients of etcd's API may read; 0 if clients may read all revisions. The store may keep
    /// history that is older than the oldest revision that clients of etcd's API may read.
    pub(crate) client_mark: u64,
    /// The number of commits that made no new revision: changes of leases and of the limits on history. Two different
    /// states of a store at the same revision differ in `other_changes`.
    pub(crate) other_changes: u64,
}

impl Encode for StateRow {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        let Self { revision, compacted, swept, log_bytes, time, live, digest, .. } = self;
        (revision, compacted, swept, log_bytes, time, live, digest).encode(encoder)
    }
}

impl<Context> Decode<Context> for StateRow {
    fn decode<D: Decoder<Context = Context>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let (revision, compacted, swept, log_bytes, time, live, digest) = Decode::decode(decoder)?;
        Ok(Self { revision, compacted, swept, log_bytes, time, live, digest, ..Self::NEW })
    }
}

pub(crate) trait Row: Encode + Decode<()> {
    /// The part of a row that encoding version 2 adds to encoding version 1. An `Extra` with the default value is not
    /// encoded.
    type Extra: Default + PartialEq + Encode + Decode<()>;

    fn extra(&self) -> Self::Extra;

    fn set_extra(&mut self, extra: Self::Extra);

    /// False if the decoded row has values that no store writes: numbers too large to increment, or values over the
    /// size limit. A manipulated row can contain impossible numbers and still have a correct checksum.
    fn is_possible(&self) -> bool;
}

/// The largest number in a valid row: one less than `i64::MAX`, because revisions in the API are signed and must still
/// be incremented.
const MAX_NUMBER: u64 = (i64::MAX - 1).cast_unsigned();

impl Row for LogPosition {
    type Extra = ();

    fn extra(&self) {}

    fn set_extra(&mut self, (): ()) {}

    fn is_possible(&self) -> bool {
        self.revision <= MAX_NUMBER && self.sub < u32::MAX
    }
}

impl Row for Pointer {
    /// The id of the lease that the entry is attached to, or 0.
    type Extra = i64;

    fn extra(&self) -> i64 {
        LeaseId::number(self.lease)
    }

    fn set_extra(&mut self, lease: i64) {
        self.lease = LeaseId::new(lease);
    }

    fn is_possible(&self) -> bool {
        self.create_revision.max(self.version) <= MAX_NUMBER
            && self.place.is_possible()
            && self.len as usize <= kv::MAX_VALUE_BYTES
    }
}

impl LogRow {
    /// The entry of the key after the change; `None` for a deletion.
    pub(crate) fn put(&self) -> Option<&Pointer> {
        match &self.change {
            Change::Put(pointer) => Some(pointer),
            Change::Delete => None,
        }
    }
}

impl Row for LogRow {
    /// The ids of the key's lease after and before the change; 0 if the key has no lease.
    type Extra = (i64, i64);

    fn extra(&self) -> (i64, i64) {
        let number = |pointer: Option<&Pointer>| pointer.map_or(0, Pointer::extra);
        (number(self.put()), number(self.prev.as_ref()))
    }

    fn set_extra(&mut self, (after, before): (i64, i64)) {
        if let Change::Put(pointer) = &mut self.change {
            pointer.set_extra(after);
        }
        if let Some(pointer) = &mut self.prev {
            pointer.set_extra(before);
        }
    }

    fn is_possible(&self) -> bool {
        self.put().into_iter().chain(&self.prev).all(Pointer::is_possible)
    }
}

impl Row for LeaseRow {
    type Extra = ();

    fn extra(&self) {}

    fn set_extra(&mut self, (): ()) {}

    fn is_possible(&self) -> bool {
        self.ttl <= MAX_NUMBER
    }
}

impl Row for StoredRetention {
    type Extra = ();

    fn extra(&self) {}

    fn set_extra(&mut self, (): ()) {}

    fn is_possible(&self) -> bool {
        true
    }
}

impl Row for StateRow {
    type Extra = (u64, u64);

    fn extra(&self) -> (u64, u64) {
        (self.client_mark, self.other_changes)
    }

    fn set_extra(&mut self, (client_mark, other_changes): (u64, u64)) {
        (self.client_mark, self.other_changes) = (client_mark, other_changes);
    }

    fn is_possible(&self) -> bool {
        let numbers = [self.revision, self.compacted, self.log_bytes, self.live, self.other_changes];
        numbers.into_iter().all(|number| number <= MAX_NUMBER)
            && self.compacted.max(self.client_mark) <= self.revision
            && self.swept.is_possible()
    }
}

impl StateRow {
    /// The state of an empty store. The first write to an empty store makes revision 2.
    pub(crate) const NEW: Self = Self {
        revision: 1,
        compacted: 0,
        swept: LogPosition { revision: 2, sub: 0 },
        log_bytes: 0,
        time: 0,
        live: 0,
        digest: 0,
        client_mark: 0,
        other_changes: 0,
    };
}

/// A 64-bit hash of a live key and the position of its last write (FNV-1a, then the final mix of MurmurHash3). Sums of
/// these key hashes are stored on disk, so the hash function must never change.
pub(crate) fn fingerprint(key: &[u8], place: LogPosition) -> u64 {
    let written = place.revision.to_be_bytes().into_iter().chain(place.sub.to_be_bytes());
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in key.iter().copied().chain(written) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests;
