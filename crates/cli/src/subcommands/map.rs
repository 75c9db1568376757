//! Draws the blocks of pools as text, SVG or HTML, for the command `margay ipam map`.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use async_trait::async_trait;
use clap::{ArgGroup, Args};
use ipam_core::quarantine::{QuarantineRow, quarantine_rows};
use ipam_operator::Operator;
use kv::Deadline;
use serde::Serialize;

use super::quarantine::sentence;
use crate::command::{CommandAnswer, OpenStoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::map::{MapDetail, MapSection, MapStyle, draw, draw_svg, html, sections};
use crate::output::{Screen, rfc3339, write_whole_file};
use crate::store::StoreUse;

pub(crate) const HELP: &str = "\
A pool with up to 64 blocks is drawn with a sign for each address, a larger one with a sign for each block.
Colours are for terminals, unless NO_COLOR is set.

Examples:
  margay ipam map
  margay ipam map --pool main --addresses
  margay ipam map --html blocks.html
  margay ipam map -o json | jq '.pools[].blocks[] | select(.free == 0) | .cidr'";

/// The arguments of `ipam map`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("detail"))]
pub(crate) struct Map {
    /// Draw only the pool with this name or range; repeatable
    #[arg(long, value_name = "POOL")]
    pub(crate) pool: Vec<String>,

    /// Draw one character per address, even when there are many blocks
    #[arg(long, group = "detail")]
    pub(crate) addresses: bool,

    /// Draw one character per block, even when there are few blocks
    #[arg(long, group = "detail")]
    pub(crate) blocks: bool,

    /// Width of the map in columns [default: the terminal's, or 100]
    #[arg(long, value_name = "COLUMNS", value_parser = clap::value_parser!(u16).range(20..))]
    pub(crate) width: Option<u16>,

    /// Write the map as an SVG picture to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,

    /// Write the map as an HTML page to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

#[derive(Serialize)]
struct MapJson<'a> {
    revision: i64,
    pools: &'a [MapSection],
    quarantined: &'a [QuarantineRow],
}

#[async_trait(?Send)]
impl OpenStoreCommand for Map {
    fn store_use(&self) -> StoreUse {
        StoreUse::ReadAll
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let mut census = operator.ipam().census(deadline).await?;
        let quarantined = quarantine_rows(std::mem::take(&mut census.quarantined));
        let listed: Vec<String> = quarantined.iter().map(sentence).collect();
        let revision = census.revision;
        let sections = sections(census, &self.pool);
        for wanted in &self.pool {
            let is_drawn = |section: &MapSection| [&section.pool, &section.cidr].contains(&&Some(wanted.clone()));
            if !sections.iter().any(is_drawn) {
                return Err(CommandFailure::new(format!("there is no pool {wanted}"))
                    .hint("list the pools with: margay pool list"));
            }
        }
        let detail = match (self.addresses, self.blocks) {
            (true, _) => MapDetail::Addresses,
            (_, true) => MapDetail::Blocks,
            _ => MapDetail::Auto,
        };
        let mut written = String::new();
        let mut write = |path: &Path, text: &str| -> CommandResult<()> {
            write_whole_file(path, text)?;
            written.push_str(&format!("Successfully wrote {}\n", path.display()));
            Ok(())
        };
        if let Some(path) = &self.svg {
            write(path, &draw_svg(&sections, detail))?;
        }
        if let Some(path) = &self.html {
            let about = format!("As of {}, at revision {revision}.", rfc3339(SystemTime::now()));
            write(path, &html(&sections, detail, &about, &listed))?;
        }
        let screen = Screen::of_stdout();
        let width = self.width.map_or(screen.width, usize::from);
        let text = match written.is_empty() {
            true => draw(&sections, MapStyle { width, colours: screen.colours, detail }) + &listed.join("\n"),
            false => written,
        };
        let answer = CommandAnswer::new(
            text,
            &MapJson { revision: revision.get(), pools: &sections, quarantined: &quarantined },
        )?;
        Ok(match sections.is_empty() {
            true => answer.note("there is no pool yet; make one with: margay pool create NAME CIDR"),
            false => answer,
        })
    }
}
