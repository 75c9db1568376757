use std::collections::BTreeSet;

use super::*;
use crate::luck::{Cut, Folders};

/// All that cuts with many seeds leave.
fn outcomes(file: &File) -> BTreeSet<Vec<u8>> {
    (0..2_000).map(|seed| file.after_cut(&mut Luck::new(Cut { seed, folders: Folders::Strict }))).collect()
}

/// A file of sectors that are filled with one byte each.
fn sectors(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().flat_map(|byte| [*byte; SECTOR]).collect()
}

#[test]
fn a_write_is_cut_into_sectors() {
    let ends = |at, length| pieces(at, length).map(|piece| (piece.start, piece.end)).collect::<Vec<_>>();
    assert_eq!(ends(0, 0), []);
    assert_eq!(ends(100, 412), [(100, 512)]);
    assert_eq!(ends(500, 600), [(500, 512), (512, 1024), (1024, 1100)]);
}

#[test]
fn what_was_synced_stays() {
    let mut file = File::default();
    file.write(0, &sectors(b"abc"));
    file.set_length(700);
    file.write(1000, b"x");
    let seen = file.content().to_vec();
    file.sync();
    assert_eq!(outcomes(&file), [seen].into());
}

#[test]
fn any_subset_of_sectors_survives() {
    let mut file = File::durable(sectors(b"abc"));
    file.write(0, &sectors(b"ABC"));
    let expected = ["abc", "Abc", "aBc", "abC", "ABc", "AbC", "aBC", "ABC"];
    assert_eq!(outcomes(&file), expected.map(|sectors_left| sectors(sectors_left.as_bytes())).into());
}

#[test]
fn a_sector_is_as_it_was_at_some_moment() {
    let mut file = File::durable(sectors(b"a"));
    file.write(0, b"1");
    file.write(1, b"2");
    let texts: BTreeSet<_> = outcomes(&file).into_iter().map(|left| left[..3].to_vec()).collect();
    assert_eq!(texts, [b"aaa".to_vec(), b"1aa".to_vec(), b"12a".to_vec()].into(), "the second never without the first");
}

#[test]
fn lengths_survive_in_order_and_show_zeros() {
    let mut file = File::durable(sectors(b"a"));
    file.set_length(0);
    file.write(0, b"bb");
    let left = outcomes(&file);
    let mut kept = sectors(b"a");
    assert!(left.contains(&kept), "nothing got through");
    kept[..2].copy_from_slice(b"bb");
    let expected: BTreeSet<Vec<u8>> =
        [sectors(b"a"), kept, Vec::new(), b"\0\0".to_vec(), b"bb".to_vec()].into_iter().collect();
    assert_eq!(left, expected);
}
