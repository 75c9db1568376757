//! Reading a file of bbolt's, the store of many programs written in Go: buckets within buckets, each a B+ tree of pages.
//!
//! The form is version 2's, as <https://github.com/etcd-io/bbolt> has it in `internal/common`, with numbers little-endian:
//! - A page has a head of 16 bytes (its number, its kind, how many entries it has, how many pages more it fills) and an entry
//!   of 16 bytes for each key; the keys and the values lie behind them, in the same order.
//! - A bucket is a value of 16 bytes, the number of its first page before all; if that is 0, its only page follows at once.
//! - Pages 0 and 1 say where the root is; they are written in turns, and the later one that is whole is the one to go by.
//!
//! A file may be damaged in any way. No page is read twice, and no byte of a page belongs to two keys; so what is read is never more
//! than there is.

use std::iter::once;

const MAGIC: u32 = 0xED0C_DAED;
const VERSION: u32 = 2;
/// How long a page's head is, an entry, and a bucket.
const HEAD: usize = 16;
/// How long what page 0 or 1 says is without its checksum.
const SUMMED: usize = 56;
/// A page's kind: its entries are pages.
const BRANCH: u16 = 1;
/// A page's kind: its entries are keys with values.
const LEAF: u16 = 2;
/// In an entry: the value is a bucket.
const IS_BUCKET: u32 = 1;

/// What is wrong with a file.
type Result<T, E = String> = std::result::Result<T, E>;
/// A key and its value.
pub(super) type Entry<'a> = (&'a [u8], Value<'a>);

/// What a key has.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value<'a> {
    Bytes(&'a [u8]),
    Bucket(Bucket<'a>),
}

/// Where a bucket's entries are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bucket<'a> {
    From(u64),
    Inline(&'a [u8]),
}

/// A file, and how much of it was read.
#[derive(Debug)]
pub(super) struct Bolt<'a> {
    bytes: &'a [u8],
    page_size: usize,
    root: u64,
    /// By page.
    was_read: Vec<bool>,
}

/// What page 0 or page 1 says.
struct Meta {
    page_size: usize,
    root: u64,
    transaction: u64,
}

/// True for what bbolt has written, even if it is damaged.
pub(super) fn is_bolt(bytes: &[u8]) -> bool {
    metas(bytes).next().is_some()
}

/// What may be page 0 or page 1, which is where the first one ends: the place and what is there.
fn metas(bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let places = once(0).chain((10..=24).map(|bits| 1 << bits));
    let at = move |place: usize| Some((place, bytes.get(place + HEAD..place + HEAD + SUMMED + 8)?));
    places.filter_map(at).filter(|(_, meta)| u32_at(meta, 0) == Some(MAGIC))
}

impl Meta {
    /// `None` if it is not whole.
    fn read(place: usize, bytes: &[u8]) -> Option<Self> {
        let page_size = size_at(bytes, 8)?;
        let fits = (1 << 10..=1 << 24).contains(&page_size) && page_size.is_power_of_two();
        let whole = u32_at(bytes, 4)? == VERSION && u64_at(bytes, SUMMED)? == fnv_1a(bytes.get(..SUMMED)?);
        (whole && fits && (place == 0 || place == page_size)).then_some(Self {
            page_size,
            root: u64_at(bytes, 16)?,
            transaction: u64_at(bytes, 48)?,
        })
    }
}

impl<'a> Bolt<'a> {
    /// What is in a file.
    pub(super) fn new(bytes: &'a [u8]) -> Result<Self> {
        let whole = metas(bytes).filter_map(|(place, meta)| Meta::read(place, meta));
        let meta = whole.max_by_key(|meta| meta.transaction).ok_or("neither page 0 nor page 1 is whole")?;
        let was_read = vec![false; bytes.len() / meta.page_size];
        Ok(Self { bytes, page_size: meta.page_size, root: meta.root, was_read })
    }

    /// The bucket that has all others.
    pub(super) fn root(&self) -> Bucket<'a> {
        Bucket::From(self.root)
    }

    /// All that is in a bucket, by key. Each can be asked for once.
    pub(super) fn entries(&mut self, bucket: Bucket<'a>) -> Result<Vec<Entry<'a>>> {
        let mut entries = Vec::new();
        let mut to_read = Vec::new();
        match bucket {
            Bucket::From(page) => to_read.push(page),
            Bucket::Inline(page) => {
                take(page, &mut entries, &mut to_read).ok_or("a bucket within a page is damaged")?;
            }
        }
        while let Some(number) = to_read.pop() {
            let page = self.page(number)?;
            let before = to_read.len();
            take(page, &mut entries, &mut to_read).ok_or_else(|| format!("page {number} is damaged"))?;
            // The first one is the next one.
            to_read.get_mut(before..).unwrap_or_default().reverse();
        }
        Ok(entries)
    }

    /// A page with those that it fills besides.
    fn page(&mut self, number: u64) -> Result<&'a [u8]> {
        let cut_off = || format!("page {number} is cut off");
        let first = usize::try_from(number).ok().filter(|first| *first < self.was_read.len()).ok_or_else(cut_off)?;
        let rest = self.bytes.get(first * self.page_size..).ok_or_else(cut_off)?;
        if u64_at(rest, 0) != Some(number) {
            return Err(format!("page {number} is another one"));
        }
        let pages = size_at(rest, 12).ok_or_else(cut_off)?.saturating_add(1);
        let here = first..first.saturating_add(pages);
        let was_read = self.was_read.get_mut(here).ok_or_else(cut_off)?;
        if was_read.contains(&true) {
            return Err(format!("page {number} is in two places"));
        }
        was_read.fill(true);
        rest.get(..pages * self.page_size).ok_or_else(cut_off)
    }
}

/// Takes the entries of a page, or the pages that it names; `None` if it is damaged.
fn take<'a>(page: &'a [u8], entries: &mut Vec<Entry<'a>>, pages: &mut Vec<u64>) -> Option<()> {
    let (kind, count) = (u16_at(page, 8)?, usize::from(u16_at(page, 10)?));
    let mut free_from = HEAD + count * HEAD;
    for at in (HEAD..free_from).step_by(HEAD) {
        match kind {
            BRANCH => pages.push(u64_at(page, at + 8)?),
            LEAF => {
                let key_at = at.checked_add(size_at(page, at + 4)?)?;
                let value_at = key_at.checked_add(size_at(page, at + 8)?)?;
                let end = value_at.checked_add(size_at(page, at + 12)?)?;
                let (key, value) = (page.get(key_at..value_at)?, page.get(value_at..end)?);
                if key_at < free_from || entries.last().is_some_and(|(before, _)| *before >= key) {
                    return None;
                }
                free_from = end;
                let is_bucket = u32_at(page, at)? & IS_BUCKET != 0;
                entries.push((key, if is_bucket { Value::Bucket(bucket(value)?) } else { Value::Bytes(value) }));
            }
            _ => return None,
        }
    }
    (kind == LEAF || (kind == BRANCH && count > 0)).then_some(())
}

fn bucket(value: &[u8]) -> Option<Bucket<'_>> {
    Some(match u64_at(value, 0)? {
        0 => Bucket::Inline(value.get(HEAD..)?),
        page => Bucket::From(page),
    })
}

/// The checksum FNV-1a of 64 bits.
fn fnv_1a(bytes: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3);
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, step)
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    array_at(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    array_at(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    array_at(bytes, at).map(u64::from_le_bytes)
}

/// A number of 4 bytes that counts.
fn size_at(bytes: &[u8], at: usize) -> Option<usize> {
    u32_at(bytes, at).and_then(|size| size.try_into().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page: its entries, and the keys and values behind them.
    struct Page {
        kind: u16,
        overflow: u32,
        entries: Vec<[u8; HEAD]>,
        data: Vec<u8>,
    }

    /// A leaf of keys with values; `true` for a bucket.
    fn leaf(of: &[(&str, &[u8], bool)]) -> Page {
        let mut page = Page { kind: LEAF, overflow: 0, entries: Vec::new(), data: Vec::new() };
        for (number, (key, value, is_bucket)) in of.iter().enumerate() {
            let position = (of.len() - number) * HEAD + page.data.len();
            let numbers = [usize::from(*is_bucket), position, key.len(), value.len()];
            let bytes = numbers.map(|number| u32::try_from(number).unwrap().to_le_bytes());
            page.entries.push(bytes.concat().try_into().unwrap());
            page.data.extend([key.as_bytes(), value].concat());
        }
        page
    }

    fn branch(pages: &[u64]) -> Page {
        let entries = pages.iter().map(|page| u128::to_le_bytes(u128::from(*page) << 64)).collect();
        Page { kind: BRANCH, overflow: 0, entries, data: Vec::new() }
    }

    impl Page {
        fn bytes(&self, number: u64) -> Vec<u8> {
            let mut bytes = [number.to_le_bytes().to_vec(), self.kind.to_le_bytes().to_vec()].concat();
            bytes.extend(u16::try_from(self.entries.len()).unwrap().to_le_bytes());
            bytes.extend(self.overflow.to_le_bytes());
            [bytes, self.entries.concat(), self.data.clone()].concat()
        }

        /// An inline bucket.
        fn inline(&self) -> Vec<u8> {
            [vec![0; HEAD], self.bytes(0)].concat()
        }
    }

    fn meta(number: u64, page_size: usize, root: u64, transaction: u64) -> Vec<u8> {
        let mut bytes = [MAGIC, VERSION, u32::try_from(page_size).unwrap(), 0].map(u32::to_le_bytes).concat();
        bytes.extend([root, 0, 0, 0, transaction].map(u64::to_le_bytes).concat());
        bytes.extend(fnv_1a(&bytes).to_le_bytes());
        [number.to_le_bytes().to_vec(), vec![0; 8], bytes].concat()
    }

    /// A file whose root is page 2; a page with more than fits into one has those after it.
    fn file(page_size: usize, pages: &[Page]) -> Vec<u8> {
        let mut file = meta(0, page_size, 99, 7);
        file.resize(page_size, 0);
        file.extend(meta(1, page_size, 2, 8));
        file.resize(2 * page_size, 0);
        for page in pages {
            let number = u64::try_from(file.len() / page_size).unwrap();
            file.extend(page.bytes(number));
            file.resize(file.len().next_multiple_of(page_size), 0);
        }
        file
    }

    /// What is in the root, as text.
    fn root(file: &[u8]) -> Result<Vec<String>> {
        let mut bolt = Bolt::new(file)?;
        texts(bolt.root(), &mut bolt)
    }

    /// All in a bucket and in those within.
    fn texts<'a>(bucket: Bucket<'a>, bolt: &mut Bolt<'a>) -> Result<Vec<String>> {
        let mut all = Vec::new();
        for (key, value) in bolt.entries(bucket)? {
            let key = String::from_utf8_lossy(key);
            match value {
                Value::Bytes(value) => all.push(format!("{key}={}", String::from_utf8_lossy(value))),
                Value::Bucket(bucket) => all.extend(texts(bucket, bolt)?.iter().map(|entry| format!("{key}/{entry}"))),
            }
        }
        Ok(all)
    }

    #[test]
    fn pages_of_every_size_are_read() {
        for page_size in [1024, 4096, 65_536] {
            let within = leaf(&[("c", b"3", false), ("d", b"4", false)]).inline();
            let at_5 = [5_u64, 0].map(u64::to_le_bytes).concat();
            let long = vec![b'x'; 2 * page_size];
            let mut last = leaf(&[("e", b"", false), ("f", &long, false)]);
            last.overflow = 2;
            let pages =
                [branch(&[3, 4]), leaf(&[("a", b"1", false), ("b", &within, true)]), leaf(&[("g", &at_5, true)]), last];
            let whole = file(page_size, &pages);
            let long = format!("g/f={}", String::from_utf8_lossy(&long));
            assert_eq!(root(&whole).unwrap(), ["a=1", "b/c=3", "b/d=4", "g/e=", &long]);
            // Page 0 is damaged, so its page size is not known.
            let mut damaged = whole.clone();
            damaged[..page_size].fill(0);
            assert!(is_bolt(&damaged) && root(&damaged).is_ok());
            assert_eq!(root(&whole[..whole.len() - 1]).unwrap_err(), "page 5 is cut off");
        }
        assert!(!is_bolt(b"") && !is_bolt(&[b'['; 4096]));
    }

    #[test]
    fn what_leads_nowhere_or_back_is_refused() {
        let at_2 = [2_u64, 0].map(u64::to_le_bytes).concat();
        let spread = Page { overflow: 1, ..leaf(&[]) };
        let endless = Page { overflow: u32::MAX, ..leaf(&[]) };
        for (pages, wrong) in [
            (vec![branch(&[2])], "page 2 is in two places"),
            (vec![branch(&[3, 3]), leaf(&[])], "page 3 is in two places"),
            (vec![leaf(&[("a", &at_2, true)])], "page 2 is in two places"),
            (vec![branch(&[3, 4]), spread, leaf(&[])], "page 4 is in two places"),
            (vec![branch(&[0])], "page 0 is damaged"),
            (vec![branch(&[u64::MAX])], "page 18446744073709551615 is cut off"),
            (vec![branch(&[])], "page 2 is damaged"),
            (vec![endless], "page 2 is cut off"),
            (vec![Page { kind: 16, ..leaf(&[]) }], "page 2 is damaged"),
            (vec![leaf(&[("b", b"", false), ("a", b"", false)])], "page 2 is damaged"),
            (vec![leaf(&[("a", &[0; 15], true)])], "page 2 is damaged"),
            (vec![leaf(&[("a", &[0; 20], true)])], "a bucket within a page is damaged"),
        ] {
            assert_eq!(root(&file(1024, &pages)).unwrap_err(), wrong);
        }
    }

    #[test]
    fn what_lies_outside_or_in_two_entries_is_refused() {
        let two = || leaf(&[("a", b"1", false), ("b", b"2", false)]);
        assert_eq!(root(&file(1024, &[two()])).unwrap(), ["a=1", "b=2"]);
        // Where an entry's key begins, how long it is, and how long the value.
        let (begins, key, value) = (4, 8, 12);
        for (entry, at, number) in [
            (0, begins, 0_u32),
            (0, value, 2),
            (1, begins, 15),
            (1, begins, 2000),
            (1, begins, u32::MAX),
            (1, key, 2000),
            (1, key, u32::MAX),
            (1, value, 2000),
        ] {
            let mut page = two();
            page.entries[entry][at..at + 4].copy_from_slice(&number.to_le_bytes());
            assert_eq!(root(&file(1024, &[page])).unwrap_err(), "page 2 is damaged", "{entry}, {at}: {number}");
        }
        let mut elsewhere = file(1024, &[two()]);
        elsewhere[2 * 1024] = 3;
        assert_eq!(root(&elsewhere).unwrap_err(), "page 2 is another one");
    }
}
