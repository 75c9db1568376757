//! Blocks as a picture: SVG, alone or in a page of HTML.

use std::fmt::Write;

use super::cells::{USES, colour, colour_of_tenths};
use super::{Detail, Drawn, Section};

/// Sizes in pixels.
const WIDTH: usize = 1000;
const MARGIN: usize = 20;
const LINE: usize = 18;
const LABEL: usize = 330;
const CELL: usize = 12;

/// A picture of all pools.
pub(crate) fn svg(sections: &[Section], detail: Detail) -> String {
    let mut body = String::new();
    let mut y = MARGIN;
    for section in sections {
        y += LINE;
        _ = writeln!(body, r#"<text x="{MARGIN}" y="{y}" class="h">{}</text>"#, escaped(&section.heading()));
        y += LINE / 2;
        y = if section.in_detail(detail) {
            addresses(&section.blocks, y, &mut body)
        } else {
            blocks(section, y, &mut body)
        };
        y += LINE;
    }
    y = legend(y, &mut body);
    format!(
        concat!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" "#,
            r#"role="img" font-family="monospace" font-size="12">"#,
            "\n<style>.h{{font-weight:bold;font-size:13px}}</style>\n",
            r##"<rect width="100%" height="100%" fill="#ffffff"/>"##,
            "\n{body}</svg>\n"
        ),
        width = WIDTH,
        height = y + MARGIN,
        body = body
    )
}

/// The picture in a page of its own, with a text about it, and lines below it.
pub(crate) fn html(sections: &[Section], detail: Detail, about: &str, below: &[String]) -> String {
    let below: String = below.iter().map(|line| format!("<p>{}</p>\n", escaped(line))).collect();
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>Addresses</title>\n\
         <style>body{{font-family:sans-serif;margin:1em}}svg{{max-width:100%;height:auto}}</style>\n</head>\n<body>\n\
         <p>{}</p>\n{}{below}</body>\n</html>\n",
        escaped(about),
        svg(sections, detail)
    )
}

/// Draws a line for each block; neighbouring addresses of the same use share a rectangle.
fn addresses(blocks: &[Drawn], top: usize, body: &mut String) -> usize {
    let mut y = top;
    let room = WIDTH - LABEL - 2 * MARGIN;
    for block in blocks {
        let text = y + LINE - 5;
        _ = writeln!(body, r#"<g><title>{}</title>"#, escaped(&block.reported()));
        let owner = if block.owner.is_empty() { "-" } else { &block.owner };
        let label = clipped(&format!("{}  {owner}", block.cidr));
        _ = writeln!(body, r#"<text x="{MARGIN}" y="{text}">{}</text>"#, escaped(&label));
        let all = block.uses.len().max(1);
        let mut begun = 0;
        while let Some(first) = block.uses.get(begun) {
            let alike = block.uses.iter().skip(begun).take_while(|found| *found == first).count();
            let (x, width) = (room * begun / all, room * (begun + alike) / all - room * begun / all);
            let (x, fill) = (MARGIN + LABEL + x, colour(*first));
            _ = writeln!(
                body,
                r#"<rect x="{x}" y="{}" width="{}" height="{}" fill="{fill}" stroke="white" stroke-width="0.5"/>"#,
                y + 2,
                width.max(1),
                LINE - 4
            );
            begun += alike;
        }
        body.push_str("</g>\n");
        y += LINE;
    }
    y
}

/// Draws a square for each block.
fn blocks(section: &Section, top: usize, body: &mut String) -> usize {
    let each = 64;
    let mut y = top;
    for line in section.blocks.chunks(each) {
        if let Some(first) = line.first() {
            let text = y + CELL - 2;
            _ = writeln!(body, r#"<text x="{MARGIN}" y="{text}">{}</text>"#, escaped(&first.cidr));
        }
        for (place, block) in line.iter().enumerate() {
            let (x, size) = (MARGIN + 180 + place * CELL, CELL - 1);
            _ = writeln!(
                body,
                r#"<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="{}"><title>{}</title></rect>"#,
                colour_of_tenths(block.tenths()),
                escaped(&block.reported())
            );
        }
        y += CELL;
    }
    y
}

fn legend(top: usize, body: &mut String) -> usize {
    let mut x = MARGIN;
    let y = top + LINE;
    for (_, _, name, fill) in USES {
        _ = writeln!(body, r#"<rect x="{x}" y="{}" width="10" height="10" fill="{fill}"/>"#, y - 9);
        _ = writeln!(body, r#"<text x="{}" y="{y}">{name}</text>"#, x + 15);
        x += 40 + name.len() * 8;
    }
    let y = y + LINE;
    _ = writeln!(body, r#"<text x="{MARGIN}" y="{y}">a block: all free</text>"#);
    for tenths in 0..=10 {
        let x = MARGIN + 130 + tenths * CELL;
        let fill = colour_of_tenths(tenths);
        _ = writeln!(body, r#"<rect x="{x}" y="{}" width="11" height="11" fill="{fill}"/>"#, y - 10);
    }
    _ = writeln!(body, r#"<text x="{}" y="{y}">none free</text>"#, MARGIN + 140 + 11 * CELL);
    y
}

/// A label, cut if there is no room for it.
fn clipped(label: &str) -> String {
    const MOST: usize = 44;
    if label.chars().count() <= MOST { label.to_owned() } else { label.chars().take(MOST - 1).chain(['~']).collect() }
}

/// A text, escaped for XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        assert_eq!(escaped(r#"<a b="c">&"#), "&lt;a b=&quot;c&quot;&gt;&amp;");
        assert_eq!(clipped(&"x".repeat(50)).chars().count(), 44);
    }
}
