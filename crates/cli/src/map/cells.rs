//! The signs and colours that show the use of addresses.

use ipam_core::census::AddressUse;

/// The meaning of a sign for one address, or for several that share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cell {
    /// The use of all these addresses; if they differ, the one that comes first in [`Cell::of`].
    All(AddressUse),
    /// Some of these addresses are in use, and none is borrowed.
    Some,
}

/// The uses of an address, each with its sign, its name and its colour in a picture.
pub(super) const USES: [(AddressUse, char, &str, &str); 5] = [
    (AddressUse::Free, '.', "free", "#e8e8e8"),
    (AddressUse::Used, '#', "in use", "#0059b3"),
    (AddressUse::Borrowed, 'b', "borrowed by another node", "#b3007d"),
    (AddressUse::InCooldown, '~', "in cooldown", "#e0a000"),
    (AddressUse::Reserved, 'r', "reserved", "#707070"),
];

fn row(wanted: AddressUse) -> (char, &'static str) {
    USES.iter().find(|(found, ..)| *found == wanted).map_or((' ', ""), |(_, sign, _, colour)| (*sign, colour))
}

/// The sign of an address.
pub(super) fn sign(wanted: AddressUse) -> char {
    row(wanted).0
}

/// The colour of an address in a picture.
pub(super) fn colour(wanted: AddressUse) -> &'static str {
    row(wanted).1
}

/// The colour of a block of which so many tenths cannot be assigned.
pub(super) fn colour_of_tenths(tenths: usize) -> &'static str {
    const COLOURS: [&str; 11] = [
        "#e8e8e8", "#cfe0f2", "#b5d2ec", "#9ac3e6", "#7fb3df", "#63a3d8", "#4793d0", "#2c82c7", "#1470bd", "#005eb0",
        "#b32400",
    ];
    COLOURS.get(tenths).copied().unwrap_or("#b32400")
}

impl Cell {
    /// The sign of several addresses: if they differ, borrowed ones come first, then used, resting and free ones.
    pub(super) fn of(uses: &[AddressUse]) -> Self {
        let has = |wanted| uses.contains(&wanted);
        match uses {
            [first, rest @ ..] if rest.iter().all(|found| found == first) => Self::All(*first),
            _ if has(AddressUse::Borrowed) => Self::All(AddressUse::Borrowed),
            _ if has(AddressUse::Used) => Self::Some,
            _ if has(AddressUse::InCooldown) => Self::All(AddressUse::InCooldown),
            _ => Self::All(AddressUse::Free),
        }
    }

    /// The sign.
    pub(super) fn sign(self) -> char {
        match self {
            Self::All(found) => sign(found),
            Self::Some => '+',
        }
    }

    /// The number of its colour in a terminal; `None` for the usual one.
    pub(super) fn terminal_colour(self) -> Option<u8> {
        match self {
            Self::All(AddressUse::Free) => None,
            Self::All(AddressUse::Used) | Self::Some => Some(34),
            Self::All(AddressUse::Borrowed) => Some(35),
            Self::All(AddressUse::InCooldown) => Some(33),
            Self::All(AddressUse::Reserved) => Some(90),
        }
    }
}

/// The sign of a block of which so many tenths cannot be assigned.
pub(super) fn sign_of_tenths(tenths: usize) -> char {
    match tenths {
        0 => '.',
        10 => '#',
        tenths => char::from_digit(u32::try_from(tenths).unwrap_or(9), 10).unwrap_or('9'),
    }
}

/// The number of the colour of such a block in a terminal.
pub(super) fn terminal_colour_of_tenths(tenths: usize) -> Option<u8> {
    match tenths {
        0 => None,
        1..6 => Some(32),
        6..10 => Some(33),
        _ => Some(31),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sign_tells_the_most_of_what_it_stands_for() {
        use AddressUse::{Borrowed, Free, InCooldown, Reserved, Used};
        let reported = [
            (vec![Free, Free], '.'),
            (vec![Used, Used], '#'),
            (vec![Free, Used], '+'),
            (vec![Free, Borrowed, Used], 'b'),
            (vec![Free, InCooldown], '~'),
            (vec![Reserved, Reserved], 'r'),
            (vec![Reserved, Free], '.'),
        ];
        for (uses, sign) in reported {
            assert_eq!(Cell::of(&uses).sign(), sign, "{uses:?}");
        }
    }
}
