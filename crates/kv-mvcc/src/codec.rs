//! How rows are spelled: their keys, and the bytes of what they hold.
//!
//! One keyspace; the first byte of a key says what the row is:
//!
//! | Key | Row |
//! |---|---|
//! | `m` name | metadata: `format`, `id`, `state`, and in format 2 `retention` |
//! | `c` key | the [`Pointer`] to the live value of a key |
//! | `l` revision, sub | a [`LogRow`]: one change, without values |
//! | `v` revision, sub, chunk | a piece of the value that was written there |
//! | `e` lease | a [`LeaseRow`] that is granted |
//! | `k` lease, key | nothing: a live key that is attached to a lease |
//!
//! Numbers in keys are big endian (8, 4 and 4 bytes), so that they sort. Each row begins with the version of its
//! encoding and a CRC-32 over its key and the rest, so that a flipped bit, or a row in the wrong place, is found.
//!
//! Leases and the clients' mark came with format 2. A row that says something of them has version 2: what version 1 has, and
//! then the row's [`Extra`](Row::Extra). All other rows are spelled as before, so an upgrade writes none of them anew.

use bincode::config::{Configuration, Limit, LittleEndian, Varint};
use bincode::de::Decoder;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};
use kv::LeaseId;
use uuid::Uuid;

use crate::table::{MAX_ROW_BYTES, Write};

/// The format that new stores get unless another one is asked for, and the oldest that is read.
pub const FORMAT: u32 = 1;
/// The format with leases and the clients' mark, and the newest that is read.
pub const FORMAT_WITH_LEASES: u32 = 2;

/// The version of the encoding of rows.
const ROW_VERSION: u8 = 1;
/// The version of rows with an [`Extra`](Row::Extra).
const ROW_VERSION_WITH_EXTRA: u8 = 2;
/// The version and the checksum in front of each row.
const SEAL_BYTES: usize = 5;
/// The most bytes of a value that one row holds. Part of the format: the length of a value says how many rows it has.
const CHUNK_BYTES: usize = MAX_ROW_BYTES - SEAL_BYTES;

/// Twice the longest key, and so more than any encoded row needs.
const DECODE_LIMIT: usize = 2 * kv::MAX_KEY_BYTES;
const BINCODE: Configuration<LittleEndian, Varint, Limit<DECODE_LIMIT>> =
    bincode::config::standard().with_limit::<DECODE_LIMIT>();

/// A fault of a row, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Damage(pub(crate) String);

impl Damage {
    fn row(key: &[u8], what: impl std::fmt::Display) -> Self {
        Self(format!("row {} {what}", key.escape_ascii()))
    }
}

// Keys of rows.

pub(crate) const CURRENT: u8 = b'c';
pub(crate) const LOG: u8 = b'l';
pub(crate) const VALUE: u8 = b'v';
pub(crate) const LEASE: u8 = b'e';
pub(crate) const LEASED: u8 = b'k';

pub(crate) const FORMAT_KEY: &[u8] = b"mformat";
pub(crate) const ID_KEY: &[u8] = b"mid";
pub(crate) const STATE_KEY: &[u8] = b"mstate";
pub(crate) const RETENTION_KEY: &[u8] = b"mretention";

/// The row of a live key.
pub(crate) fn current_key(key: &[u8]) -> Vec<u8> {
    let mut row = Vec::with_capacity(1 + key.len());
    row.push(CURRENT);
    row.extend_from_slice(key);
    row
}

/// The row of a change.
pub(crate) fn log_key(place: LogPosition) -> Vec<u8> {
    let mut row = Vec::with_capacity(LOG_KEY_BYTES);
    row.push(LOG);
    row.extend_from_slice(&place.revision.to_be_bytes());
    row.extend_from_slice(&place.sub.to_be_bytes());
    row
}

const LOG_KEY_BYTES: usize = 13;

/// The place that the key of a log row names.
pub(crate) fn log_place(row: &[u8]) -> Result<LogPosition, Damage> {
    let parse = || {
        let rest = row.strip_prefix(&[LOG])?;
        let (revision, sub) = rest.split_first_chunk::<8>()?;
        Some(LogPosition { revision: u64::from_be_bytes(*revision), sub: u32::from_be_bytes(sub.try_into().ok()?) })
    };
    parse().ok_or_else(|| Damage::row(row, "has a key of the wrong length"))
}

/// A row of the value that was written at a place.
pub(crate) fn value_key(place: LogPosition, chunk: u32) -> Vec<u8> {
    let mut row = Vec::with_capacity(17);
    row.push(VALUE);
    row.extend_from_slice(&place.revision.to_be_bytes());
    row.extend_from_slice(&place.sub.to_be_bytes());
    row.extend_from_slice(&chunk.to_be_bytes());
    row
}

/// The row of a lease.
pub(crate) fn lease_key(lease: LeaseId) -> Vec<u8> {
    numbered(LEASE, lease)
}

/// The row of a key that is attached to a lease. Without a key, where those of the lease begin.
pub(crate) fn leased_key(lease: LeaseId, key: &[u8]) -> Vec<u8> {
    let mut row = numbered(LEASED, lease);
    row.extend_from_slice(key);
    row
}

fn numbered(tag: u8, lease: LeaseId) -> Vec<u8> {
    [&[tag][..], &lease.get().to_be_bytes()].concat()
}

/// The lease, and for a [`leased_key`] the key, that the key of a row names.
pub(crate) fn lease_and_key(row: &[u8]) -> Result<(LeaseId, &[u8]), Damage> {
    let parse = || {
        let (number, key) = row.get(1..)?.split_first_chunk::<8>()?;
        Some((LeaseId::new(i64::from_be_bytes(*number))?, key))
    };
    parse().ok_or_else(|| Damage::row(row, "names no lease"))
}

/// Where all rows with this first byte end.
pub(crate) fn end_of(tag: u8) -> [u8; 1] {
    [tag + 1]
}

// The contents of rows.

/// The rows of a value: keys and contents.
pub(crate) fn value_rows(place: LogPosition, value: &[u8]) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> {
    value.chunks(CHUNK_BYTES).zip(0..).map(move |(piece, chunk)| {
        let key = value_key(place, chunk);
        let row = seal(&key, piece);
        (key, row)
    })
}

/// Encodes what the row `key` holds.
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

/// Decodes what was found in the row `key`.
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

/// Puts version and checksum in front.
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

/// Checks version and checksum of a row without an extra, and takes them off.
pub(crate) fn unseal<'r>(key: &[u8], row: &'r [u8]) -> Result<&'r [u8], Damage> {
    match unsealed(key, row)? {
        (ROW_VERSION, payload) => Ok(payload),
        (version, _) => Err(Damage::row(key, format_args!("has the unknown version {version}"))),
    }
}

/// Checks version and checksum; returns the version and the rest.
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

/// The format row: 4 bytes big endian and their checksum. It stays like that in every format there will be.
pub(crate) fn encode_format(format: u32) -> Vec<u8> {
    let number = format.to_be_bytes();
    [number, checksum(FORMAT_KEY, &number).to_be_bytes()].concat()
}

/// Reads the format row.
pub(crate) fn decode_format(row: &[u8]) -> Result<u32, Damage> {
    let parse = || {
        let (number, rest) = row.split_first_chunk::<4>()?;
        let sum = u32::from_be_bytes(*rest.first_chunk::<4>()?);
        (sum == checksum(FORMAT_KEY, number)).then(|| u32::from_be_bytes(*number))
    };
    parse().ok_or_else(|| Damage::row(FORMAT_KEY, "fails its checksum"))
}

/// The row with the id of the store.
pub(crate) fn encode_id(id: Uuid) -> Vec<u8> {
    seal(ID_KEY, id.as_bytes())
}

/// Reads the row with the id of the store.
pub(crate) fn decode_id(row: &[u8]) -> Result<Uuid, Damage> {
    Uuid::from_slice(unseal(ID_KEY, row)?).map_err(|_| Damage::row(ID_KEY, "has the wrong length"))
}

/// The bytes that a log row counts for: its own, and those of the superseded value that it keeps.
pub(crate) fn log_cost(row_bytes: usize, prev: Option<&Pointer>) -> u64 {
    (LOG_KEY_BYTES + row_bytes) as u64 + prev.map_or(0, |prev| u64::from(prev.len))
}

/// The revision to which a commit of these rows takes the store; `None` if they do not name it.
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

/// Where a change stands in the order of all: the revision, and the place inside the transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Encode, Decode)]
pub(crate) struct LogPosition {
    pub(crate) revision: u64,
    pub(crate) sub: u32,
}

impl LogPosition {
    /// The first place of a revision.
    pub(crate) fn first_of(revision: u64) -> Self {
        Self { revision, sub: 0 }
    }

    /// The next place of the same revision.
    pub(crate) fn next(self) -> Self {
        Self { sub: self.sub + 1, ..self }
    }
}

/// An entry without its key and value: its metadata, and where its value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pointer {
    pub(crate) create_revision: u64,
    pub(crate) version: u64,
    /// Where it was written, which is where the value stands.
    pub(crate) place: LogPosition,
    /// The bytes of the value.
    pub(crate) len: u32,
    /// The lease that the key is attached to. Rows have it in their [`Extra`](Row::Extra).
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
    /// How many rows the value has; an empty one has none.
    pub(crate) fn chunks(&self) -> u32 {
        u32::try_from((self.len as usize).div_ceil(CHUNK_BYTES)).unwrap_or(u32::MAX)
    }
}

/// One change of one key.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct LogRow {
    pub(crate) key: Vec<u8>,
    /// When it was committed, in microseconds since 1970.
    pub(crate) time: u64,
    pub(crate) change: Change,
    /// The entry before the change. Its value is kept as long as this row is.
    pub(crate) prev: Option<Pointer>,
}

/// The effect of a change on its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) enum Change {
    Put(Pointer),
    Delete,
}

/// A lease that is granted. Its time is not in the store: the clock of leases begins again after a start, as in etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct LeaseRow {
    /// The time to live that was granted, in seconds.
    pub(crate) ttl: u64,
}

/// The bounds on history that somebody has set, which all programs that write to the store go by. Times are in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct StoredRetention {
    pub(crate) revisions: Option<u64>,
    pub(crate) age: Option<u64>,
    pub(crate) bytes: Option<u64>,
    pub(crate) min_age: Option<u64>,
}

/// The one row that says where the store stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StateRow {
    /// The newest revision.
    pub(crate) revision: u64,
    /// The mark: the oldest revision that can be read; 0 if all can.
    pub(crate) compacted: u64,
    /// The first place that may still have a log row. The rows between it and the mark are on their way out.
    pub(crate) swept: LogPosition,
    /// The bytes of all log rows, and of the superseded values that they keep.
    pub(crate) log_bytes: u64,
    /// When the newest revision was committed, in microseconds since 1970.
    pub(crate) time: u64,
    /// How many live keys there are.
    pub(crate) live: u64,
    /// The wrapping sum of [`fingerprint`] over all live keys: tells whether one of them was lost.
    pub(crate) digest: u64,
    /// The oldest revision that clients of etcd's API may read; 0 if all that are there. History below it is kept.
    pub(crate) client_mark: u64,
    /// How many changes took no revision (of leases, and of the bounds on history): tells two states of one revision apart.
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

/// The content of a row.
pub(crate) trait Row: Encode + Decode<()> {
    /// The part that rows of version 1 do not have. The default says nothing.
    type Extra: Default + PartialEq + Encode + Decode<()>;

    /// That part.
    fn extra(&self) -> Self::Extra;

    /// Takes that part over from a row of version 2.
    fn set_extra(&mut self, extra: Self::Extra);

    /// False for what no store ever writes: numbers that leave no room to count on, values that no store takes. A row may
    /// have such numbers and a right checksum all the same if somebody made it so.
    fn is_possible(&self) -> bool;
}

/// The largest number in a row; revisions are signed on the way out.
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
    /// The number of the lease.
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
    /// The entry that a put made.
    pub(crate) fn put(&self) -> Option<&Pointer> {
        match &self.change {
            Change::Put(pointer) => Some(pointer),
            Change::Delete => None,
        }
    }
}

impl Row for LogRow {
    /// The numbers of the leases after and before the change.
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
    /// The clients' mark, and how many changes took no revision.
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
    /// A store without keys; its first write gets revision 2.
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

/// A 64-bit hash of a live key and where it was written (FNV-1a, then mixed as MurmurHash3 does). It is on disk, in
/// sums: it must stay as it is.
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
