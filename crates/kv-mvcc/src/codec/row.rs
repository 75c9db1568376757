//! The contents of rows.

use bincode::de::Decoder;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};
use kv::LeaseId;

use super::CHUNK_BYTES;

/// Where a change stands in the order of all: the revision, and the place inside the transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Encode, Decode)]
pub(crate) struct Place {
    pub(crate) revision: u64,
    pub(crate) sub: u32,
}

impl Place {
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
    pub(crate) place: Place,
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
pub(crate) struct Lease {
    /// The time to live that was granted, in seconds.
    pub(crate) ttl: u64,
}

/// The bounds on history that somebody has set, which all programs that write to the store go by. Times are in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct Kept {
    pub(crate) revisions: Option<u64>,
    pub(crate) age: Option<u64>,
    pub(crate) bytes: Option<u64>,
    pub(crate) min_age: Option<u64>,
}

/// The one row that says where the store stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State {
    /// The newest revision.
    pub(crate) revision: u64,
    /// The mark: the oldest revision that can be read; 0 if all can.
    pub(crate) compacted: u64,
    /// The first place that may still have a log row. The rows between it and the mark are on their way out.
    pub(crate) swept: Place,
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

impl Encode for State {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        let Self { revision, compacted, swept, log_bytes, time, live, digest, .. } = self;
        (revision, compacted, swept, log_bytes, time, live, digest).encode(encoder)
    }
}

impl<Context> Decode<Context> for State {
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

impl Row for Place {
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

impl Row for Lease {
    type Extra = ();

    fn extra(&self) {}

    fn set_extra(&mut self, (): ()) {}

    fn is_possible(&self) -> bool {
        self.ttl <= MAX_NUMBER
    }
}

impl Row for Kept {
    type Extra = ();

    fn extra(&self) {}

    fn set_extra(&mut self, (): ()) {}

    fn is_possible(&self) -> bool {
        true
    }
}

impl Row for State {
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

impl State {
    /// A store without keys; its first write gets revision 2.
    pub(crate) const NEW: Self = Self {
        revision: 1,
        compacted: 0,
        swept: Place { revision: 2, sub: 0 },
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
pub(crate) fn fingerprint(key: &[u8], place: Place) -> u64 {
    let written = place.revision.to_be_bytes().into_iter().chain(place.sub.to_be_bytes());
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in key.iter().copied().chain(written) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}
