//! Blocks in a terminal.

use std::net::IpAddr;

use super::cells::{Cell, USES, sign_of_tenths, terminal_colour_of_tenths};
use super::{Detail, Drawn, Section};

/// In pools with more places for blocks than this, only claimed blocks are drawn.
const MOST_PLACES: u64 = 4096;
/// The length of the longest name of an owner that is drawn whole.
const MOST_OF_OWNER: usize = 24;
/// The least number of signs of a line, however narrow the terminal is.
const LEAST_CELLS: usize = 8;
/// The sign of a place without a claimed block.
const UNCLAIMED: char = '-';

/// The look of a drawing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    /// The number of columns.
    pub(crate) width: usize,
    /// True if there are colours.
    pub(crate) colours: bool,
    /// The detail.
    pub(crate) detail: Detail,
}

/// Draws pools one below the other, with the meaning of the signs at the end.
pub(crate) fn draw(sections: &[Section], style: Style) -> String {
    let mut text = String::new();
    let (mut has_addresses, mut has_blocks) = (false, false);
    for section in sections {
        text.push_str(&section.heading());
        text.push('\n');
        if section.blocks.is_empty() {
            text.push('\n');
            continue;
        }
        if section.in_detail(style.detail) {
            has_addresses = true;
            addresses(&section.blocks, style, &mut text);
        } else {
            has_blocks = true;
            blocks(section, style, &mut text);
        }
        text.push('\n');
    }
    if has_addresses {
        let reported = USES.map(|(_, sign, name, _)| format!("{sign} {name}"));
        text.push_str(&format!("{}   + some in use\n", reported.join("   ")));
    }
    if has_blocks {
        text.push_str(&format!(
            "a sign is a block: . all free   1 to 9 tenths that are not   # none free   {UNCLAIMED} not claimed\n"
        ));
    }
    text
}

/// Draws a line for each block, with a sign for each address, or for several if there is not enough room.
fn addresses(blocks: &[Drawn], style: Style, text: &mut String) {
    let cidrs = blocks.iter().map(|block| block.cidr.len()).max().unwrap_or_default();
    let owners = blocks.iter().map(|block| short(&block.owner).chars().count()).max().unwrap_or_default();
    let counts = blocks.iter().map(|block| count(block).len()).max().unwrap_or_default();
    let room = style.width.saturating_sub(cidrs + owners + counts + 6).max(LEAST_CELLS);
    for block in blocks {
        let each = block.uses.len().div_ceil(room).max(1);
        let cells: Vec<Cell> = block.uses.chunks(each).map(Cell::of).collect();
        let owner = short(&block.owner);
        text.push_str(&format!("{:cidrs$}  {owner:owners$}  ", block.cidr));
        paint(cells.iter().map(|cell| (cell.sign(), cell.terminal_colour())), style.colours, text);
        let padding = room.min(block.uses.len()).saturating_sub(cells.len());
        text.push_str(&format!("{:padding$}  {:>counts$}\n", "", count(block)));
    }
}

fn count(block: &Drawn) -> String {
    format!("{}/{}", block.in_use, block.uses.len())
}

fn short(owner: &str) -> String {
    if owner.chars().count() <= MOST_OF_OWNER {
        return owner.to_owned();
    }
    let kept: String = owner.chars().take(MOST_OF_OWNER - 1).collect();
    format!("{kept}~")
}

/// Draws a sign for each block, and for each place without a block if there are not too many places.
fn blocks(section: &Section, style: Style, text: &mut String) {
    let places = places(section);
    let label = |place: &Place<'_>| place.first.to_string();
    let labels = places.iter().map(|place| label(place).len()).max().unwrap_or_default();
    let room = style.width.saturating_sub(labels + 2).max(LEAST_CELLS);
    // A power of two, so that lines begin at round addresses.
    let each = 1 << room.ilog2();
    for line in places.chunks(each) {
        let Some(first) = line.first() else { continue };
        text.push_str(&format!("{:labels$}  ", label(first)));
        let cells = line.iter().map(|place| match place.block {
            Some(block) => (sign_of_tenths(block.tenths()), terminal_colour_of_tenths(block.tenths())),
            None => (UNCLAIMED, Some(90)),
        });
        paint(cells, style.colours, text);
        text.push('\n');
    }
}

/// A place for a block.
struct Place<'a> {
    first: IpAddr,
    block: Option<&'a Drawn>,
}

fn places(section: &Section) -> Vec<Place<'_>> {
    let claimed = |block| Place { first: Drawn::first(block), block: Some(block) };
    let all = section.places.filter(|places| *places <= MOST_PLACES);
    let bits = section.blocks.first().map(|block| block.net.prefix_len());
    let pool = section.cidr.as_ref().and_then(|cidr| cidr.parse::<ipnet::IpNet>().ok());
    let even = bits.filter(|bits| section.blocks.iter().all(|block| block.net.prefix_len() == *bits));
    let (Some(_), Some(bits), Some(pool)) = (all, even, pool) else {
        return section.blocks.iter().map(claimed).collect();
    };
    let Ok(subnets) = pool.subnets(bits) else { return section.blocks.iter().map(claimed).collect() };
    let mut blocks = section.blocks.iter().peekable();
    subnets.map(|net| Place { first: net.network(), block: blocks.next_if(|block| block.net == net) }).collect()
}

impl Drawn {
    fn first(&self) -> IpAddr {
        self.net.network()
    }
}

/// Writes signs; neighbours of one colour share its escape sequence.
fn paint(cells: impl Iterator<Item = (char, Option<u8>)>, colours: bool, text: &mut String) {
    let mut now = None;
    for (sign, colour) in cells {
        if colours && colour != now {
            text.push_str(&colour.map_or("\u{1b}[0m".to_owned(), |number| format!("\u{1b}[0;{number}m")));
            now = colour;
        }
        text.push(sign);
    }
    if now.is_some() {
        text.push_str("\u{1b}[0m");
    }
}
