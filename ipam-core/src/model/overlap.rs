//! Computes key ranges that cover the keys of all blocks overlapping with a CIDR.
//!
//! Two blocks overlap if one contains the other. A block's key contains the block's first address as text. Only a few
//! keys are possible for blocks that contain the CIDR. The keys of blocks inside the CIDR do not sort by address: for
//! example, `10.0.0.13-26` sorts between `10.0.0.128-26` and `10.0.0.140-26`. A [`Cover`] has a few coarse ranges,
//! which also contain the keys of blocks that do not overlap. For a CIDR of at most 64 addresses or prefixes, the cover
//! also has exact ranges.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};

use ipnet::IpNet;
use kv::{Key, Range};

use super::is_of_prefixes;
use super::keys::{blocks_of_addresses_prefix, blocks_of_prefixes_prefix};
use crate::net::Family;

/// If the last byte (IPv4) or group (IPv6) of an address has at most this many possible values, a coarse cover has one
/// range per value.
const MAX_SINGLE_ADDRESSES: u32 = 2;
/// If a byte (IPv4) or group (IPv6) of an address, except the last one, has at most this many possible values, a coarse
/// cover has one range per value.
const MAX_SINGLE_PARTS: u32 = 16;
/// If a byte (IPv4) or group (IPv6) of an address has at most this many possible values, an exact cover has one range
/// per value.
const MAX_EXACT_RANGES: u32 = 64;

/// Key ranges of the blocks that lie inside a CIDR, or of the blocks that contain the CIDR. A cover is either for
/// blocks of addresses or for blocks of prefixes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cover {
    /// A few key ranges that contain the keys of all overlapping blocks, and possibly the keys of other blocks.
    pub coarse: Vec<Range>,
    /// Key ranges that contain only the keys of overlapping blocks, or `None` if too many ranges would be needed.
    pub exact: Option<Vec<Range>>,
}

/// Which key ranges of a [`Cover`] to compute. The exact ranges, up to 64 per cover, are needed only if thousands of
/// other blocks are stored near the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Computes a few coarse key ranges, which may also contain keys of blocks that do not overlap.
    Coarse,
    /// Computes both the coarse and the exact key ranges of the blocks that can overlap with a block.
    Exact,
}

/// Returns key ranges ([`Cover`]) that contain the key of the given block and the keys of all blocks that overlap with
/// it.
pub fn covers_of_overlaps(block: IpNet, precision: Precision) -> Vec<Cover> {
    let family = Family::of_net(block);
    let mut covers = Vec::new();
    if is_of_prefixes(block) {
        for prefix in [blocks_of_prefixes_prefix(family), blocks_of_addresses_prefix(family)] {
            covers.push(inside(&prefix, block, precision));
        }
        let around = around(&blocks_of_prefixes_prefix(family), block, 0..block.prefix_len());
        covers.push(Cover { coarse: around.clone(), exact: Some(around) });
    } else {
        covers.extend(covers_of_addresses(block, precision));
        let largest = *family.block_sizes().start();
        // A block of prefixes that overlaps with `block` must be larger than `block`, and usually none is stored.
        let prefixes = blocks_of_prefixes_prefix(family);
        let exact = around(&prefixes, block, 0..largest);
        covers.push(Cover { coarse: vec![Range::Prefix(prefixes)], exact: Some(exact) });
    }
    covers
}

/// Returns a few key ranges that contain the keys of all blocks overlapping with any of the given blocks.
pub fn ranges_around(blocks: &[IpNet]) -> Vec<Range> {
    merged(blocks.iter().flat_map(|block| covers_of_overlaps(*block, Precision::Coarse)).flat_map(|cover| cover.coarse))
}

/// Merges key ranges whose block addresses differ only in the last byte or group. Merging key ranges can add keys of
/// blocks that do not overlap with the given block.
fn merged(ranges: impl Iterator<Item = Range>) -> Vec<Range> {
    let mut by_parent: BTreeMap<Key, (Key, Option<Key>)> = BTreeMap::new();
    for range in ranges.collect::<BTreeSet<_>>() {
        let (from, to) = range.bounds();
        // `end` is the length of the key before the last byte (IPv4) or group (IPv6) of the block's address.
        let end = from.as_bytes().iter().rposition(|byte| matches!(byte, b'.' | b':' | b'/')).map_or(0, |end| end + 1);
        let parent = Key::from(&from.as_bytes()[..end]);
        let span = by_parent.entry(parent).or_insert_with(|| (from.clone(), to.clone()));
        if from < span.0 {
            span.0 = from;
        }
        span.1 = span.1.take().and_then(|known| to.map(|to| known.max(to)));
    }
    let spans = by_parent.into_values();
    spans.map(|(from, to)| to.map_or(Range::From(from.clone()), |to| Range::FromTo(from, to))).collect()
}

/// Returns a few key ranges that contain the key of `block` and the keys of all blocks of addresses that overlap with
/// `block`.
pub fn overlaps_of_addresses(block: IpNet) -> Vec<Range> {
    merged(covers_of_addresses(block, Precision::Coarse).into_iter().flat_map(|cover| cover.coarse))
}

/// Returns two covers for a block of addresses: one for the smaller blocks inside it, and one for the larger blocks
/// that contain it.
fn covers_of_addresses(block: IpNet, precision: Precision) -> [Cover; 2] {
    let family = Family::of_net(block);
    let blocks = blocks_of_addresses_prefix(family);
    let inside = inside(&blocks, block, precision);
    let larger = *family.block_sizes().start()..block.prefix_len();
    let mut around = around(&blocks, block, larger.clone());
    // The cover of the blocks inside `block` already contains all keys with the first address of `block`, so the cover
    // of the blocks that contain `block` omits them.
    let first = of_lengths(&blocks, block.network(), &larger);
    around.retain(|range| *range != first);
    [inside, Cover { coarse: around.clone(), exact: Some(around) }]
}

/// Returns the key ranges of the blocks that contain a given block and have one of the given prefix lengths.
fn around(prefix: &Key, block: IpNet, lengths: std::ops::Range<u8>) -> Vec<Range> {
    let family = Family::of_net(block);
    let networks = lengths.clone().filter_map(|length| Some(family.network(block.network(), length)?.network()));
    let bases: BTreeSet<IpAddr> = networks.collect();
    bases.into_iter().map(|base| of_lengths(prefix, base, &lengths)).collect()
}

/// Returns the key range of the blocks that begin at `base` and have one of the given prefix lengths. If the prefix
/// lengths have different numbers of digits, the range also contains the keys of blocks of other lengths.
fn of_lengths(prefix: &Key, base: IpAddr, lengths: &std::ops::Range<u8>) -> Range {
    let key_of = |length: u8| key(prefix, &format!("{base}-{length}"));
    if lengths.start.to_string().len() == lengths.end.to_string().len() {
        // A block of another length at `base` is usually a neighbour that another node is just about to create. If the
        // range contained its key, one of the two nodes would have to try again.
        return Range::FromTo(key_of(lengths.start), key_of(lengths.end));
    }
    single(prefix, &base.to_string(), '-')
}

/// Returns a [`Cover`], which contains the keys of all blocks whose first address lies inside `block`.
fn inside(prefix: &Key, block: IpNet, precision: Precision) -> Cover {
    match block.network() {
        IpAddr::V4(first) => {
            let parts = first.octets().map(u32::from);
            let place = block.prefix_len().min(31) / 8;
            let end = 8 * (u32::from(place) + 1);
            let place = usize::from(place);
            let head: String = parts[..place].iter().map(|part| format!("{part}.")).collect();
            let numbers = Numbers::of(parts[place], end, block.prefix_len(), 10);
            numbers.cover(prefix, &[head], if place == 3 { '-' } else { '.' }, precision)
        }
        IpAddr::V6(first) => inside_v6(prefix, first, block.prefix_len(), precision),
    }
}

fn inside_v6(prefix: &Key, first: Ipv6Addr, length: u8, precision: Precision) -> Cover {
    let groups = first.segments();
    let place = length.min(127) / 16;
    let end = 16 * (u32::from(place) + 1);
    let place = usize::from(place);
    let mut numbers = Numbers::of(groups[place].into(), end, length, 16);
    let (end, mut heads) = (if place == 7 { '-' } else { ':' }, Vec::new());
    // If the first group that varies inside the CIDR is zero, `::` can replace this group together with zero groups
    // before it, which changes the text of the key.
    let mut zero = Vec::new();
    if numbers.low == 0 {
        let trailing = groups[..place].iter().rev().take_while(|group| **group == 0).count();
        zero = if place == 7 {
            vec![single(prefix, &first.to_string(), '-')]
        } else {
            vec![Range::Prefix(key(prefix, &format!("{}::", joined(&groups[..place - trailing]))))]
        };
        numbers.low = u32::from(place == 7);
    }
    if place == 7 {
        let mut other = groups;
        other[7] = 1;
        heads.extend(Ipv6Addr::from(other).to_string().strip_suffix('1').map(str::to_owned));
    } else {
        // IPv6 text compresses a run of zeros in the leading groups to `::`, unless a longer run follows.
        heads.push(groups[..place].iter().map(|group| format!("{group:x}:")).collect());
        for (from, to) in runs_of_zeros(&groups[..place]) {
            let rest: String = groups[to..place].iter().map(|group| format!("{group:x}:")).collect();
            heads.push(format!("{}::{rest}", joined(&groups[..from])));
        }
    }
    let mut cover = numbers.cover(prefix, &heads, end, precision);
    cover.coarse.splice(0..0, zero.iter().cloned());
    if let Some(exact) = &mut cover.exact {
        exact.splice(0..0, zero);
    }
    cover
}

/// The values that one part (byte or group) of an address can have inside a CIDR.
struct Numbers {
    low: u32,
    high: u32,
    /// The greatest possible value of a byte or group of an address: 255 or 65535.
    most: u32,
    base: u32,
}

impl Numbers {
    /// Computes the possible values of the byte or group that ends at bit `end`, for the addresses in a CIDR of prefix
    /// length `length`. `low` is the value of the byte or group that ends at bit `end`, in the CIDR's first address.
    fn of(low: u32, end: u32, length: u8, base: u32) -> Self {
        let bits = end.saturating_sub(u32::from(length));
        let most = if base == 10 { 0xff } else { 0xffff };
        Self { low, high: low | (1_u32.checked_shl(bits).unwrap_or(0).wrapping_sub(1) & most), most, base }
    }

    fn cover(&self, prefix: &Key, heads: &[String], end: char, precision: Precision) -> Cover {
        let text = |number| if self.base == 10 { format!("{number}") } else { format!("{number:x}") };
        let each = || -> Vec<Range> {
            let numbers = self.low..=self.high;
            let texts = numbers.flat_map(|number| heads.iter().map(move |head| format!("{head}{}", text(number))));
            texts.map(|text| single(prefix, &text, end)).collect()
        };
        let count = (self.high + 1).saturating_sub(self.low);
        let max_single = if end == '-' { MAX_SINGLE_ADDRESSES } else { MAX_SINGLE_PARTS };
        let coarse = if self.low == 0 && self.high == self.most {
            heads.iter().map(|head| Range::Prefix(key(prefix, head))).collect()
        } else if count <= max_single {
            each()
        } else {
            let spans = self.spans();
            let of = |head: &String| -> Vec<Range> {
                let range = |(low, high): &(u32, u32)| span(prefix, head, &text(*low), &text(*high), end);
                spans.iter().map(range).collect()
            };
            heads.iter().flat_map(of).collect()
        };
        Cover { coarse, exact: (precision == Precision::Exact && count <= MAX_EXACT_RANGES).then(each) }
    }

    /// Splits the range of numbers into ranges with the same number of digits, because numbers written as text sort by
    /// value only if their lengths are equal.
    fn spans(&self) -> Vec<(u32, u32)> {
        let (mut spans, mut first) = (Vec::new(), 0);
        let mut next = self.base;
        while first <= self.high {
            let (low, high) = (first.max(self.low), (next - 1).min(self.high));
            if low <= high {
                spans.push((low, high));
            }
            (first, next) = (next, next * self.base);
        }
        spans
    }
}

/// Returns the runs of at least two zero groups, as pairs of start index and exclusive end index.
fn runs_of_zeros(groups: &[u16]) -> Vec<(usize, usize)> {
    let (mut runs, mut from) = (Vec::new(), 0);
    for to in 0..=groups.len() {
        if groups.get(to) != Some(&0) {
            if to >= from + 2 {
                runs.push((from, to));
            }
            from = to + 1;
        }
    }
    runs
}

fn joined(groups: &[u16]) -> String {
    groups.iter().map(|group| format!("{group:x}")).collect::<Vec<_>>().join(":")
}

fn key(prefix: &Key, text: &str) -> Key {
    let mut bytes = prefix.as_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes.into()
}

/// Returns the range of the keys that begin with `prefix`, followed by `text` and the character `end`.
fn single(prefix: &Key, text: &str, end: char) -> Range {
    Range::Prefix(key(prefix, &format!("{text}{end}")))
}

/// Returns the range from the key `{prefix}{head}{low}{end}` to the last key that begins with
/// `{prefix}{head}{high}{end}`.
fn span(prefix: &Key, head: &str, low: &str, high: &str, end: char) -> Range {
    let last = Range::Prefix(key(prefix, &format!("{head}{high}{end}")));
    let first = key(prefix, &format!("{head}{low}{end}"));
    match last.bounds().1 {
        Some(to) => Range::FromTo(first, to),
        None => Range::From(first),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::keys;
    use crate::net::overlap;

    /// Generates pairs of nearby CIDRs whose addresses may contain runs of zeros.
    fn nets() -> impl Strategy<Value = (IpNet, IpNet)> {
        let v4 = (any::<u16>(), any::<u16>(), 0_u8..=32, 0_u8..=32, 0_u32..4096).prop_map(|(low, high, a, b, off)| {
            let first = (u32::from(high) << 16) | u32::from(low);
            let net =
                |bits: u32, length| Family::V4.network(std::net::Ipv4Addr::from_bits(bits).into(), length).unwrap();
            (net(first, a), net(first ^ off, b))
        });
        let group = || prop_oneof![Just(0_u16), Just(1), any::<u16>(), 0_u16..0x200];
        let v6 = (proptest::array::uniform8(group()), 0_u8..=128, 0_u8..=128, 0_u32..7, any::<u16>()).prop_map(
            |(groups, a, b, part, off)| {
                let first = Ipv6Addr::from(groups).to_bits();
                let net = |bits, length| Family::V6.network(Ipv6Addr::from_bits(bits).into(), length).unwrap();
                (net(first, a), net(first ^ (u128::from(off) << (16 * part)), b))
            },
        );
        prop_oneof![v4, v6]
    }

    fn is_in<'r>(ranges: impl IntoIterator<Item = &'r Range>, key: &Key) -> bool {
        ranges.into_iter().any(|range| range.contains(key.as_bytes()))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]
        #[test]
        fn cover_has_keys_of_all_overlapping_blocks((block, other) in nets()) {
            let (covers, key) = (covers_of_overlaps(block, Precision::Exact), keys::block(other));
            let overlaps = overlap(block, other);
            prop_assert!(!overlaps || is_in(covers.iter().flat_map(|cover| &cover.coarse), &key), "{block} {other}");
            let several = ranges_around(&[block, other]);
            prop_assert!(!overlaps || is_in(&several, &key), "{block} {other}");
            let exact = covers.iter().flat_map(|cover| cover.exact.as_ref().unwrap_or(&cover.coarse));
            prop_assert!(!overlaps || is_in(exact, &key), "{block} {other}");
        }
    }

    #[test]
    fn cover_of_usual_block_is_short() {
        let count = |block: &str| -> Vec<usize> {
            covers_of_overlaps(block.parse().unwrap(), Precision::Coarse)
                .iter()
                .map(|cover| cover.coarse.len())
                .collect()
        };
        let counts = [
            "10.65.166.64/26",
            "10.65.166.0/26",
            "10.65.160.0/24",
            "10.65.160.0/20",
            "10.65.166.77/32",
            "fd80:24e2:f998:72d6:c11:b42f:f17e:a680/122",
            "2001:db8:12:40::/58",
        ]
        .map(count);
        let expected = [[2, 3, 1], [2, 2, 1], [1, 0, 1], [16, 0, 1], [1, 6, 1], [1, 3, 1], [1, 1, 12]];
        assert_eq!(counts.concat(), expected.concat());
    }

    #[test]
    fn cover_leaves_out_neighbours_of_same_size() {
        let neighbours = |block: &str| -> Vec<String> {
            let block: IpNet = block.parse().unwrap();
            let covers = covers_of_overlaps(block, Precision::Coarse);
            let around = block.supernet().and_then(|net| net.supernet()).unwrap();
            let same_size = around.subnets(block.prefix_len()).unwrap().filter(|other| *other != block);
            let covered =
                same_size.filter(|other| is_in(covers.iter().flat_map(|cover| &cover.coarse), &keys::block(*other)));
            covered.map(|other| other.to_string()).collect()
        };
        for block in ["10.0.0.64/26", "10.0.0.128/26", "10.0.0.192/26", "10.0.0.16/28", "fd00:10::40/122"] {
            assert_eq!(neighbours(block), [""; 0], "{block}");
        }
        // As text, 64, 128 and 192 are between 0 and 9.
        assert_eq!(neighbours("10.0.0.0/26"), ["10.0.0.64/26", "10.0.0.128/26", "10.0.0.192/26"]);
    }

    #[test]
    fn cover_when_exact_leaves_out_other_blocks() {
        let exact = |block: &str| covers_of_overlaps(block.parse().unwrap(), Precision::Exact);
        let covers = exact("10.0.0.0/26");
        let other = keys::block("10.0.0.128/26".parse().unwrap());
        assert!(is_in(&covers[0].coarse, &other));
        assert!(covers.iter().all(|cover| !is_in(cover.exact.as_ref().unwrap(), &other)));
        assert_eq!(exact("10.0.0.0/20")[0].exact.as_ref().map(Vec::len), Some(16));
        assert_eq!(exact("10.0.0.0/25")[0].exact, None);
    }
}
