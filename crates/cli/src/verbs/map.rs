//! `margay ipam map`.

use std::path::Path;
use std::time::SystemTime;

use async_trait::async_trait;
use ipam_operator::Operator;
use kv::Deadline;
use serde::Serialize;

use crate::answer::Answer;
use crate::args;
use crate::command::OnOpenStore;
use crate::error::{Failure, Result};
use crate::map::{Detail, Section, Style, draw, html, sections, svg};
use crate::output::{Screen, rfc3339, whole_file};
use crate::quarantine::{QuarantineRow, rows};
use crate::store::Need;

#[derive(Serialize)]
struct Json<'a> {
    revision: i64,
    pools: &'a [Section],
    quarantined: &'a [QuarantineRow],
}

#[async_trait(?Send)]
impl OnOpenStore for args::Map {
    fn need(&self) -> Need {
        Need::ReadAll
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        let mut census = operator.ipam().census(deadline).await?;
        let quarantined = rows(std::mem::take(&mut census.quarantined));
        let listed: Vec<String> = quarantined.iter().map(QuarantineRow::text).collect();
        let revision = census.revision;
        let sections = sections(census, &self.pool);
        for wanted in &self.pool {
            let is_drawn = |section: &Section| [&section.pool, &section.cidr].contains(&&Some(wanted.clone()));
            if !sections.iter().any(is_drawn) {
                return Err(Failure::new(format!("there is no pool {wanted}"))
                    .hint("see which there are with: margay pool list"));
            }
        }
        let detail = match (self.addresses, self.blocks) {
            (true, _) => Detail::Addresses,
            (_, true) => Detail::Blocks,
            _ => Detail::Auto,
        };
        let mut written = String::new();
        let mut write = |path: &Path, text: &str| -> Result<()> {
            whole_file(path, text)?;
            written.push_str(&format!("Successfully wrote {}\n", path.display()));
            Ok(())
        };
        if let Some(path) = &self.svg {
            write(path, &svg(&sections, detail))?;
        }
        if let Some(path) = &self.html {
            let about = format!("As of {}, at revision {revision}.", rfc3339(SystemTime::now()));
            write(path, &html(&sections, detail, &about, &listed))?;
        }
        let screen = Screen::of_stdout();
        let width = self.width.map_or(screen.width, usize::from);
        let text = match written.is_empty() {
            true => draw(&sections, Style { width, colours: screen.colours, detail }) + &listed.join("\n"),
            false => written,
        };
        let answer =
            Answer::new(text, &Json { revision: revision.get(), pools: &sections, quarantined: &quarantined })?;
        Ok(match sections.is_empty() {
            true => answer.note("there is no pool yet; make one with: margay pool create NAME CIDR"),
            false => answer,
        })
    }
}
