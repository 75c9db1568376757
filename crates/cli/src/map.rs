//! Draws which addresses in the blocks of pools are in use. A drawing is text for a terminal, an SVG picture, or an
//! HTML page with the SVG picture.

use std::fmt::Write;
use std::net::IpAddr;

use ipam_core::census::{AddressUse, BlockCensus, Census};
use ipnet::IpNet;
use serde::Serialize;

use crate::output::printable;

/// A pool with at most `MAX_BLOCKS_IN_DETAIL` blocks is drawn with one character for each address, a larger pool with
/// one character for each block.
const MAX_BLOCKS_IN_DETAIL: usize = 64;

/// Whether one character of a drawing stands for an address or for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MapDetail {
    /// One character for each address in pools with at most [`MAX_BLOCKS_IN_DETAIL`] blocks, and for each block in
    /// larger pools.
    Auto,
    Addresses,
    Blocks,
}

/// A section of a drawing: the blocks of a pool, or the blocks that are in no pool.
#[derive(Debug, Serialize)]
pub(crate) struct MapSection {
    /// The pool's name; `None` for blocks that are in no pool.
    pub(crate) pool: Option<String>,
    /// The pool's network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cidr: Option<String>,
    /// The number of blocks that fit into the pool; `None` if the number is too large to draw.
    #[serde(skip)]
    pub(crate) places: Option<u64>,
    blocks: Vec<DrawnBlock>,
}

/// A block to draw, and how its addresses are used.
#[derive(Debug, Serialize)]
struct DrawnBlock {
    cidr: String,
    /// The node or virtual owner of the block; empty if the block has no owner.
    owner: String,
    /// The number of the block's addresses that are in use, including borrowed addresses.
    in_use: usize,
    /// The number of the block's addresses that are in use by nodes other than the block's owner.
    borrowed: usize,
    in_cooldown: usize,
    /// The number of the block's reserved addresses that are not in use.
    reserved: usize,
    /// The number of the block's addresses that can be assigned.
    free: usize,
    /// The characters that show the use of the block's addresses, one for each address.
    addresses: String,
    #[serde(skip)]
    uses: Vec<AddressUse>,
    #[serde(skip)]
    net: IpNet,
}

/// Returns the sections to draw: the named pools, or if `pools` is empty, all pools and the blocks that are in no pool.
pub(crate) fn sections(census: Census, pools: &[String]) -> Vec<MapSection> {
    let wanted = |name: &str, cidr: IpNet| {
        pools.is_empty() || pools.iter().any(|pool| pool == name || *pool == cidr.to_string())
    };
    let mut sections: Vec<MapSection> = Vec::new();
    for pool in census.pools.into_iter().filter(|pool| wanted(pool.pool.name(), pool.pool.cidr())) {
        let bits = u32::from(pool.pool.block_size().saturating_sub(pool.pool.cidr().prefix_len()));
        sections.push(MapSection {
            pool: Some(printable(pool.pool.name())),
            cidr: Some(pool.pool.cidr().to_string()),
            places: 1_u64.checked_shl(bits).filter(|_| bits < 40),
            blocks: pool.blocks.into_iter().map(DrawnBlock::new).collect(),
        });
    }
    if pools.is_empty() && !census.orphaned.is_empty() {
        let blocks = census.orphaned.into_iter().map(DrawnBlock::new).collect();
        sections.push(MapSection { pool: None, cidr: None, places: None, blocks });
    }
    sections
}

impl DrawnBlock {
    fn new(block: BlockCensus) -> Self {
        let count = |wanted| block.count(wanted);
        let borrowed = count(AddressUse::Borrowed);
        Self {
            cidr: block.cidr.to_string(),
            owner: match &block.owner {
                Some(owner) if owner.node().is_some() => printable(owner.node().unwrap_or_default()),
                Some(other) => printable(&other.to_string()),
                None => String::new(),
            },
            in_use: count(AddressUse::Used) + borrowed,
            borrowed,
            in_cooldown: count(AddressUse::InCooldown),
            reserved: count(AddressUse::Reserved),
            free: count(AddressUse::Free),
            addresses: block.uses.iter().map(|found| sign(*found)).collect(),
            net: block.cidr,
            uses: block.uses,
        }
    }

    /// Returns how many tenths of the block's addresses cannot be assigned. Returns 10 tenths only if no address can be
    /// assigned, and 0 tenths only if all addresses can be assigned.
    fn tenths(&self) -> usize {
        let all = self.uses.len();
        let gone = all - self.free;
        match gone {
            0 => 0,
            gone if gone == all => 10,
            gone => (gone * 10 / all).clamp(1, 9),
        }
    }

    fn reported(&self) -> String {
        let owner = if self.owner.is_empty() { "no owner" } else { &self.owner };
        let mut reported = format!("{} ({owner}): {} of {} in use", self.cidr, self.in_use, self.uses.len());
        for (count, what) in
            [(self.borrowed, "borrowed"), (self.in_cooldown, "in cooldown"), (self.reserved, "reserved")]
        {
            if count > 0 {
                reported.push_str(&format!(", {count} {what}"));
            }
        }
        reported
    }
}

impl MapSection {
    /// True if the pool is drawn with one character for each address.
    fn in_detail(&self, detail: MapDetail) -> bool {
        match detail {
            MapDetail::Auto => self.blocks.len() <= MAX_BLOCKS_IN_DETAIL,
            MapDetail::Addresses => true,
            MapDetail::Blocks => false,
        }
    }

    fn heading(&self) -> String {
        let sum = |of: fn(&DrawnBlock) -> usize| self.blocks.iter().map(of).sum::<usize>();
        let name = match (&self.pool, &self.cidr) {
            (Some(pool), Some(cidr)) => format!("{pool}  {cidr}"),
            _ => "in no pool".to_owned(),
        };
        let claimed = self.blocks.len();
        let blocks = match self.places {
            Some(places) => format!("{claimed} of {places} blocks claimed"),
            None if claimed == 1 => "1 block".to_owned(),
            None => format!("{claimed} blocks"),
        };
        let mut heading = format!("{name}  {blocks}");
        if claimed > 0 {
            heading.push_str(&format!(": {} in use", sum(|block| block.in_use)));
            for (count, what) in [
                (sum(|block| block.borrowed), "of them borrowed"),
                (sum(|block| block.in_cooldown), "in cooldown"),
                (sum(|block| block.reserved), "reserved"),
                (sum(|block| block.free), "free"),
            ] {
                if count > 0 {
                    heading.push_str(&format!(", {count} {what}"));
                }
            }
        }
        heading
    }
}

/// The meaning of a character of the drawing, for one or several addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AddressSign {
    /// The use that the character shows. If its addresses have several uses, [`AddressSign::of`] chooses one.
    All(AddressUse),
    /// Some of the addresses that the character stands for are in use, and none of them is borrowed.
    Some,
}

/// The uses of an address, each with its character, its name and its colour in a picture.
const USES: [(AddressUse, char, &str, &str); 5] = [
    (AddressUse::Free, '.', "free", "#e8e8e8"),
    (AddressUse::Used, '#', "in use", "#0059b3"),
    (AddressUse::Borrowed, 'b', "borrowed by another node", "#b3007d"),
    (AddressUse::InCooldown, '~', "in cooldown", "#e0a000"),
    (AddressUse::Reserved, 'r', "reserved", "#707070"),
];

fn use_row(wanted: AddressUse) -> (char, &'static str) {
    USES.iter().find(|(found, ..)| *found == wanted).map_or((' ', ""), |(_, sign, _, colour)| (*sign, colour))
}

fn sign(wanted: AddressUse) -> char {
    use_row(wanted).0
}

fn colour(wanted: AddressUse) -> &'static str {
    use_row(wanted).1
}

/// Returns the colour of a block, which shows how many tenths of the block's addresses cannot be assigned.
fn colour_of_tenths(tenths: usize) -> &'static str {
    const COLOURS: [&str; 11] = [
        "#e8e8e8", "#cfe0f2", "#b5d2ec", "#9ac3e6", "#7fb3df", "#63a3d8", "#4793d0", "#2c82c7", "#1470bd", "#005eb0",
        "#b32400",
    ];
    COLOURS.get(tenths).copied().unwrap_or("#b32400")
}

impl AddressSign {
    /// Summarises the uses of several addresses for one character of the drawing. If the addresses have different uses,
    /// the character shows the first of these that occurs: borrowed, in use, in cooldown, free.
    fn of(uses: &[AddressUse]) -> Self {
        let has = |wanted| uses.contains(&wanted);
        match uses {
            [first, rest @ ..] if rest.iter().all(|found| found == first) => Self::All(*first),
            _ if has(AddressUse::Borrowed) => Self::All(AddressUse::Borrowed),
            _ if has(AddressUse::Used) => Self::Some,
            _ if has(AddressUse::InCooldown) => Self::All(AddressUse::InCooldown),
            _ => Self::All(AddressUse::Free),
        }
    }

    fn sign(self) -> char {
        match self {
            Self::All(found) => sign(found),
            Self::Some => '+',
        }
    }

    /// Returns the SGR colour number of the character in a terminal, or `None` for the default colour.
    fn terminal_colour(self) -> Option<u8> {
        match self {
            Self::All(AddressUse::Free) => None,
            Self::All(AddressUse::Used) | Self::Some => Some(34),
            Self::All(AddressUse::Borrowed) => Some(35),
            Self::All(AddressUse::InCooldown) => Some(33),
            Self::All(AddressUse::Reserved) => Some(90),
        }
    }
}

/// Returns the character for a block, depending on how many tenths of its addresses cannot be assigned.
fn sign_of_tenths(tenths: usize) -> char {
    match tenths {
        0 => '.',
        10 => '#',
        tenths => char::from_digit(u32::try_from(tenths).unwrap_or(9), 10).unwrap_or('9'),
    }
}

/// Returns the SGR colour number for a block of which `tenths` tenths of the addresses cannot be assigned, or `None`
/// for the default colour.
fn terminal_colour_of_tenths(tenths: usize) -> Option<u8> {
    match tenths {
        0 => None,
        1..6 => Some(32),
        6..10 => Some(33),
        _ => Some(31),
    }
}

/// Maximum size, in blocks, of a pool whose unclaimed blocks are drawn. In a pool with more than `MAX_PLACES` blocks,
/// only claimed blocks are drawn.
const MAX_PLACES: u64 = 4096;
/// Maximum length of an owner's name that is drawn in full, in characters.
const MAX_OWNER_CHARS: usize = 24;
/// Minimum number of characters in a drawn line, even if the terminal is too narrow for them.
const MIN_SIGNS: usize = 8;
/// The character for a block that no node has claimed.
const UNCLAIMED_SIGN: char = '-';

/// The layout of a drawing on a terminal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MapStyle {
    /// The width of the drawing in columns.
    pub(crate) width: usize,
    pub(crate) colours: bool,
    pub(crate) detail: MapDetail,
}

/// Draws all pools as text, one below the other, with a legend at the end.
pub(crate) fn draw(sections: &[MapSection], style: MapStyle) -> String {
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
            draw_addresses(&section.blocks, style, &mut text);
        } else {
            has_blocks = true;
            draw_blocks(section, style, &mut text);
        }
        text.push('\n');
    }
    if has_addresses {
        let reported = USES.map(|(_, sign, name, _)| format!("{sign} {name}"));
        text.push_str(&format!("{}   + some in use\n", reported.join("   ")));
    }
    if has_blocks {
        text.push_str(&format!(
            "a sign is a block: . all free   1 to 9 tenths that are not   # none free   {UNCLAIMED_SIGN} not claimed\n"
        ));
    }
    text
}

/// Draws a line of text for each block. Each character of the line stands for one address, or for several addresses if
/// the line would be too long.
fn draw_addresses(blocks: &[DrawnBlock], style: MapStyle, text: &mut String) {
    let cidrs = blocks.iter().map(|block| block.cidr.len()).max().unwrap_or_default();
    let owners = blocks.iter().map(|block| shorten_owner(&block.owner).chars().count()).max().unwrap_or_default();
    let counts = blocks.iter().map(|block| usage_text(block).len()).max().unwrap_or_default();
    let room = style.width.saturating_sub(cidrs + owners + counts + 6).max(MIN_SIGNS);
    for block in blocks {
        let each = block.uses.len().div_ceil(room).max(1);
        let cells: Vec<AddressSign> = block.uses.chunks(each).map(AddressSign::of).collect();
        let owner = shorten_owner(&block.owner);
        text.push_str(&format!("{:cidrs$}  {owner:owners$}  ", block.cidr));
        paint(cells.iter().map(|cell| (cell.sign(), cell.terminal_colour())), style.colours, text);
        let padding = room.min(block.uses.len()).saturating_sub(cells.len());
        text.push_str(&format!("{:padding$}  {:>counts$}\n", "", usage_text(block)));
    }
}

fn usage_text(block: &DrawnBlock) -> String {
    format!("{}/{}", block.in_use, block.uses.len())
}

fn shorten_owner(owner: &str) -> String {
    if owner.chars().count() <= MAX_OWNER_CHARS {
        return owner.to_owned();
    }
    let kept: String = owner.chars().take(MAX_OWNER_CHARS - 1).collect();
    format!("{kept}~")
}

/// Draws one character for each claimed block. Draws unclaimed blocks only if at most [`MAX_PLACES`] blocks fit into
/// the pool.
fn draw_blocks(section: &MapSection, style: MapStyle, text: &mut String) {
    let places = block_places(section);
    let label = |place: &BlockPlace<'_>| place.first.to_string();
    let labels = places.iter().map(|place| label(place).len()).max().unwrap_or_default();
    let room = style.width.saturating_sub(labels + 2).max(MIN_SIGNS);
    // The number of blocks in a line is a power of two, so that the first addresses of lines are round numbers.
    let each = 1 << room.ilog2();
    for line in places.chunks(each) {
        let Some(first) = line.first() else { continue };
        text.push_str(&format!("{:labels$}  ", label(first)));
        let cells = line.iter().map(|place| match place.block {
            Some(block) => (sign_of_tenths(block.tenths()), terminal_colour_of_tenths(block.tenths())),
            None => (UNCLAIMED_SIGN, Some(90)),
        });
        paint(cells, style.colours, text);
        text.push('\n');
    }
}

/// The position of a block in a pool, given by the block's first address; the block need not be claimed.
struct BlockPlace<'a> {
    first: IpAddr,
    block: Option<&'a DrawnBlock>,
}

fn block_places(section: &MapSection) -> Vec<BlockPlace<'_>> {
    let claimed = |block| BlockPlace { first: DrawnBlock::first(block), block: Some(block) };
    let all = section.places.filter(|places| *places <= MAX_PLACES);
    let bits = section.blocks.first().map(|block| block.net.prefix_len());
    let pool = section.cidr.as_ref().and_then(|cidr| cidr.parse::<IpNet>().ok());
    let even = bits.filter(|bits| section.blocks.iter().all(|block| block.net.prefix_len() == *bits));
    let (Some(_), Some(bits), Some(pool)) = (all, even, pool) else {
        return section.blocks.iter().map(claimed).collect();
    };
    let Ok(subnets) = pool.subnets(bits) else { return section.blocks.iter().map(claimed).collect() };
    let mut blocks = section.blocks.iter().peekable();
    subnets.map(|net| BlockPlace { first: net.network(), block: blocks.next_if(|block| block.net == net) }).collect()
}

impl DrawnBlock {
    fn first(&self) -> IpAddr {
        self.net.network()
    }
}

/// Appends characters with their terminal colours to `text`. Neighbouring characters of one colour share an escape
/// sequence.
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

/// The sizes of parts of the SVG picture, in pixels.
const SVG_WIDTH: usize = 1000;
const SVG_MARGIN: usize = 20;
const SVG_LINE: usize = 18;
const SVG_LABEL: usize = 330;
const SVG_CELL: usize = 12;

pub(crate) fn draw_svg(sections: &[MapSection], detail: MapDetail) -> String {
    let mut body = String::new();
    let mut y = SVG_MARGIN;
    for section in sections {
        y += SVG_LINE;
        _ = writeln!(body, r#"<text x="{SVG_MARGIN}" y="{y}" class="h">{}</text>"#, escape_xml(&section.heading()));
        y += SVG_LINE / 2;
        y = if section.in_detail(detail) {
            svg_addresses(&section.blocks, y, &mut body)
        } else {
            svg_blocks(section, y, &mut body)
        };
        y += SVG_LINE;
    }
    y = svg_legend(y, &mut body);
    format!(
        concat!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" "#,
            r#"role="img" font-family="monospace" font-size="12">"#,
            "\n<style>.h{{font-weight:bold;font-size:13px}}</style>\n",
            r##"<rect width="100%" height="100%" fill="#ffffff"/>"##,
            "\n{body}</svg>\n"
        ),
        width = SVG_WIDTH,
        height = y + SVG_MARGIN,
        body = body
    )
}

/// Returns an HTML page with the SVG picture. `about` is the text above the SVG picture, and `below` has the paragraphs
/// after the picture.
pub(crate) fn html(sections: &[MapSection], detail: MapDetail, about: &str, below: &[String]) -> String {
    let below: String = below.iter().map(|line| format!("<p>{}</p>\n", escape_xml(line))).collect();
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>Addresses</title>\n\
         <style>body{{font-family:sans-serif;margin:1em}}svg{{max-width:100%;height:auto}}</style>\n</head>\n<body>\n\
         <p>{}</p>\n{}{below}</body>\n</html>\n",
        escape_xml(about),
        draw_svg(sections, detail)
    )
}

/// Draws a line of rectangles for each block. Neighbouring addresses with the same use share a rectangle.
fn svg_addresses(blocks: &[DrawnBlock], top: usize, body: &mut String) -> usize {
    let mut y = top;
    let room = SVG_WIDTH - SVG_LABEL - 2 * SVG_MARGIN;
    for block in blocks {
        let text = y + SVG_LINE - 5;
        _ = writeln!(body, r#"<g><title>{}</title>"#, escape_xml(&block.reported()));
        let owner = if block.owner.is_empty() { "-" } else { &block.owner };
        let label = clip_label(&format!("{}  {owner}", block.cidr));
        _ = writeln!(body, r#"<text x="{SVG_MARGIN}" y="{text}">{}</text>"#, escape_xml(&label));
        let all = block.uses.len().max(1);
        let mut begun = 0;
        while let Some(first) = block.uses.get(begun) {
            let alike = block.uses.iter().skip(begun).take_while(|found| *found == first).count();
            let (x, width) = (room * begun / all, room * (begun + alike) / all - room * begun / all);
            let (x, fill) = (SVG_MARGIN + SVG_LABEL + x, colour(*first));
            _ = writeln!(
                body,
                r#"<rect x="{x}" y="{}" width="{}" height="{}" fill="{fill}" stroke="white" stroke-width="0.5"/>"#,
                y + 2,
                width.max(1),
                SVG_LINE - 4
            );
            begun += alike;
        }
        body.push_str("</g>\n");
        y += SVG_LINE;
    }
    y
}

fn svg_blocks(section: &MapSection, top: usize, body: &mut String) -> usize {
    let each = 64;
    let mut y = top;
    for line in section.blocks.chunks(each) {
        if let Some(first) = line.first() {
            let text = y + SVG_CELL - 2;
            _ = writeln!(body, r#"<text x="{SVG_MARGIN}" y="{text}">{}</text>"#, escape_xml(&first.cidr));
        }
        for (place, block) in line.iter().enumerate() {
            let (x, size) = (SVG_MARGIN + 180 + place * SVG_CELL, SVG_CELL - 1);
            _ = writeln!(
                body,
                r#"<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="{}"><title>{}</title></rect>"#,
                colour_of_tenths(block.tenths()),
                escape_xml(&block.reported())
            );
        }
        y += SVG_CELL;
    }
    y
}

fn svg_legend(top: usize, body: &mut String) -> usize {
    let mut x = SVG_MARGIN;
    let y = top + SVG_LINE;
    for (_, _, name, fill) in USES {
        _ = writeln!(body, r#"<rect x="{x}" y="{}" width="10" height="10" fill="{fill}"/>"#, y - 9);
        _ = writeln!(body, r#"<text x="{}" y="{y}">{name}</text>"#, x + 15);
        x += 40 + name.len() * 8;
    }
    let y = y + SVG_LINE;
    _ = writeln!(body, r#"<text x="{SVG_MARGIN}" y="{y}">a block: all free</text>"#);
    for tenths in 0..=10 {
        let x = SVG_MARGIN + 130 + tenths * SVG_CELL;
        let fill = colour_of_tenths(tenths);
        _ = writeln!(body, r#"<rect x="{x}" y="{}" width="11" height="11" fill="{fill}"/>"#, y - 10);
    }
    _ = writeln!(body, r#"<text x="{}" y="{y}">none free</text>"#, SVG_MARGIN + 140 + 11 * SVG_CELL);
    y
}

/// Shortens a label of the picture that is longer than its column.
fn clip_label(label: &str) -> String {
    const MAX_LABEL_CHARS: usize = 44;
    if label.chars().count() <= MAX_LABEL_CHARS {
        label.to_owned()
    } else {
        label.chars().take(MAX_LABEL_CHARS - 1).chain(['~']).collect()
    }
}

fn escape_xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn map_sign_shows_most_important_use() {
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
            assert_eq!(AddressSign::of(&uses).sign(), sign, "{uses:?}");
        }
    }

    #[test]
    fn map_text_is_escaped() {
        assert_eq!(escape_xml(r#"<a b="c">&"#), "&lt;a b=&quot;c&quot;&gt;&amp;");
        assert_eq!(clip_label(&"x".repeat(50)).chars().count(), 44);
    }
}
